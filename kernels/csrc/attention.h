/* What one step and one layer of paged attention look like to C.

   Positions of a sequence are cut at absolute multiples of UNIT_TOKENS. Of each unit a row gets a
   partial result (peak, total, sums), computed with the same operations in the same order whatever
   rows come with it, and folds its partials from left to right. So the bits of a row depend on its
   query, its keys and its position alone: not on the batch, the chunk, the threads or on whether a
   run of keys was read for several sequences at once. */

#ifndef RADIXKV_ATTENTION_H
#define RADIXKV_ATTENTION_H

#include <stdint.h>

enum { UNIT_TOKENS = 256 };

/* Rows that read the same keys: `count` new tokens times the query heads of some key heads. */
typedef struct {
    int32_t first, count;    /* tokens: rows[first : first + count] */
    int32_t seq;             /* whose block table names the keys */
    int32_t head, head_stop; /* key heads */
    int32_t unit, unit_stop; /* units of keys, may be none */
    int32_t opens;           /* the first unit is the first that these rows see */
    int32_t slot, stride;    /* of partials; see Step */
} Item;

/* Made once a step, read by every layer. A partial is [num_q_heads, head_dim] sums, then peaks and
   totals, [num_q_heads] each.

   parts     come first, in any order. One that opens folds its units and leaves one partial for
             each token i, in slot + i; another leaves one for each of its units n, in
             slot + n * stride + i.
   finishes  take the partials of their tokens (refs, in order of position), fold their own units
             after them, and write the output. Each row of the output is in exactly one of them. */
typedef struct {
    int64_t num_parts, num_finishes;
    int64_t num_q_heads, num_kv_heads, head_dim, block_size, table_width;
    int64_t q_type, out_type, pool_type; /* FLOAT32, BFLOAT16 or FLOAT16 of vectors.h */
    int64_t window;                      /* 0: none */
    int64_t num_threads, scratch_floats; /* of the largest team; for each thread of it */
    int64_t max_rows;                    /* count * query heads of the largest item */
    const Item *parts, *finishes;
    const int32_t *tables; /* [num_seqs, table_width] */
    const int32_t *rows;   /* row of q and out */
    const int64_t *positions; /* [num_tokens] by row of q */
    const int32_t *ref_start; /* [num_tokens + 1] by row of q, or NULL: no partials */
    const int32_t *refs;
    float *partials, *scratch;
} Step;

typedef struct {
    const void *q, *k, *v; /* k, v: [num_blocks, block_size, num_kv_heads, head_dim] */
    void *out;
    const float *sinks, *slopes; /* [num_q_heads] or NULL */
    int64_t q_row_stride, q_head_stride, out_row_stride, out_head_stride; /* elements */
    float scale, soft_cap;                                                 /* soft_cap 0: none */
} Layer;

/* Floats of scratch that each thread needs for items of up to max_rows rows. */
int64_t radixkv_attend_scratch(int64_t max_rows, int64_t head_dim);

/* All rows of the step: prefill and decode, shared runs included. */
void radixkv_attend(const Step *, const Layer *);

/* The first sequence whose table names, for its first `lengths` tokens, a block outside the pool,
   or -1. */
int64_t radixkv_check_tables(const int32_t *tables, int64_t table_width, int64_t block_size,
                             const int32_t *lengths, int64_t num_seqs, int64_t num_blocks);

#endif
