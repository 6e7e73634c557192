/* Paged attention for sequences with one new token.

   The keys and values of a sequence are read where they lie, each once for all the query heads of
   its group. The work is cut into units of at most MAX_UNIT tokens of one sequence, whatever else is
   in the batch and however many threads there are, so a row's bits depend on its own length alone.
   Knows slots and strides; nothing of layers or models. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#define MAX_UNIT 256 /* tokens of the longest unit */
#define TILE 128     /* tokens per step of the running softmax; a multiple of LANES and PART */
#define PART 16      /* tokens read at a time for all heads; a multiple of 4 */
#define AHEAD 16     /* tokens between what is computed and what is fetched from memory: hardware
                        prefetchers do not see through block tables, and one core's window of
                        outstanding loads is too short to overlap memory with arithmetic */

typedef struct {
    int64_t num_seqs, num_units, num_q_heads, num_kv_heads, head_dim, block_size, table_width;
    int64_t type, num_threads, window; /* window 0: none */
    const int32_t *tables;             /* [S, table_width] */
    const int64_t *rows;               /* [S] row of q and out */
    const int64_t *lengths;            /* [S] valid tokens; the query is at the last of them */
    const int64_t *unit_seq;           /* [U] ascending */
    const int64_t *unit_start;         /* [U] first token of the unit */
    const int64_t *unit_stop;          /* [U] */
    const int64_t *first_unit;         /* [S + 1] */
} Step;

typedef struct {
    const char *q;
    const char *k, *v;
    char *out; /* contiguous */
    float *partial; /* [U, num_q_heads, head_dim + 2]: sums, then peak and total */
    const float *sinks, *slopes; /* [num_q_heads] or NULL */
    int64_t q_row_stride, q_head_stride; /* elements */
    float scale, soft_cap; /* soft_cap 0: none */
} Layer;

/* Sum the lanes of four vectors at once. */
INLINE void sums_of_four(vf a, vf b, vf c, vf d, float *out) {
#if LANES == 8 && defined(__AVX2__)
    typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
    vf abcd = __builtin_ia32_haddps256(__builtin_ia32_haddps256(a, b), __builtin_ia32_haddps256(c, d));
    *(v4 *)out = __builtin_ia32_vextractf128_ps256(abcd, 0) + __builtin_ia32_vextractf128_ps256(abcd, 1);
#else
    out[0] = sum_v(a), out[1] = sum_v(b), out[2] = sum_v(c), out[3] = sum_v(d);
#endif
}

/* scores[r * TILE + t] = q[r] . keys[t] for R <= 3 query rows of one head. Twelve accumulators and
   the operands fill sixteen registers; named, because compilers put arrays of them on the stack. */
