/* Multiplies rows by packed weights, reading each weight once for all of them.

   A row's sums depend on that row alone: every output is summed over the inputs in one order,
   whatever other rows are there and however the work is cut. So a token's bits are the same alone,
   in a batch or in a long prompt, which a library's product, made anew for every shape, does not
   promise. Knows floats and panels; nothing of models.

   The register block is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix
   Multiplication" (2008): up to 6 rows x 2 vectors of outputs stay in registers over the inputs. */

#include <stddef.h>

#include "gemm.h"
#include "pool.h"

#define MOST_ROWS 6        /* of a register block: 12 sums, 2 weights and 1 input fill 16 registers */
#define DEPTH 288          /* most inputs summed before the sums go to memory: a panel stays in L1 */
#define BLOCK_BYTES 262144 /* of x, kept in L2 while panels pass by */
#define FEW_ROWS 8         /* up to which bfloat16 weights are widened as they are used */
#define WIDE 4             /* panels read side by side for one row: enough sums to hide latency */

INLINE vf low_half(vi word) { return (vf)(word << 16); }

INLINE vf high_half(vi word) { return (vf)(word & (int32_t)0xffff0000); }

typedef int32_t vi_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vi words(const char *p) { return *(const vi_unaligned *)p; }

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)

/* sums[r][0:PANEL] (+)= x[r][0:depth] . panel for R <= 6 rows. */
INLINE void block(int R, int type, const float *x, int64_t stride, const char *panel, int64_t depth,
                  float *sums, int first) {
#define START(r) vf a##r = splat(0), b##r = splat(0);
#define ROW(r) const float *x##r = x + (r < R ? r : 0) * stride;
    EACH_ROW(START)
    EACH_ROW(ROW)
#define STEP(r)                                                                                    \
    if (r < R) {                                                                                   \
        vf in = splat(x##r[k]);                                                                    \
        a##r += in * wa;                                                                           \
        b##r += in * wb;                                                                           \
    }
    if (type == FLOAT32) {
        for (int64_t k = 0; k < depth; k++, panel += PANEL * 4) {
            vf wa = get((const float *)panel), wb = get((const float *)panel + LANES);
            EACH_ROW(STEP)
        }
    } else {
        for (int64_t k = 0; k < depth; k += 2, panel += PANEL * 4) {
            vi pa = words(panel), pb = words(panel + LANES * 4);
            {
                vf wa = low_half(pa), wb = low_half(pb);
                EACH_ROW(STEP)
            }
            {
                const int64_t even = k;
                {
                    const int64_t k = even + 1;
                    vf wa = high_half(pa), wb = high_half(pb);
                    EACH_ROW(STEP)
                }
            }
        }
    }
#define END(r)                                                                                     \
    if (r < R) {                                                                                   \
        float *to = sums + r * PANEL;                                                              \
        put(to, first ? a##r : get(to) + a##r);                                                    \
        put(to + LANES, first ? b##r : get(to + LANES) + b##r);                                    \
    }
    EACH_ROW(END)
#undef START
#undef ROW
#undef STEP
#undef END
}

/* The same for R <= 3 rows and P panels that lie panel_bytes apart; each panel's sums are R rows. */
INLINE void side_by_side(int R, int P, int type, const float *x, int64_t stride, const char *panel,
                         int64_t panel_bytes, int64_t depth, float *sums, int first) {
    vf a[3 * WIDE], b[3 * WIDE];
#pragma GCC unroll 12
    for (int i = 0; i < R * P; i++) a[i] = b[i] = splat(0);
    if (type == FLOAT32) {
        for (int64_t k = 0; k < depth; k++, panel += PANEL * 4) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const float *w = (const float *)(panel + p * panel_bytes);
                vf wa = get(w), wb = get(w + LANES);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) {
                    vf in = splat(x[r * stride + k]);
                    a[p * R + r] += in * wa, b[p * R + r] += in * wb;
                }
            }
        }
    } else {
        for (int64_t k = 0; k < depth; k += 2, panel += PANEL * 4) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                vi wa = words(panel + p * panel_bytes), wb = words(panel + p * panel_bytes + LANES * 4);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) {
                    vf even = splat(x[r * stride + k]);
                    a[p * R + r] += even * low_half(wa), b[p * R + r] += even * low_half(wb);
                }
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) {
                    vf odd = splat(x[r * stride + k + 1]);
                    a[p * R + r] += odd * high_half(wa), b[p * R + r] += odd * high_half(wb);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < R * P; i++) {
        float *to = sums + i * PANEL;
        put(to, first ? a[i] : get(to) + a[i]);
        put(to + LANES, first ? b[i] : get(to + LANES) + b[i]);
    }
}

