/* Products with packed weights: what decoder.c needs of gemm.c. */

#ifndef RADIXKV_GEMM_H
#define RADIXKV_GEMM_H

#include "vectors.h"

#define PANEL (2 * LANES) /* output features that are computed side by side */

/* A weight matrix [out, in] in panels of PANEL output features, the last one padded with zeros:
   float32   [panels, in, PANEL]
   bfloat16  [panels, in / 2, PANEL] words of two inputs, the even one in the low half */
typedef struct {
    const char *data;
    const float *bias; /* [out] or NULL */
    int64_t in, out, type;
} Packed;

/* What becomes of a product. GATE: the panels alternate between gate and up projections, and
   silu(gate) * up is stored, out / 2 features in all. */
enum { STORE = 0, ADD = 1, GATE = 2 };

typedef struct {
    const float *x; /* rows of x_stride floats */
    float *out;     /* rows of out_stride floats */
    int64_t rows, x_stride, out_stride;
    /* GATE: what rows add before the activation, [rows, 2, out_stride] for gates and ups, and
       whether a row does, [rows]. NULL where none does. */
    const float *plus;
    const char *has_plus;
} Rows;

void radixkv_multiply(const Packed *w, const Rows *r, int64_t what, int64_t num_threads);

#endif
