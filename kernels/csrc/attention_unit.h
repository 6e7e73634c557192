/* The partial results of one item's rows over one unit of keys.

   Keys are brought to float32 in tiles, turned so that those side by side are scored together. Few
   rows go through them a part at a time for all heads, and read values where they lie; many rows
   take one head at a time, and share tiles of values too. Both give a row the same bits
   (attention_rows.h). Knows rows, slots and strides; nothing of what becomes of a partial. */

#ifndef RADIXKV_ATTENTION_UNIT_H
#define RADIXKV_ATTENTION_UNIT_H

#include "attention.h"
#include "attention_rows.h"

enum {
    PART = 32,         /* tokens that few rows read at a time for all heads; a multiple of LANES */
    FEW = 6,           /* rows of one key head that read values in place: a tile would cost more, */
    FEW_FLOATS = 12,   /* and more yet where nothing needs to be converted */
    TILE_FLOATS = 4096 /* of keys or values brought to float32 at a time: half of a usual L1 */
};

/* One thread's memory for one item: rows of key head h, token i and group member g are at
   ((h - item->head) * count + i) * group + g. */
typedef struct {
    float *q, *scores, *part, *sums, *tile; /* part: of this unit; sums: folded so far */
    float *part_peak, *part_total, *peak, *total;
    int32_t *low, *high; /* what each row of a key head sees of the unit */
} Scratch;

INLINE int64_t tile_tokens(int64_t dim) {
    int64_t tokens = TILE_FLOATS / dim / 16 * 16;
    return tokens < 16 ? 16 : tokens > UNIT_TOKENS ? UNIT_TOKENS : tokens;
}

static int64_t lay_out(Scratch *s, float *at, int64_t rows, int64_t dim) {
    float *start = at;
    s->q = at, at += rows * dim;
    s->part = at, at += rows * dim;
    s->sums = at, at += rows * dim;
    s->tile = at, at += (tile_tokens(dim) + 4 * LANES) * dim;
    s->scores = at, at += rows * SCORES;
    s->part_peak = at, at += rows;
    s->part_total = at, at += rows;
    s->peak = at, at += rows;
    s->total = at, at += rows;
    s->low = (int32_t *)at, at += rows;
    s->high = (int32_t *)at, at += rows;
    return (at - start + 15) / 16 * 16;
}

int64_t radixkv_attend_scratch(int64_t max_rows, int64_t head_dim) {
    Scratch s;
    float nothing[1];
    return lay_out(&s, nothing, max_rows, head_dim);
}

INLINE int64_t row_at(const Item *item, int64_t group, int64_t head, int64_t token) {
    return ((head - item->head) * item->count + token) * group;
}

/* Where each token of the unit lies, in bytes from the layer's start. */
INLINE void find_keys(const Step *step, const Item *item, int64_t first, int from, int to,
                      int64_t token_bytes, int64_t *offsets) {
    const int32_t *table = step->tables + item->seq * step->table_width;
    int64_t size = step->block_size, block = (first + from) / size, at = (first + from) % size;
    for (int t = from; t < to; t++) {
        offsets[t] = (table[block] * size + at) * token_bytes;
        if (++at == size) at = 0, block++;
    }
    for (int t = 0; t < AHEAD + 4; t++) offsets[to + t] = offsets[to - 1];
}

/* Call with R = 3, 2 or 1 for the rows 0 .. count - 1, never 1 for the last of four. */
#define FOR_ROWS(count, r, R, CALL)                                 \
    for (int64_t r = 0, R; r < (count); r += R) {                   \
        R = (count) - r == 4 ? 2 : (count) - r > 3 ? 3 : (count) - r; \
        if (R == 3) { CALL(3, r); }                                 \
        else if (R == 2) { CALL(2, r); }                            \
        else { CALL(1, r); }                                        \
    }