INLINE void score_rows(int R, int type, int64_t dim, const float *q, const char *keys,
                       const int64_t *offsets, int count, float *scores) {
    int size = element_size(type);
    for (int t = 0; t < count; t += 4) {
        const char *k0 = keys + offsets[t];
        const char *k1 = keys + offsets[t + 1 < count ? t + 1 : t];
        const char *k2 = keys + offsets[t + 2 < count ? t + 2 : t];
        const char *k3 = keys + offsets[t + 3 < count ? t + 3 : t];
        const int64_t *next = offsets + t + AHEAD;
        vf a0 = splat(0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0, c0 = a0,
           c1 = a0, c2 = a0, c3 = a0;
        for (int64_t d = 0; d < dim; d += LANES) {
            vf x = get(q + d), y = x, z = x, k;
            if (d & LANES || LANES * size >= 64) {
                __builtin_prefetch(keys + next[0] + d * size);
                __builtin_prefetch(keys + next[1] + d * size);
            }
            if (!(d & LANES) || LANES * size >= 64) {
                __builtin_prefetch(keys + next[2] + d * size);
                __builtin_prefetch(keys + next[3] + d * size);
            }
            if (R > 1) y = get(q + dim + d);
            if (R > 2) z = get(q + 2 * dim + d);
            k = load(k0 + d * size, type), a0 += x * k;
            if (R > 1) b0 += y * k;
            if (R > 2) c0 += z * k;
            k = load(k1 + d * size, type), a1 += x * k;
            if (R > 1) b1 += y * k;
            if (R > 2) c1 += z * k;
            k = load(k2 + d * size, type), a2 += x * k;
            if (R > 1) b2 += y * k;
            if (R > 2) c2 += z * k;
            k = load(k3 + d * size, type), a3 += x * k;
            if (R > 1) b3 += y * k;
            if (R > 2) c3 += z * k;
        }
        sums_of_four(a0, a1, a2, a3, scores + t);
        if (R > 1) sums_of_four(b0, b1, b2, b3, scores + TILE + t);
        if (R > 2) sums_of_four(c0, c1, c2, c3, scores + 2 * TILE + t);
    }
}

/* sums[r * dim + i] += sum over t of weights[r * TILE + t] * values[t][i], C <= 4 vectors of i. */
INLINE void add_part(int R, int C, int type, int64_t dim, const float *weights, int count,
                     const char *values, const int64_t *offsets, float *sums) {
    int step = LANES * element_size(type);
    float *sa = sums, *sb = sums + dim, *sc = sums + 2 * dim;
    vf a0 = get(sa), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0, c0 = a0,
       c1 = a0, c2 = a0, c3 = a0;
    if (C > 1) a1 = get(sa + LANES);
    if (C > 2) a2 = get(sa + 2 * LANES), a3 = get(sa + 3 * LANES);
    if (R > 1) b0 = get(sb);
    if (R > 1 && C > 1) b1 = get(sb + LANES);
    if (R > 1 && C > 2) b2 = get(sb + 2 * LANES), b3 = get(sb + 3 * LANES);
    if (R > 2) c0 = get(sc);
    if (R > 2 && C > 1) c1 = get(sc + LANES);
    if (R > 2 && C > 2) c2 = get(sc + 2 * LANES), c3 = get(sc + 3 * LANES);
    for (int t = 0; t < count; t++) {
        const char *value = values + offsets[t], *next = values + offsets[t + AHEAD];
        for (int b = 0; b < C * step; b += 64) __builtin_prefetch(next + b);
        vf x = splat(weights[t]), y = x, z = x, v;
        if (R > 1) y = splat(weights[TILE + t]);
        if (R > 2) z = splat(weights[2 * TILE + t]);
        v = load(value, type), a0 += x * v;
        if (R > 1) b0 += y * v;
        if (R > 2) c0 += z * v;
        if (C > 1) {
            v = load(value + step, type), a1 += x * v;
            if (R > 1) b1 += y * v;
            if (R > 2) c1 += z * v;
        }
        if (C > 2) {
            v = load(value + 2 * step, type), a2 += x * v;
            if (R > 1) b2 += y * v;
            if (R > 2) c2 += z * v;
            v = load(value + 3 * step, type), a3 += x * v;
            if (R > 1) b3 += y * v;
            if (R > 2) c3 += z * v;
        }
    }
    put(sa, a0);
    if (C > 1) put(sa + LANES, a1);
    if (C > 2) put(sa + 2 * LANES, a2), put(sa + 3 * LANES, a3);
    if (R > 1) put(sb, b0);
    if (R > 1 && C > 1) put(sb + LANES, b1);
    if (R > 1 && C > 2) put(sb + 2 * LANES, b2), put(sb + 3 * LANES, b3);
    if (R > 2) put(sc, c0);
    if (R > 2 && C > 1) put(sc + LANES, c1);
    if (R > 2 && C > 2) put(sc + 2 * LANES, c2), put(sc + 3 * LANES, c3);
}

INLINE void add_rows(int R, int type, int64_t dim, const float *weights, int count,
                     const char *values, const int64_t *offsets, float *sums) {
    int size = element_size(type);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_part(R, 4, type, dim, weights, count, values + d * size, offsets, sums + d);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_part(R, 2, type, dim, weights, count, values + d * size, offsets, sums + d);
    for (; d < dim; d += LANES)
        add_part(R, 1, type, dim, weights, count, values + d * size, offsets, sums + d);
}

/* Turn a tile of raw scores of one row into weights; rescale what the row has summed so far. */
INLINE void soften(float *scores, int count, float bias, float slope, const Layer *layer,
                   int64_t dim, float *sums, float *peak, float *total) {
    vf top = splat(-INFINITY), lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int t = count; t < (count + LANES - 1) / LANES * LANES; t++) scores[t] = 0;
    for (int t = 0; t < count; t += LANES) {
        vf x = get(scores + t);
        x *= layer->scale;
        if (layer->soft_cap > 0) x = layer->soft_cap * tanh_v(x / layer->soft_cap);
        x += bias + slope * (lane + (float)t);
        vi inside = lane + (float)t < (float)count;
        x = (vf)((inside & (vi)x) | (~inside & (vi)splat(-INFINITY)));
        top = (vf)((x > top & (vi)x) | (~(x > top) & (vi)top));
        put(scores + t, x);
    }
    float highest = max_v(top);
    if (highest > *peak) {
        float shrink = *peak == -INFINITY ? 0.0f : expf(*peak - highest);
        for (int64_t d = 0; d < dim; d++) sums[d] *= shrink;
        *total *= shrink;
        *peak = highest;
    }
    vf mass = splat(0);
    for (int t = 0; t < count; t += LANES) {
        vf x = get(scores + t);
        x = exp_v(x - *peak);
        mass += x;
        put(scores + t, x);
    }
    *total += sum_v(mass);
}