/* The rows of one panel over a stretch of the inputs, in register blocks of about equal size.
   Between them the `ahead` bytes at `next` are fetched: many rows keep the processor busy for longer
   than its own prefetchers look ahead. */
INLINE void rows_of_panel(int type, const float *x, int64_t stride, int64_t rows, const char *weights,
                          int64_t depth, float *sums, int first, const char *next, int64_t ahead) {
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, least = rows / blocks, more = rows % blocks;
    int64_t share = (ahead / blocks + 63) / 64 * 64;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t n = least + (i < more);
        for (int64_t at = i * share; at < (i + 1) * share && at < ahead; at += 64)
            __builtin_prefetch(next + at, 0, 2);
        switch (n) {
        case 1: block(1, type, x, stride, weights, depth, sums, first); break;
        case 2: block(2, type, x, stride, weights, depth, sums, first); break;
        case 3: block(3, type, x, stride, weights, depth, sums, first); break;
        case 4: block(4, type, x, stride, weights, depth, sums, first); break;
        case 5: block(5, type, x, stride, weights, depth, sums, first); break;
        default: block(6, type, x, stride, weights, depth, sums, first);
        }
        x += n * stride;
        sums += n * PANEL;
    }
}

/* Inputs that are summed at a time: all in equal parts, for a short last one would cost as much. */
INLINE int64_t depth_of(const Packed *w) {
    int64_t parts = (w->in + DEPTH - 1) / DEPTH;
    return parts ? ((w->in + parts - 1) / parts + 1) / 2 * 2 : 1;
}

/* All inputs of some rows for one panel. */
INLINE void panel_rows(int type, const Packed *w, const float *x, int64_t stride, int64_t rows,
                       int64_t panel, float *sums) {
    int64_t step = type == FLOAT32 ? PANEL * 4 : PANEL * 2; /* bytes an input */
    int64_t most = depth_of(w);
    for (int64_t k = 0; k < w->in; k += most) {
        int64_t depth = w->in - k < most ? w->in - k : most;
        const char *weights = w->data + (panel * w->in + k) * step;
        if (type == FLOAT32 || rows <= FEW_ROWS) {
            rows_of_panel(type, x + k, stride, rows, weights, depth, sums, !k, weights, 0);
            continue;
        }
        /* For many rows it is cheaper to widen the weights once; the sums are the same. */
        float widened[DEPTH * PANEL] __attribute__((aligned(64)));
        for (int64_t i = 0; i < depth * PANEL; i += 2 * PANEL)
            for (int c = 0; c < PANEL; c += LANES) {
                vi pair = words(weights + (i / 2 + c) * 4);
                put(widened + i + c, low_half(pair));
                put(widened + i + PANEL + c, high_half(pair));
            }
        const char *next = weights + depth * step; /* beyond the last panel it is never read */
        rows_of_panel(FLOAT32, x + k, stride, rows, (const char *)widened, depth, sums, !k, next,
                      depth * step);
    }
}

/* All inputs of R rows for P panels. */
INLINE void few_rows(int R, int P, int type, const Packed *w, const float *x, int64_t stride,
                     int64_t panel, float *sums) {
    int64_t step = type == FLOAT32 ? PANEL * 4 : PANEL * 2, most = depth_of(w);
    for (int64_t k = 0; k < w->in; k += most) {
        int64_t depth = w->in - k < most ? w->in - k : most;
        side_by_side(R, P, type, x + k, stride, w->data + (panel * w->in + k) * step, w->in * step,
                     depth, sums, !k);
    }
}

/* Add the bias to a panel's sums and put them where they belong. */
INLINE void finish(const Packed *w, const Rows *r, int64_t what, int64_t row, int64_t rows,
                   int64_t panel, const float *sums) {
    int64_t column = panel * PANEL, columns = w->out - column < PANEL ? w->out - column : PANEL;
    for (int64_t i = 0; i < rows; i++, sums += PANEL) {
        float *out = r->out + (row + i) * r->out_stride + column;
        if (columns == PANEL && !w->bias) {
            if (what == ADD) put(out, get(out) + get(sums)), put(out + LANES, get(out + LANES) + get(sums + LANES));
            else put(out, get(sums)), put(out + LANES, get(sums + LANES));
            continue;
        }
        for (int64_t c = 0; c < columns; c++) {
            float sum = sums[c] + (w->bias ? w->bias[column + c] : 0);
            out[c] = what == ADD ? out[c] + sum : sum;
        }
    }
}