/* One row's own tokens at the rims of what a group of rows sees together. */
ONCE void add_row(int type, int64_t dim, const float *weights, int count, const char *values,
                  const int64_t *offsets, float *sums) {
    if (count <= 0) return;
    if (type == FLOAT32) add_rows(1, FLOAT32, 0, dim, weights, count, values, offsets, sums);
    else if (type == BFLOAT16) add_rows(1, BFLOAT16, 0, dim, weights, count, values, offsets, sums);
    else add_rows(1, FLOAT16, 0, dim, weights, count, values, offsets, sums);
}

/* Add values [from, to) to R rows, to each what its token sees, in order: row by row what comes
   before, together what all of them see, row by row what comes after. */
INLINE void add_seen(int R, int type, int fetch, int64_t dim, int64_t r, const Scratch *s,
                     const float *scores, const char *values, const int64_t *offsets, int from,
                     int to, float *sums) {
    int low = from, high = to, first[3], last[3];
    for (int n = 0; n < R; n++) {
        first[n] = s->low[r + n], last[n] = s->high[r + n];
        if (first[n] < from) first[n] = from;
        if (last[n] > to) last[n] = to;
        if (first[n] > low) low = first[n];
        if (last[n] < high) high = last[n];
    }
    if (low >= high) low = high = to;
    scores -= from, offsets -= from;
    int together = low == from && high == to;
    for (int n = 0; n < R && !together; n++)
        add_row(type, dim, scores + n * SCORES + first[n], (last[n] < low ? last[n] : low) - first[n],
                values, offsets + first[n], sums + n * dim);
    if (low < high)
        add_rows(R, type, fetch, dim, scores + low, high - low, values, offsets + low, sums);
    for (int n = 0; n < R && !together; n++)
        add_row(type, dim, scores + n * SCORES + high, last[n] - high, values, offsets + high,
                sums + n * dim);
}

/* Vectors of keys side by side in the next block of a turned tile. */
INLINE int columns_of(int count) { return count > 2 * LANES ? 4 : count > LANES ? 2 : 1; }

/* Bring a tile of keys to float32, turned so that score_lanes can read them; what fills the last
   block is the last key. */
INLINE void bring_turned(int type, int fetch, const char *from, const int64_t *offsets, int count,
                         int64_t dim, float *tile) {
    int size = element_size(type);
    for (int t = 0, columns; t < count; tile += columns * LANES * dim, t += columns * LANES) {
        columns = columns_of(count - t);
        for (int c = 0; c < columns; c++)
            for (int64_t d = 0; d < dim; d += LANES) {
                vf square[LANES];
                for (int i = 0; i < LANES; i++) {
                    int key = t + c * LANES + i;
                    square[i] = load(from + offsets[key < count ? key : count - 1] + d * size, type);
                    if (fetch && d * size % 64 == 0)
                        __builtin_prefetch(from + offsets[key + AHEAD] + d * size);
                }
                turn(square);
                for (int i = 0; i < LANES; i++)
                    put(tile + ((d + i) * columns + c) * LANES, square[i]);
            }
    }
}

/* Scores of R rows against the next `count` keys of a turned tile. */
INLINE void score_keys(int R, int64_t dim, const float *q, const float *keys, int count,
                       float *scores) {
    for (int t = 0, columns; t < count; t += columns * LANES, keys += columns * LANES * dim) {
        columns = columns_of(count - t);
        if (columns == 4) score_lanes(R, 4, dim, q, keys, scores + t);
        else if (columns == 2) score_lanes(R, 2, dim, q, keys, scores + t);
        else score_lanes(R, 1, dim, q, keys, scores + t);
    }
}

INLINE void soften_rows(const Step *step, const Layer *layer, const Item *item, int64_t head,
                        int64_t first, Scratch *s) {
    int64_t group = step->num_q_heads / step->num_kv_heads;
    for (int64_t i = 0; i < item->count; i++) {
        int low = s->low[i * group], high = s->high[i * group];
        if (low >= high) continue;
        int64_t away = first - step->positions[step->rows[item->first + i]];
        for (int64_t g = 0; g < group; g++) {
            int64_t row = row_at(item, group, head, i) + g;
            float slope = layer->slopes ? layer->slopes[head * group + g] : 0;
            soften(s->scores + row * SCORES, low, high, away, slope, layer,
                   &s->part_peak[row], &s->part_total[row]);
        }
    }
}

