/* The arithmetic of attention on a few rows in registers: scores, softmax over a unit, weighted
   sums, folds.

   Every sum has one order, whatever the number of rows R that share a loop: a score adds its
   products lane by lane and then the lanes as a tree, a weighted sum goes token by token. What the
   compiler could contract in more than one way stands in a function that exists once (ONCE). */

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
#elif defined(__aarch64__) && LANES == 4
#define HOLD(x) __asm__("" : "+w"(x))
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

/* Sum the lanes of four vectors at once, each as ((0+1)+(2+3)) + ((4+5)+(6+7)), and so on. */
INLINE void sums_of_four(vf a, vf b, vf c, vf d, float *out) {
#if LANES == 8 && defined(__AVX2__)
    typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
    vf abcd =
        __builtin_ia32_haddps256(__builtin_ia32_haddps256(a, b), __builtin_ia32_haddps256(c, d));
    *(v4 *)out = __builtin_ia32_vextractf128_ps256(abcd, 0) +
                 __builtin_ia32_vextractf128_ps256(abcd, 1);
#else
    float lanes[4][LANES];
    put(lanes[0], a), put(lanes[1], b), put(lanes[2], c), put(lanes[3], d);
    for (int r = 0; r < 4; r++) {
        for (int left = LANES / 2; left; left /= 2)
            for (int i = 0; i < left; i++) lanes[r][i] = lanes[r][2 * i] + lanes[r][2 * i + 1];
        out[r] = lanes[r][0];
    }
#endif
}

/* scores[r * SCORES + t] = q[r] . keys[t] for R <= 3 query rows of one head; up to 3 scores past
   count become anything. Twelve accumulators and the operands fill sixteen registers;
   named, because compilers put arrays of them on the stack. */
INLINE void score_rows(int R, int type, int fetch, int64_t dim, const float *q, const char *keys,
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
            if (fetch && (d & LANES || LANES * size >= 64)) {
                __builtin_prefetch(keys + next[0] + d * size);
                __builtin_prefetch(keys + next[1] + d * size);
            }
            if (fetch && (!(d & LANES) || LANES * size >= 64)) {
                __builtin_prefetch(keys + next[2] + d * size);
                __builtin_prefetch(keys + next[3] + d * size);
            }
            if (R > 1) y = get(q + dim + d);
            if (R > 2) z = get(q + 2 * dim + d);
            k = load(k0 + d * size, type);
            HOLD(k);
            a0 += x * k;
            if (R > 1) b0 += y * k;
            if (R > 2) c0 += z * k;
            k = load(k1 + d * size, type);
            HOLD(k);
            a1 += x * k;
            if (R > 1) b1 += y * k;
            if (R > 2) c1 += z * k;
            k = load(k2 + d * size, type);
            HOLD(k);
            a2 += x * k;
            if (R > 1) b2 += y * k;
            if (R > 2) c2 += z * k;
            k = load(k3 + d * size, type);
            HOLD(k);
            a3 += x * k;
            if (R > 1) b3 += y * k;
            if (R > 2) c3 += z * k;
        }
        sums_of_four(a0, a1, a2, a3, scores + t);
        if (R > 1) sums_of_four(b0, b1, b2, b3, scores + SCORES + t);
        if (R > 2) sums_of_four(c0, c1, c2, c3, scores + 2 * SCORES + t);
    }
}

/* Where a tile of keys keeps dimension d of its C * LANES keys side by side: those that a score adds
   in one lane (d modulo LANES) follow each other. */
INLINE int64_t line_of(int64_t dim, int64_t d) { return d % LANES * (dim / LANES) + d / LANES; }

/* The same scores, bit for bit, for C * LANES keys in lanes of their own: what score_rows adds up in
   one lane of a register goes to a register here, and the tree over lanes becomes sums of registers;
   those that wait for their partner are kept on the stack. */
