/* Low-rank adapters of some rows of a step: what decoder.c needs of adapters.c. */

#ifndef RADIXKV_ADAPTERS_H
#define RADIXKV_ADAPTERS_H

#include "gemm.h"

/* What an adapter adds to one matrix: x becomes ... + b (a x). a.data is NULL where it adds nothing. */
typedef struct {
    Packed a, b; /* [rank, in]; [out, rank], the adapter's scale in it */
} LowRank;

enum { ADAPT_Q, ADAPT_K, ADAPT_V, ADAPT_OUT, ADAPT_GATE, ADAPT_UP, ADAPT_DOWN, ADAPT_PARTS };

typedef struct {
    LowRank parts[ADAPT_PARTS];
} AdapterLayer;

typedef struct {
    const AdapterLayer *layers;
    int64_t first, rows; /* consecutive rows under this adapter */
} AdapterRun;

typedef struct {
    const AdapterRun *runs; /* no row is in two */
    int64_t num_runs;
    const char *gated; /* [rows] whether the row's adapter changes gate or up; NULL if none does */
} AdaptedRows;

/* One part of a product and the columns of the output that are its. */
typedef struct {
    int64_t part, column, width;
} Target;

typedef struct {
    const AdaptedRows *adapted;
    int64_t layer;
    const Target *targets;
    int64_t num_targets;
    const float *x; /* all rows */
    float *out;
    int64_t x_stride, out_stride;
    int64_t what; /* ADD, or STORE: then parts that add nothing are stored as zeros */
    float *low;   /* radixkv_adapter_scratch floats */
} Adapting;

void radixkv_adapt(const Adapting *a, int64_t num_threads);

/* Floats of room that adapters of at most this rank need on so many threads. */
int64_t radixkv_adapter_scratch(int64_t most_rank, int64_t num_threads);

#endif