INLINE void attend_unit(int type, const Step *step, const Layer *layer, int64_t unit, float *q,
                        float *scores) {
    int64_t dim = step->head_dim, heads = step->num_kv_heads, q_heads = step->num_q_heads;
    int64_t group = q_heads / heads, size = step->block_size, seq = step->unit_seq[unit];
    const int32_t *table = step->tables + seq * step->table_width;
    const char *query = layer->q + step->rows[seq] * layer->q_row_stride * element_size(type);
    for (int64_t h = 0; h < q_heads; h++)
        for (int64_t d = 0; d < dim; d++)
            q[h * dim + d] =
                load_one(query + (h * layer->q_head_stride + d) * element_size(type), type);

    float *sums = layer->partial + unit * q_heads * (dim + 2);
    float *peaks = sums + q_heads * dim, *totals = peaks + q_heads;
    memset(sums, 0, q_heads * dim * sizeof(float));
    for (int64_t h = 0; h < q_heads; h++) peaks[h] = -INFINITY, totals[h] = 0;

    int64_t token_bytes = heads * dim * element_size(type), head_bytes = dim * element_size(type);
    int64_t first = step->unit_start[unit], count_all = step->unit_stop[unit] - first;
    int64_t offsets[MAX_UNIT + AHEAD + 4], block = first / size, at = first - block * size;
    for (int64_t t = 0; t < count_all; t++) {
        offsets[t] = ((int64_t)table[block] * size + at) * token_bytes;
        if (++at == size) at = 0, block++;
    }
    for (int t = 0; t < AHEAD + 4; t++) offsets[count_all + t] = offsets[count_all - 1];
    for (int64_t done = 0; done < count_all; done += TILE) {
        int count = count_all - done < TILE ? count_all - done : TILE;
        for (int t = 0; t < count; t += PART) {
            const int64_t *here = offsets + done + t;
            int n = count - t < PART ? count - t : PART;
            for (int64_t h = 0; h < heads; h++) {
                for (int64_t g = 0; g < group;) {
                    int64_t row = h * group + g;
                    const char *keys = layer->k + h * head_bytes;
                    const float *rows = q + row * dim;
                    float *s = scores + row * TILE + t;
                    switch (group - g == 4 ? 2 : group - g) {
                    case 1: score_rows(1, type, dim, rows, keys, here, n, s), g += 1; break;
                    case 2: score_rows(2, type, dim, rows, keys, here, n, s), g += 2; break;
                    default: score_rows(3, type, dim, rows, keys, here, n, s), g += 3; break;
                    }
                }
            }
        }
        for (int64_t h = 0; h < q_heads; h++) {
            float slope = layer->slopes ? layer->slopes[h] : 0;
            float bias = slope * (float)(first + done - (step->lengths[seq] - 1));
            soften(scores + h * TILE, count, bias, slope, layer, dim, sums + h * dim, &peaks[h],
                   &totals[h]);
        }
        for (int t = 0; t < count; t += PART) {
            const int64_t *here = offsets + done + t;
            int n = count - t < PART ? count - t : PART;
            for (int64_t h = 0; h < heads; h++) {
                for (int64_t g = 0; g < group;) {
                    int64_t row = h * group + g;
                    const char *values = layer->v + h * head_bytes;
                    const float *w = scores + row * TILE + t;
                    float *s = sums + row * dim;
                    switch (group - g == 4 ? 2 : group - g) {
                    case 1: add_rows(1, type, dim, w, n, values, here, s), g += 1; break;
                    case 2: add_rows(2, type, dim, w, n, values, here, s), g += 2; break;
                    default: add_rows(3, type, dim, w, n, values, here, s), g += 3; break;
                    }
                }
            }
        }
    }
}

