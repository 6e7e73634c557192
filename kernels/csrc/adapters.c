/* Adds low-rank adapters to products: b (a x) for the rows of each adapter.

   A thread takes some rows of one adapter through both small products at once, so nothing waits
   between them. Both are gemm.c's, so a row's bits still depend on that row and its adapter alone.
   Knows rows and factors; nothing of models or of which request a row belongs to. */

#include <string.h>

#include "adapters.h"
#include "pool.h"

enum { SOME = 24 }; /* rows of one adapter that a thread takes at a time */

static int64_t pieces_of(const AdapterRun *run) { return (run->rows + SOME - 1) / SOME; }

/* The low products of one thread, apart from those of others by whole cache lines. */
static int64_t floats_per_rank(int64_t rank) { return (rank * SOME + 15) / 16 * 16; }

int64_t radixkv_adapter_scratch(int64_t most_rank, int64_t num_threads) {
    return floats_per_rank(most_rank) * num_threads;
}

typedef struct {
    const Adapting *a;
    int64_t low_floats;
} Work;

static void do_some(void *context, int64_t item, int64_t thread) {
    const Work *work = context;
    const Adapting *a = work->a;
    const Target *target = a->targets + item % a->num_targets;
    int64_t piece = item / a->num_targets;
    const AdapterRun *run = a->adapted->runs;
    while (piece >= pieces_of(run)) piece -= pieces_of(run++);
    int64_t skip = piece * SOME, rows = run->rows - skip < SOME ? run->rows - skip : SOME;
    const LowRank *part = run->layers[a->layer].parts + target->part;
    const float *x = a->x + (run->first + skip) * a->x_stride;
    float *out = a->out + (run->first + skip) * a->out_stride + target->column;
    if (!part->a.data) {
        for (int64_t i = 0; i < rows && a->what == STORE; i++)
            memset(out + i * a->out_stride, 0, target->width * sizeof(float));
        return;
    }
    float *low = a->low + thread * work->low_floats;
    Rows down = {x, low, rows, a->x_stride, part->a.out};
    Rows up = {low, out, rows, part->a.out, a->out_stride};
    radixkv_multiply(&part->a, &down, STORE, 1);
    radixkv_multiply(&part->b, &up, a->what, 1);
}

void radixkv_adapt(const Adapting *a, int64_t num_threads) {
    int64_t pieces = 0, most_rank = 0;
    for (int64_t i = 0; i < a->adapted->num_runs; i++) {
        const AdapterRun *run = a->adapted->runs + i;
        for (int64_t t = 0; t < a->num_targets; t++) {
            const Packed *low = &run->layers[a->layer].parts[a->targets[t].part].a;
            if (low->data && low->out > most_rank) most_rank = low->out;
        }
        pieces += pieces_of(run);
    }
    if (!most_rank && a->what != STORE) return;
    Work work = {a, floats_per_rank(most_rank)};
    radixkv_parallel(pieces * a->num_targets, num_threads, do_some, &work);
}
