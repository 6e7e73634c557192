/* The arithmetic of attention on a few rows in registers: scores, softmax over a unit, weighted
   sums, folds.

   Every sum has one order, whatever the number of rows R that share a loop: a score adds its
   products dimension by dimension, a weighted sum goes token by token. What the compiler could
   contract in more than one way stands in a function that exists once (ONCE). Peaks and exponents
   are of base 2: scores are scaled by log2(e), and 2^x is cheaper than e^x. */

#ifndef RADIXKV_ATTENTION_ROWS_H
#define RADIXKV_ATTENTION_ROWS_H

#include <math.h>

#include "attention.h"
#include "vectors.h"

#if defined(__clang__)
#define ONCE static __attribute__((noinline))
#else
#define ONCE static __attribute__((noinline, noclone))
#endif

/* Hold a vector that several rows use in a register: compilers prefer to load it again for each,
   and loads, not products, would set the pace. */
#if defined(__x86_64__)
#define HOLD(x) __asm__("" : "+x"(x))
#else
#define HOLD(x) ((void)(x))
#endif

enum {
    AHEAD = 16, /* tokens between what is computed and what is fetched: hardware prefetchers do not
                   see through block tables, and one core's window of outstanding loads is too
                   short to overlap memory with arithmetic */
    SCORES = UNIT_TOKENS + 2 * LANES, /* floats between the scores of two rows; what is computed past
                                        the last key has room, and no power of two */
};

/* scores[r * SCORES + t] = q[r] . keys[t] for R <= 3 query rows of one head and C * LANES keys that lie
   side by side, keys[d][t]. Twelve accumulators and the operands fill sixteen registers; named,
   because compilers put arrays of them on the stack. */