/* Merge the units of one sequence by their log-sum-exp and write its row of the output. */
INLINE void merge_sequence(int type, const Step *step, const Layer *layer, int64_t seq) {
    int64_t dim = step->head_dim, q_heads = step->num_q_heads, stride = q_heads * (dim + 2);
    char *out = layer->out + step->rows[seq] * q_heads * dim * element_size(type);
    int64_t first = step->first_unit[seq], last = step->first_unit[seq + 1];
    for (int64_t h = 0; h < q_heads; h++) {
        const float *peaks = layer->partial + q_heads * dim + h;
        float peak = layer->sinks ? layer->sinks[h] : -INFINITY;
        for (int64_t u = first; u < last; u++) peak = fmaxf(peak, peaks[u * stride]);
        float total = layer->sinks ? expf(layer->sinks[h] - peak) : 0;
        for (int64_t u = first; u < last; u++)
            total += expf(peaks[u * stride] - peak) * peaks[u * stride + q_heads];
        float *sums = layer->partial + first * stride + h * dim;
        for (int64_t u = first; u < last; u++) {
            float share = expf(peaks[u * stride] - peak) / total;
            const float *part = layer->partial + u * stride + h * dim;
            for (int64_t d = 0; d < dim; d++) sums[d] = (u == first ? 0 : sums[d]) + share * part[d];
        }
        for (int64_t d = 0; d < dim; d++)
            store_one(out + (h * dim + d) * element_size(type), first == last ? 0 : sums[d], type);
    }
}

INLINE void decode(int type, const Step *step, const Layer *layer) {
    int64_t q_floats = step->num_q_heads * step->head_dim, s_floats = step->num_q_heads * TILE;
#pragma omp parallel num_threads(step->num_threads) if (step->num_threads > 1)
    {
        float *scratch = aligned_alloc(64, ((q_floats + s_floats) * sizeof(float) + 63) / 64 * 64);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < step->num_units; unit++)
            attend_unit(type, step, layer, unit, scratch, scratch + q_floats);
#pragma omp for schedule(static)
        for (int64_t seq = 0; seq < step->num_seqs; seq++) merge_sequence(type, step, layer, seq);
        free(scratch);
    }
}

void radixkv_decode(const Step *step, const Layer *layer) {
    switch (step->type) {
    case FLOAT32: decode(FLOAT32, step, layer); break;
    case BFLOAT16: decode(BFLOAT16, step, layer); break;
    default: decode(FLOAT16, step, layer); break;
    }
}