INLINE void score_lanes(int R, int C, int64_t dim, const float *q, const float *keys,
                        float *scores) {
    float waiting[4][3 * 4 * LANES];
    for (int lane = 0; lane < LANES; lane++) {
        vf a0 = splat(0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0, c0 = a0,
           c1 = a0, c2 = a0, c3 = a0;
        for (int64_t d = lane; d < dim; d += LANES, keys += C * LANES) {
            vf x = splat(q[d]), y = x, z = x, k;
            if (R > 1) y = splat(q[dim + d]);
            if (R > 2) z = splat(q[2 * dim + d]);
            k = get(keys);
            HOLD(k);
            a0 += x * k;
            if (R > 1) b0 += y * k;
            if (R > 2) c0 += z * k;
            if (C > 1) {
                k = get(keys + LANES);
                HOLD(k);
                a1 += x * k;
                if (R > 1) b1 += y * k;
                if (R > 2) c1 += z * k;
            }
            if (C > 2) {
                k = get(keys + 2 * LANES);
                HOLD(k);
                a2 += x * k;
                if (R > 1) b2 += y * k;
                if (R > 2) c2 += z * k;
                k = get(keys + 3 * LANES);
                HOLD(k);
                a3 += x * k;
                if (R > 1) b3 += y * k;
                if (R > 2) c3 += z * k;
            }
        }
        int level = 0;
        for (; lane >> level & 1; level++) {
            const float *w = waiting[level];
            a0 += get(w);
            if (C > 1) a1 += get(w + LANES);
            if (C > 2) a2 += get(w + 2 * LANES), a3 += get(w + 3 * LANES);
            if (R > 1) b0 += get(w + 4 * LANES);
            if (R > 1 && C > 1) b1 += get(w + 5 * LANES);
            if (R > 1 && C > 2) b2 += get(w + 6 * LANES), b3 += get(w + 7 * LANES);
            if (R > 2) c0 += get(w + 8 * LANES);
            if (R > 2 && C > 1) c1 += get(w + 9 * LANES);
            if (R > 2 && C > 2) c2 += get(w + 10 * LANES), c3 += get(w + 11 * LANES);
        }
        int last = lane == LANES - 1;
        float *w = last ? scores : waiting[level];
        int64_t row = last ? SCORES : 4 * LANES;
        put(w, a0);
        if (C > 1) put(w + LANES, a1);
        if (C > 2) put(w + 2 * LANES, a2), put(w + 3 * LANES, a3);
        if (R > 1) put(w + row, b0);
        if (R > 1 && C > 1) put(w + row + LANES, b1);
        if (R > 1 && C > 2) put(w + row + 2 * LANES, b2), put(w + row + 3 * LANES, b3);
        if (R > 2) put(w + 2 * row, c0);
        if (R > 2 && C > 1) put(w + 2 * row + LANES, c1);
        if (R > 2 && C > 2) put(w + 2 * row + 2 * LANES, c2), put(w + 2 * row + 3 * LANES, c3);
    }
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
    float square[LANES][LANES];
    for (int i = 0; i < LANES; i++) put(square[i], rows[i]);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) rows[i][j] = square[j][i];
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
        a0 += x * v;
        if (R > 1) b0 += y * v;
        if (R > 2) c0 += z * v;
        if (C > 1) {
            v = load(value + step, type);
            HOLD(v);
            a1 += x * v;
            if (R > 1) b1 += y * v;
            if (R > 2) c1 += z * v;
        }
        if (C > 2) {
            v = load(value + 2 * step, type);
            HOLD(v);
            a2 += x * v;
            if (R > 1) b2 += y * v;
            if (R > 2) c2 += z * v;
            v = load(value + 3 * step, type);
            HOLD(v);
            a3 += x * v;
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

/* Turn the raw scores [low, high) of one row over one unit into weights; lanes are counted from the
   unit's start, so their sum does not depend on where the row begins to see. ``away`` is the
   position of the unit's first token minus the row's. */
ONCE void soften(float *scores, int low, int high, int64_t away, float slope, const Layer *layer,
                 float *peak, float *total) {
    vf top = splat(-INFINITY), lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    int start = low / LANES * LANES;
    for (int t = start; t < high; t += LANES) {
        vf x = get(scores + t) * layer->scale;
        if (layer->soft_cap > 0) x = layer->soft_cap * tanh_v(x / layer->soft_cap);
        if (layer->slopes) x += slope * (lane + (float)(t + away));
        if (t < low || t + LANES > high) {
            vi inside = (lane + (float)t >= (float)low) & (lane + (float)t < (float)high);
            x = (vf)((inside & (vi)x) | (~inside & (vi)splat(-INFINITY)));
        }
        vi above = x > top;
        top = (vf)((above & (vi)x) | (~above & (vi)top));
        put(scores + t, x);
    }
    float highest = max_v(top);
    vf mass = splat(0);
    for (int t = start; t < high; t += LANES) {
        vf x = exp_v(get(scores + t) - highest);
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
    vf keep = exp_v(splat(*peak - top)), add = exp_v(splat(part_peak - top));
    *peak = top;
    *total = *total * keep[0] + part_total * add[0];
    for (int64_t d = 0; d < dim; d += LANES) put(sums + d, get(sums + d) * keep + get(part + d) * add);
}

#endif
