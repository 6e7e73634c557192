/* Multiplies a few rows by a weight matrix, reading each weight once. Knows floats and strides.

   A library's matrix product is made for many rows; for one or two it leaves half of the memory's
   speed unused. */

#include "pool.h"
#include "vectors.h"

typedef struct {
    const float *x, *weight, *bias;
    float *out;
    int64_t rows, in, out_features, x_stride, num_threads;
} Linear;

/* Columns at a time: enough independent sums to hide the latency of a multiply-add, and no more
   than fit the registers. */
enum { COLUMNS = 8 };

enum { BLOCKS = 8 }; /* of columns that a thread takes at a time */

INLINE void block(int rows, int columns, const Linear *l, int64_t row, int64_t column) {
    vf sums[2][COLUMNS];
    float rest[2][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = splat(0), rest[r][c] = 0;
    const float *x = l->x + row * l->x_stride, *w = l->weight + column * l->in;
    int64_t whole = l->in - l->in % LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        vf values[2];
        for (int r = 0; r < rows; r++) values[r] = get(x + r * l->x_stride + k);
        for (int c = 0; c < columns; c++) {
            vf weights = get(w + c * l->in + k);
            for (int r = 0; r < rows; r++) sums[r][c] += values[r] * weights;
        }
    }
    for (int64_t k = whole; k < l->in; k++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                rest[r][c] += x[r * l->x_stride + k] * w[c * l->in + k];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            l->out[(row + r) * l->out_features + column + c] =
                sum_v(sums[r][c]) + rest[r][c] + (l->bias ? l->bias[column + c] : 0);
}

static void do_block(void *context, int64_t item, int64_t thread) {
    const Linear *l = context;
    int64_t last = (item + 1) * BLOCKS < l->out_features / COLUMNS ? (item + 1) * BLOCKS
                                                                   : l->out_features / COLUMNS;
    for (int64_t b = item * BLOCKS; b < last; b++) {
        if (l->rows == 1) block(1, COLUMNS, l, 0, b * COLUMNS);
        else block(2, COLUMNS, l, 0, b * COLUMNS);
    }
}

void radixkv_linear(const Linear *l) {
    int64_t blocks = l->out_features / COLUMNS;
    radixkv_parallel((blocks + BLOCKS - 1) / BLOCKS, l->num_threads, do_block, (void *)l);
    for (int64_t column = blocks * COLUMNS; column < l->out_features; column++) {
        if (l->rows == 1) block(1, 1, l, 0, column);
        else block(2, 1, l, 0, column);
    }
}
