/* Paged attention of one step: which rows meet which units of keys, on which thread, and how their
   partial results are folded. Knows items and partials; nothing of layers or models. */

#include "attention_unit.h"
#include "pool.h"

ONCE void load_queries(const Step *step, const Layer *layer, const Item *item, Scratch *s) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    int type = step->q_type, size = element_size(type);
    for (int64_t i = 0; i < item->count; i++)
        for (int64_t h = item->head * group; h < item->head_stop * group; h++) {
            float *to = s->q + (row_at(item, group, h / group, i) + h % group) * dim;
            const char *from = (const char *)layer->q +
                               (step->rows[item->first + i] * layer->q_row_stride +
                                h * layer->q_head_stride) * size;
            for (int64_t d = 0; d < dim; d += LANES) {
                if (type == FLOAT32) put(to + d, load(from + d * size, FLOAT32));
                else if (type == BFLOAT16) put(to + d, load(from + d * size, BFLOAT16));
                else put(to + d, load(from + d * size, FLOAT16));
            }
        }
}

INLINE float *partial_at(const Step *step, int64_t slot) {
    return step->partials + slot * step->num_q_heads * (step->head_dim + 2);
}

/* Copy the rows of one token between scratch and its place among the partials. */
INLINE void store_partial(const Step *step, const Item *item, int64_t token, int64_t slot,
                          const float *sums, const float *peak, const float *total) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    float *to = partial_at(step, slot), *peaks = to + step->num_q_heads * dim;
    for (int64_t h = item->head; h < item->head_stop; h++) {
        int64_t row = row_at(item, group, h, token), at = h * group;
        memcpy(to + at * dim, sums + row * dim, group * dim * sizeof(float));
        memcpy(peaks + at, peak + row, group * sizeof(float));
        memcpy(peaks + step->num_q_heads + at, total + row, group * sizeof(float));
    }
}

/* Start the rows of an item: from nothing but the sinks, or from the partials left for them. */
INLINE void open_rows(const Step *step, const Layer *layer, const Item *item, int finish,
                      Scratch *s) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    for (int64_t i = 0; i < item->count; i++) {
        int64_t token = step->rows[item->first + i], ref = 0, ref_stop = 0;
        if (finish && step->ref_start) ref = step->ref_start[token], ref_stop = step->ref_start[token + 1];
        for (int64_t h = item->head * group; h < item->head_stop * group; h++) {
            int64_t row = row_at(item, group, h / group, i) + h % group;
            float *sums = s->sums + row * dim;
            if (ref < ref_stop) {
                const float *from = partial_at(step, step->refs[ref]);
                const float *peaks = from + step->num_q_heads * dim;
                memcpy(sums, from + h * dim, dim * sizeof(float));
                s->peak[row] = peaks[h], s->total[row] = peaks[step->num_q_heads + h];
            } else {
                memset(sums, 0, dim * sizeof(float));
                s->peak[row] = layer->sinks ? layer->sinks[h] * LOG2_E : -INFINITY;
                s->total[row] = layer->sinks ? 1 : 0;
            }
            for (int64_t r = ref + 1; r < ref_stop; r++) {
                const float *from = partial_at(step, step->refs[r]);
                const float *peaks = from + step->num_q_heads * dim;
                fold(dim, sums, &s->peak[row], &s->total[row], from + h * dim, peaks[h],
                     peaks[step->num_q_heads + h]);
            }
        }
    }
}

ONCE void write_rows(const Step *step, const Layer *layer, const Item *item, const Scratch *s) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    int type = step->out_type, size = element_size(type);
    for (int64_t i = 0; i < item->count; i++)
        for (int64_t h = item->head * group; h < item->head_stop * group; h++) {
            int64_t row = row_at(item, group, h / group, i) + h % group;
            char *to = (char *)layer->out + (step->rows[item->first + i] * layer->out_row_stride +
                                             h * layer->out_head_stride) * size;
            float share = 1 / s->total[row];
            const float *sums = s->sums + row * dim;
            if (type == FLOAT32)
                for (int64_t d = 0; d < dim; d++) store_one(to + d * 4, sums[d] * share, FLOAT32);
            else if (type == BFLOAT16)
                for (int64_t d = 0; d < dim; d++) store_one(to + d * 2, sums[d] * share, BFLOAT16);
            else
                for (int64_t d = 0; d < dim; d++) store_one(to + d * 2, sums[d] * share, FLOAT16);
        }
}