/* Few rows: a part for all heads at a time, and values are read where they lie. */
INLINE void read_in_place(int type, const Step *step, const Layer *layer, const Item *item,
                          int64_t first, int from, int to, Scratch *s) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    int64_t rows = item->count * group, head_bytes = dim * element_size(type);
    int64_t token_bytes = head_bytes * step->num_kv_heads, offsets[UNIT_TOKENS + AHEAD + 4];
    find_keys(step, item, first, from, to, token_bytes, offsets);
    for (int t = from; t < to; t += PART) {
        int count = to - t < PART ? to - t : PART;
        for (int64_t h = item->head; h < item->head_stop; h++) {
            int64_t row = row_at(item, group, h, 0);
            const char *keys = (const char *)layer->k + h * head_bytes;
            const float *q = s->q + row * dim;
            float *scores = s->scores + row * SCORES;
            bring_turned(type, 1, keys, offsets + t, count, dim, s->tile);
#define SCORE(R, r) \
    score_keys(R, dim, q + (r)*dim, s->tile, count, scores + (r)*SCORES + t)
            FOR_ROWS(rows, r, R, SCORE)
#undef SCORE
        }
    }
    for (int t = from; t < to && t < from + AHEAD; t++)
        for (int64_t b = item->head * head_bytes; b < item->head_stop * head_bytes; b += 64)
            __builtin_prefetch((const char *)layer->v + offsets[t] + b);
    for (int64_t h = item->head; h < item->head_stop; h++)
        soften_rows(step, layer, item, h, first, s);
    for (int t = from; t < to; t += PART) {
        int stop = to - t < PART ? to : t + PART;
        for (int64_t h = item->head; h < item->head_stop; h++) {
            int64_t row = row_at(item, group, h, 0);
            const char *values = (const char *)layer->v + h * head_bytes;
            const float *scores = s->scores + row * SCORES;
            float *sums = s->part + row * dim;
#define ADD(R, r)                                                                          \
    add_seen(R, type, 1, dim, r, s, scores + (r)*SCORES + t, values, offsets + t, t, stop, \
             sums + (r)*dim)
            FOR_ROWS(rows, r, R, ADD)
#undef ADD
        }
    }
}

/* Bring a tile of values to float32. */
INLINE void bring(int type, const char *from, const int64_t *offsets, int count, int64_t dim,
                  float *tile) {
    int size = element_size(type);
    for (int t = 0; t < count; t++)
        for (int64_t d = 0; d < dim; d += LANES)
            put(tile + t * dim + d, load(from + offsets[t] + d * size, type));
}

/* What will be brought next; it is fetched a few tokens at a time while rows are computed, because
   a burst of fetches would wait for itself. */
typedef struct {
    const char *from;
    const int64_t *offsets;
    int64_t count, bytes;
} Next;

INLINE void fetch_share(const Next *next, int64_t row, int64_t row_stop, int64_t rows) {
    for (int64_t t = next->count * row / rows; t < next->count * row_stop / rows; t++)
        for (int64_t b = 0; b < next->bytes; b += 64)
            __builtin_prefetch(next->from + next->offsets[t] + b, 0, 2);
}

/* scores of many rows against a turned tile of keys; rows that see nothing of it are left out. */
ONCE void score_tile(int64_t rows, int64_t dim, const float *q, const float *tile,
                     int from, int count, const Scratch *s, const Next *next, float *scores) {
#define SCORE(R, r)                                                          \
    fetch_share(next, r, (r) + R, rows);                                     \
    if (s->high[(r) + R - 1] <= from || s->low[r] >= from + count) continue; \
    score_keys(R, dim, q + (r)*dim, tile, count, scores + (r)*SCORES + from)
    FOR_ROWS(rows, r, R, SCORE)
#undef SCORE
}