INLINE void score_lanes(int R, int C, int64_t dim, const float *q, const float *keys,
                        float *scores) {
    const float *qb = q + (R > 1 ? dim : 0), *qc = q + (R > 2 ? 2 * dim : 0);
    vf a0 = splat(0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0, c0 = a0,
       c1 = a0, c2 = a0, c3 = a0;
    for (int64_t d = 0; d < dim; d++, keys += C * LANES) {
        vf x = splat(q[d]), y = x, z = x, k;
        if (R > 1) y = splat(qb[d]);
        if (R > 2) z = splat(qc[d]);
        k = get(keys);
        HOLD(k);
        a0 = fused(x, k, a0);
        if (R > 1) b0 = fused(y, k, b0);
        if (R > 2) c0 = fused(z, k, c0);
        if (C > 1) {
            k = get(keys + LANES);
            HOLD(k);
            a1 = fused(x, k, a1);
            if (R > 1) b1 = fused(y, k, b1);
            if (R > 2) c1 = fused(z, k, c1);
        }
        if (C > 2) {
            k = get(keys + 2 * LANES);
            HOLD(k);
            a2 = fused(x, k, a2);
            if (R > 1) b2 = fused(y, k, b2);
            if (R > 2) c2 = fused(z, k, c2);
            k = get(keys + 3 * LANES);
            HOLD(k);
            a3 = fused(x, k, a3);
            if (R > 1) b3 = fused(y, k, b3);
            if (R > 2) c3 = fused(z, k, c3);
        }
    }
    float *sb = scores + SCORES, *sc = scores + 2 * SCORES;
    put(scores, a0);
    if (C > 1) put(scores + LANES, a1);
    if (C > 2) put(scores + 2 * LANES, a2), put(scores + 3 * LANES, a3);
    if (R > 1) put(sb, b0);
    if (R > 1 && C > 1) put(sb + LANES, b1);
    if (R > 1 && C > 2) put(sb + 2 * LANES, b2), put(sb + 3 * LANES, b3);
    if (R > 2) put(sc, c0);
    if (R > 2 && C > 1) put(sc + LANES, c1);
    if (R > 2 && C > 2) put(sc + 2 * LANES, c2), put(sc + 3 * LANES, c3);
}

/* Turn LANES vectors around: afterwards rows[i][j] is what rows[j][i] was. */
INLINE void turn(vf *rows) {
#if LANES == 8 && defined(__AVX2__)
    typedef float v8 __attribute__((vector_size(32)));
    v8 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_ia32_unpcklps256(rows[i], rows[i + 1]);
        a[i + 1] = __builtin_ia32_unpckhps256(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = __builtin_ia32_shufps256(a[i], a[i + 2], 0x44);
        b[i + 1] = __builtin_ia32_shufps256(a[i], a[i + 2], 0xee);
        b[i + 2] = __builtin_ia32_shufps256(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = __builtin_ia32_shufps256(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = __builtin_ia32_vperm2f128_ps256(b[i], b[i + 4], 0x20);
        rows[i + 4] = __builtin_ia32_vperm2f128_ps256(b[i], b[i + 4], 0x31);
    }
#else
    vf other[LANES];
#pragma GCC unroll 4
    for (int left = LANES; left > 1; left /= 2) { /* log2(LANES) perfect shuffles */
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            other[i] = interleave(rows[i / 2], rows[i / 2 + LANES / 2], i % 2);
        memcpy(rows, other, sizeof other);
    }
#endif
}

/* sums[r * dim + i] += sum over t of weights[r * SCORES + t] * values[t][i], C <= 4 vectors of i. */
INLINE void add_part(int R, int C, int type, int fetch, int64_t dim, const float *weights,
                     int count, const char *values, const int64_t *offsets, float *sums) {
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
        const char *value = values + offsets[t];
        if (fetch)
            for (int b = 0; b < C * step; b += 64) __builtin_prefetch(values + offsets[t + AHEAD] + b);
        vf x = splat(weights[t]), y = x, z = x, v;
        if (R > 1) y = splat(weights[SCORES + t]);
        if (R > 2) z = splat(weights[2 * SCORES + t]);
        v = load(value, type);
        HOLD(v);
        a0 = fused(x, v, a0);
        if (R > 1) b0 = fused(y, v, b0);
        if (R > 2) c0 = fused(z, v, c0);
        if (C > 1) {
            v = load(value + step, type);
            HOLD(v);
            a1 = fused(x, v, a1);
            if (R > 1) b1 = fused(y, v, b1);
            if (R > 2) c1 = fused(z, v, c1);
        }
        if (C > 2) {
            v = load(value + 2 * step, type);
            HOLD(v);
            a2 = fused(x, v, a2);
            if (R > 1) b2 = fused(y, v, b2);
            if (R > 2) c2 = fused(z, v, c2);
            v = load(value + 3 * step, type);
            HOLD(v);
            a3 = fused(x, v, a3);
            if (R > 1) b3 = fused(y, v, b3);
            if (R > 2) c3 = fused(z, v, c3);
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

INLINE void add_rows(int R, int type, int fetch, int64_t dim, const float *weights, int count,
                     const char *values, const int64_t *offsets, float *sums) {
    int size = element_size(type);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_part(R, 4, type, fetch, dim, weights, count, values + d * size, offsets, sums + d);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_part(R, 2, type, fetch, dim, weights, count, values + d * size, offsets, sums + d);
    for (; d < dim; d += LANES)
        add_part(R, 1, type, fetch, dim, weights, count, values + d * size, offsets, sums + d);
}

#define LOG2_E 1.44269504088896341f

/* Turn the raw scores [low, high) of one row over one unit into weights; lanes are counted from the
   unit's start, so their sum does not depend on where the row begins to see. ``away`` is the
   position of the unit's first token minus the row's. */
ONCE void soften(float *scores, int low, int high, int64_t away, float slope, const Layer *layer,
                 float *peak, float *total) {
    int start = low / LANES * LANES;
    float scale = layer->scale * LOG2_E;
    vf lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    if (layer->soft_cap > 0 || layer->slopes) {
        for (int t = start; t < high; t += LANES) {
            vf x = get(scores + t) * layer->scale;
            if (layer->soft_cap > 0) x = layer->soft_cap * tanh_v(x / layer->soft_cap);
            if (layer->slopes) x += slope * (lane + (float)(t + away));
            put(scores + t, x * LOG2_E);
        }
        scale = 1;
    }
    vf sign = splat(scale < 0 ? -1.0f : 1.0f), top = splat(-INFINITY);
    for (int t = start; t < high; t += LANES) {
        vf x = get(scores + t) * sign;
        if (t < low || t + LANES > high) x = inside(x, lane + (float)t, low, high, -INFINITY);
        top = larger(x, top);
    }
    float highest = max_v(top) * (scale < 0 ? -scale : scale);
    vf mass = splat(0);
    for (int t = start; t < high; t += LANES) {
        vf x = exp2_v(get(scores + t) * scale - highest);
        if (t < low || t + LANES > high) x = inside(x, lane + (float)t, low, high, 0);
        mass += x;
        put(scores + t, x);
    }
    *peak = highest;
    *total = sum_v(mass);
}

/* Fold the partial result of the next unit into a row's own. */
ONCE void fold(int64_t dim, float *sums, float *peak, float *total, const float *part,
               float part_peak, float part_total) {
    float top = part_peak > *peak ? part_peak : *peak;
    vf keep = exp2_v(splat(*peak - top)), add = exp2_v(splat(part_peak - top));
    *peak = top;
    *total = *total * keep[0] + part_total * add[0];
    for (int64_t d = 0; d < dim; d += LANES) put(sums + d, get(sums + d) * keep + get(part + d) * add);
}

#endif