INLINE void finish_gated(const Packed *w, const Rows *r, int64_t row, int64_t rows, int64_t panel,
                         const float *gates, const float *ups) {
    int64_t column = panel / 2 * PANEL;
    for (int64_t i = 0; i < rows; i++, gates += PANEL, ups += PANEL) {
        float *out = r->out + (row + i) * r->out_stride + column;
        const float *plus = NULL;
        if (r->plus && r->has_plus[row + i]) plus = r->plus + (row + i) * 2 * r->out_stride + column;
        for (int c = 0; c < PANEL; c += LANES) {
            vf gate = get(gates + c), up = get(ups + c);
            if (w->bias) {
                gate += get(w->bias + panel * PANEL + c);
                up += get(w->bias + (panel + 1) * PANEL + c);
            }
            if (plus) gate += get(plus + c), up += get(plus + r->out_stride + c);
            put(out + c, gate / (1.0f + exp_v(-gate)) * up);
        }
    }
}

/* Panels first..last for all rows; sums is room for WIDE panels of a block of rows. */
INLINE void some_panels(int type, const Packed *w, const Rows *r, int64_t what, int64_t first,
                        int64_t last, int64_t rows_at_once, float *sums) {
    if (r->rows <= 3) { /* one row would leave most registers empty: panels side by side fill them */
        int64_t rows = r->rows, most = rows == 1 ? WIDE : WIDE / 2;
        for (int64_t panel = first; panel < last; panel += most) {
            int64_t n = last - panel < most ? last - panel : most;
            if (n < most)
                for (int64_t p = 0; p < n; p++)
                    panel_rows(type, w, r->x, r->x_stride, rows, panel + p, sums + p * rows * PANEL);
            else if (rows == 1) few_rows(1, WIDE, type, w, r->x, r->x_stride, panel, sums);
            else if (rows == 2) few_rows(2, WIDE / 2, type, w, r->x, r->x_stride, panel, sums);
            else few_rows(3, WIDE / 2, type, w, r->x, r->x_stride, panel, sums);
            for (int64_t p = 0; p < n; p++) {
                const float *mine = sums + p * rows * PANEL;
                if (what != GATE) finish(w, r, what, 0, rows, panel + p, mine);
                else if (!(p & 1)) finish_gated(w, r, 0, rows, panel + p, mine, mine + rows * PANEL);
            }
        }
        return;
    }
    for (int64_t row = 0; row < r->rows; row += rows_at_once) {
        int64_t rows = r->rows - row < rows_at_once ? r->rows - row : rows_at_once;
        const float *x = r->x + row * r->x_stride;
        for (int64_t panel = first; panel < last; panel++) {
            int64_t odd = what == GATE && panel & 1;
            panel_rows(type, w, x, r->x_stride, rows, panel, sums + odd * rows * PANEL);
            if (what != GATE) finish(w, r, what, row, rows, panel, sums);
            else if (odd) finish_gated(w, r, row, rows, panel - 1, sums, sums + rows * PANEL);
        }
    }
}

typedef struct {
    const Packed *weights;
    const Rows *rows;
    int64_t what, panels, piece, rows_at_once;
} Product;

static void do_piece(void *context, int64_t item, int64_t thread) {
    const Product *p = context;
    int64_t first = item * p->piece, end = first + p->piece;
    int64_t last = end < p->panels ? end : p->panels;
    int64_t room = p->rows_at_once > WIDE ? 2 * p->rows_at_once : 2 * WIDE; /* panels of rows */
    float *sums = radixkv_scratch(room * PANEL * sizeof(float));
    if (p->weights->type == FLOAT32)
        some_panels(FLOAT32, p->weights, p->rows, p->what, first, last, p->rows_at_once, sums);
    else some_panels(BFLOAT16, p->weights, p->rows, p->what, first, last, p->rows_at_once, sums);
}

void radixkv_multiply(const Packed *w, const Rows *r, int64_t what, int64_t num_threads) {
    if (r->rows < 1) return;
    int64_t panels = (w->out + PANEL - 1) / PANEL;
    int64_t at_once = BLOCK_BYTES / 4 / w->in;
    if (at_once < MOST_ROWS) at_once = MOST_ROWS;
    int64_t blocks = (r->rows + at_once - 1) / at_once;
    at_once = (r->rows + blocks - 1) / blocks;
    /* Some pieces per thread, so that one that is held up leaves its share to the others: of whole
       groups of the panels that are read together, and of few enough that they stay in L2 between
       blocks of rows. */
    int64_t group = r->rows <= 3 ? WIDE : 2;
    int64_t piece = panels / (num_threads * 6) / group * group;
    if (piece < group) piece = group;
    if (blocks > 1 && piece > 2 * WIDE) piece = 2 * WIDE;
    Product product = {w, r, what, panels, piece, at_once};
    radixkv_parallel((panels + piece - 1) / piece, num_threads, do_piece, &product);
}

int64_t radixkv_panel_width(void) { return PANEL; }