ONCE void add_tile(int64_t rows, int64_t dim, const float *scores, const float *tile,
                   const int64_t *lines, int from, int count, const Scratch *s, const Next *next,
                   float *sums) {
#define ADD(R, r)                                                                      \
    fetch_share(next, r, (r) + R, rows);                                               \
    add_seen(R, FLOAT32, 0, dim, r, s, scores + (r)*SCORES + from, (const char *)tile, \
             lines, from, from + count, sums + (r)*dim)
    FOR_ROWS(rows, r, R, ADD)
#undef ADD
}

/* Many rows of one key head: tiles of keys, then of values, are brought to float32 once for all. */
INLINE void read_tiles(int type, const Step *step, const Layer *layer, const Item *item,
                       int64_t head, int64_t first, int from, int to, Scratch *s) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    int64_t rows = item->count * group, head_bytes = dim * element_size(type);
    int64_t token_bytes = head_bytes * step->num_kv_heads, row = row_at(item, group, head, 0);
    int64_t offsets[UNIT_TOKENS + AHEAD + 4], lines[UNIT_TOKENS], tile = tile_tokens(dim);
    for (int64_t t = 0; t < tile; t++) lines[t] = t * dim * sizeof(float);
    find_keys(step, item, first, from, to, token_bytes, offsets);
    const char *keys = (const char *)layer->k + head * head_bytes;
    const char *values = (const char *)layer->v + head * head_bytes;
    for (int t = from; t < to; t += tile) {
        int64_t count = to - t < tile ? to - t : tile;
        Next next = {keys, offsets + t + tile, to - t - count, head_bytes};
        if (!next.count) next.from = values, next.offsets = offsets + from, next.count = to - from;
        if (next.count > tile) next.count = tile;
        bring_turned(type, 0, keys, offsets + t, count, dim, s->tile);
        score_tile(rows, dim, s->q + row * dim, s->tile, t, count, s, &next,
                   s->scores + row * SCORES);
    }
    soften_rows(step, layer, item, head, first, s);
    for (int t = from; t < to; t += tile) {
        int64_t count = to - t < tile ? to - t : tile;
        Next next = {values, offsets + t + tile, to - t - count, head_bytes};
        if (next.count > tile) next.count = tile;
        bring(type, values, offsets + t, count, dim, s->tile);
        add_tile(rows, dim, s->scores + row * SCORES, s->tile, lines, t, count, s, &next,
                 s->part + row * dim);
    }
}

/* Compute the partial result of all rows of the item over one unit; whether any row sees it. */
INLINE int attend_unit(int type, const Step *step, const Layer *layer, const Item *item,
                       int64_t unit, Scratch *s) {
    int64_t group = step->num_q_heads / step->num_kv_heads, first = unit * UNIT_TOKENS;
    int from = UNIT_TOKENS, to = 0;
    for (int64_t i = 0; i < item->count; i++) {
        int64_t position = step->positions[step->rows[item->first + i]] - first;
        int64_t low = step->window ? position - step->window + 1 : 0, high = position + 1;
        if (low < 0) low = 0;
        if (high > UNIT_TOKENS) high = UNIT_TOKENS;
        if (low >= high) low = high = low < UNIT_TOKENS ? 0 : UNIT_TOKENS;
        for (int64_t row = i * group; row < (i + 1) * group; row++)
            s->low[row] = low, s->high[row] = high;
        if (low < high && low < from) from = low;
        if (low < high && high > to) to = high;
    }
    if (from >= to) return 0;
    int64_t rows = row_at(item, group, item->head_stop, 0);
    memset(s->part, 0, rows * step->head_dim * sizeof(float));
    if (item->count * group <= (type == FLOAT32 ? FEW_FLOATS : FEW))
        read_in_place(type, step, layer, item, first, from, to, s);
    else
        for (int64_t h = item->head; h < item->head_stop; h++)
            read_tiles(type, step, layer, item, h, first, from, to, s);
    return 1;
}

#endif
