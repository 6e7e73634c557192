/* Portable SIMD for the CPU kernels: float vectors, loads from every stored type, exp and tanh.

   GCC and Clang vector extensions, so the same lines become AVX2, AVX-512 or NEON under
   -march=native. Knows numbers, nothing of attention. */

#ifndef RADIXKV_VECTORS_H
#define RADIXKV_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef float vf_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE int element_size(int type) { return type == FLOAT32 ? 4 : 2; }

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf get(const float *p) { return *(const vf_unaligned *)p; }

INLINE void put(float *p, vf x) { *(vf_unaligned *)p = x; }

/* a * b + c, on x86 rounded once where the processor can: not left to the compiler, which for some
   processors rounds twice where one sum waits for itself and once where several take turns. */
INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 8 && defined(__FMA__)
    return (vf)__builtin_ia32_vfmaddps256(a, b, c);
#elif LANES == 16
    return (vf)__builtin_ia32_vfmaddps512_mask(a, b, c, 0xffff, 4);
#else
    return a * b + c;
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    float x;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else {
        /* A product with 2^112 moves the exponent's bias and makes subnormals exact. */
        bits = rest << 13;
        memcpy(&x, &bits, 4);
        x *= 0x1p112f;
        memcpy(&bits, &x, 4);
        bits |= sign;
    }
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float load_one(const char *p, int type) {
    if (type == FLOAT32) {
        float x;
        memcpy(&x, p, 4);
        return x;
    }
    uint16_t h;
    memcpy(&h, p, 2);
    if (type == FLOAT16) return half_to_float(h);
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE vf load(const char *p, int type) {
    if (type == FLOAT32) return *(const vf_unaligned *)p;
    vh h;
    memcpy(&h, p, sizeof h);
    if (type == BFLOAT16) return (vf)(__builtin_convertvector(h, vi) << 16);
    vi wide = __builtin_convertvector(h, vi), rest = wide & 0x7fff;
    vf x = (vf)(rest << 13) * splat(0x1p112f);
    vi special = rest >= 0x7c00;
    x = (vf)((special & (0x7f800000 | (rest & 0x3ff) << 13)) | (~special & (vi)x));
    return (vf)((vi)x | (wide & 0x8000) << 16);
}

INLINE void store_one(char *p, float x, int type) {
    if (type == FLOAT32) {
        memcpy(p, &x, 4);
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t h;
    if (type == BFLOAT16) {
        h = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        if (rest > 0x7f800000) h = sign | 0x7e00;
        else if (rest >= 0x477ff000) h = sign | 0x7c00;
        else if (rest < 0x38800000) {
            float scaled; /* subnormal: let the addition of 0.5 do the rounding */
            memcpy(&scaled, &rest, 4);
            scaled += 0.5f;
            memcpy(&rest, &scaled, 4);
            h = sign | (rest - 0x3f000000);
        } else h = sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
    }
    memcpy(p, &h, 2);
}

/* e^x for x <= 88, relative error < 2e-7; exactly 0 below -87. */
INLINE vf exp_v(vf x) {
    vi tiny = x < -87.0f;
    x = (vf)(~tiny & (vi)x);
    vf n = x * 1.44269504088896341f;
    n = (n + 12582912.0f) - 12582912.0f; /* round to nearest */
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)(~tiny & (vi)(p * (vf)exponent));
}

/* 2^x for x < 127, relative error < 2e-7; exactly 0 below -125. */
INLINE vf exp2_v(vf x) {
    vi tiny = x < -125.0f;
    vf shifted = x + 12582912.0f; /* its low bits are x, rounded to nearest */
    vi exponent = (vi)shifted << 23;
    vf r = x - (shifted - 12582912.0f);
    vf p = splat(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    return (vf)(~tiny & ((vi)p + exponent));
}

/* The larger of each two lanes; b where one of them is not a number. */
INLINE vf larger(vf a, vf b) {
#if LANES == 8 && defined(__AVX__)
    return (vf)__builtin_ia32_maxps256(a, b);
#else
    vi above = a > b;
    return (vf)((above & (vi)a) | (~above & (vi)b));
#endif
}

/* x where low <= at < high, else `outside`. */
INLINE vf inside(vf x, vf at, float low, float high, float outside) {
    vi in = (at >= low) & (at < high);
    return (vf)((in & (vi)x) | (~in & (vi)splat(outside)));
}

/* Lanes of a and b in turn: those of their first halves, or of their second. */
INLINE vf interleave(vf a, vf b, int second) {
#if defined(__clang__) && LANES == 8
    return second ? __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
                  : __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#elif defined(__clang__)
    return second ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                  : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    vi which;
    for (int i = 0; i < LANES; i++) which[i] = second * LANES / 2 + i / 2 + i % 2 * LANES;
    return __builtin_shuffle(a, b, which);
#endif
}

INLINE vf tanh_v(vf x) {
    vi negative = x < 0.0f;
    vf a = (vf)((vi)x & 0x7fffffff);
    a = (vf)((a > 9.0f & (vi)splat(9.0f)) | (~(a > 9.0f) & (vi)a));
    vf t = 1.0f - 2.0f / (exp_v(a + a) + 1.0f);
    /* Near 0 the difference above cancels; the series does not. */
    vi small = a < 0.25f;
    vf s = a * a;
    vf series = a * (1.0f + s * (-0.33333333f + s * (0.13333333f + s * (-0.05396825f + s * 0.02186949f))));
    t = (vf)((small & (vi)series) | (~small & (vi)t));
    return (vf)((vi)t | (negative & (vi)splat(-0.0f)));
}

INLINE float sum_v(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE float max_v(vf x) {
    float peak = x[0];
    for (int i = 1; i < LANES; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

#endif