INLINE void run_item(int type, const Step *step, const Layer *layer, const Item *item, int finish,
                     Scratch *s) {
    int64_t dim = step->head_dim, group = step->num_q_heads / step->num_kv_heads;
    int64_t folds = finish || item->opens, slot = item->slot;
    if (item->unit < item->unit_stop) load_queries(step, layer, item, s);
    if (folds) open_rows(step, layer, item, finish, s);
    for (int64_t unit = item->unit; unit < item->unit_stop; unit++) {
        if (attend_unit(type, step, layer, item, unit, s))
            for (int64_t i = 0; i < item->count; i++) {
                if (!folds)
                    store_partial(step, item, i, slot + i, s->part, s->part_peak, s->part_total);
                else if (s->low[i * group] < s->high[i * group])
                    for (int64_t h = item->head; h < item->head_stop; h++)
                        for (int64_t row = row_at(item, group, h, i), g = 0; g < group; g++, row++)
                            fold(dim, s->sums + row * dim, &s->peak[row], &s->total[row],
                                 s->part + row * dim, s->part_peak[row], s->part_total[row]);
            }
        slot += item->stride;
    }
    if (finish) write_rows(step, layer, item, s);
    else if (folds)
        for (int64_t i = 0; i < item->count; i++)
            store_partial(step, item, i, item->slot + i, s->sums, s->peak, s->total);
}

ONCE void run_float32(const Step *step, const Layer *layer, const Item *item, int finish,
                      Scratch *s) {
    run_item(FLOAT32, step, layer, item, finish, s);
}

ONCE void run_bfloat16(const Step *step, const Layer *layer, const Item *item, int finish,
                       Scratch *s) {
    run_item(BFLOAT16, step, layer, item, finish, s);
}

ONCE void run_float16(const Step *step, const Layer *layer, const Item *item, int finish,
                      Scratch *s) {
    run_item(FLOAT16, step, layer, item, finish, s);
}

typedef struct {
    const Step *step;
    const Layer *layer;
    const Item *items;
    int finish;
} Loop;

static void do_item(void *context, int64_t item, int64_t thread) {
    const Loop *loop = context;
    const Step *step = loop->step;
    Scratch s;
    lay_out(&s, step->scratch + thread * step->scratch_floats, step->max_rows, step->head_dim);
    void (*run)(const Step *, const Layer *, const Item *, int, Scratch *) =
        step->pool_type == FLOAT32    ? run_float32
        : step->pool_type == BFLOAT16 ? run_bfloat16
                                      : run_float16;
    run(step, loop->layer, loop->items + item, loop->finish, &s);
}

void radixkv_attend(const Step *step, const Layer *layer) {
    Loop parts = {step, layer, step->parts, 0}, finishes = {step, layer, step->finishes, 1};
    radixkv_parallel(step->num_parts, step->num_threads, do_item, &parts);
    radixkv_parallel(step->num_finishes, step->num_threads, do_item, &finishes);
}

int64_t radixkv_check_tables(const int32_t *tables, int64_t table_width, int64_t block_size,
                             const int32_t *lengths, int64_t num_seqs, int64_t num_blocks) {
    for (int64_t seq = 0; seq < num_seqs; seq++) {
        int64_t used = (lengths[seq] + block_size - 1) / block_size;
        uint32_t highest = 0; /* a negative id is a high one */
        for (int64_t b = 0; b < used; b++) {
            uint32_t id = tables[seq * table_width + b];
            highest = id > highest ? id : highest;
        }
        if (used && highest >= num_blocks) return seq;
    }
    return -1;
}
