/* Brings a weight matrix into the order of gemm.h. Knows bytes and panels. */

#include <stdatomic.h>
#include <string.h>

#include "gemm.h"
#include "pool.h"

typedef struct {
    const char *weight; /* [out, in] */
    char *to;           /* zeroed; in panels of padded_in inputs */
    int64_t out, in, padded_in, type, stored;
} Packing;

static uint32_t bits_of(const Packing *p, int64_t row, int64_t column) {
    if (row >= p->out || column >= p->in) return 0;
    uint32_t bits = 0;
    int64_t at = row * p->in + column;
    if (p->type == FLOAT32) memcpy(&bits, p->weight + at * 4, 4);
    else {
        uint16_t half;
        memcpy(&half, p->weight + at * 2, 2);
        bits = (uint32_t)half << 16;
    }
    return bits;
}

static void pack_panel(void *context, int64_t panel, int64_t thread) {
    const Packing *p = context;
    int64_t step = p->stored == FLOAT32 ? 1 : 2;
    uint32_t *to = (uint32_t *)p->to + panel * PANEL * (p->padded_in / step);
    for (int64_t k = 0; k < p->padded_in; k += step)
        for (int64_t c = 0; c < PANEL; c++) {
            uint32_t bits = bits_of(p, panel * PANEL + c, k);
            if (p->stored != FLOAT32)
                bits = bits >> 16 | (bits_of(p, panel * PANEL + c, k + 1) & 0xffff0000);
            *to++ = bits;
        }
}

void radixkv_pack(const Packing *p, int64_t num_threads) {
    radixkv_parallel((p->out + PANEL - 1) / PANEL, num_threads, pack_panel, (void *)p);
}

typedef struct {
    const uint32_t *bits;
    int64_t count;
    _Atomic int64_t found;
} Search;

enum { STRETCH = 1 << 18 };

static void look(void *context, int64_t item, int64_t thread) {
    Search *s = context;
    int64_t last = (item + 1) * STRETCH < s->count ? (item + 1) * STRETCH : s->count;
    uint32_t any = 0;
    if (atomic_load(&s->found)) return;
    for (int64_t i = item * STRETCH; i < last; i++) any |= s->bits[i];
    if (any & 0xffff) atomic_store(&s->found, 1);
}

/* Whether some of the floats is not a bfloat16. */
int64_t radixkv_needs_float32(const uint32_t *floats, int64_t count, int64_t num_threads) {
    Search s = {floats, count, 0};
    radixkv_parallel((count + STRETCH - 1) / STRETCH, num_threads, look, &s);
    return s.found;
}
