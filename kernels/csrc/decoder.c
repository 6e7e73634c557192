/* Runs all layers of a Llama-like decoder over the rows of one step.

   One call a step, so that nothing between two products is paid to an interpreter. Every row's bits
   depend on its own token, position, keys and adapter alone: see gemm.c, adapters.c and attention.c.
   Activations are float32 whatever the weights and the pool are stored in. Knows layers and slots; nothing of
   sequences, requests or the cache. */

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "adapters.h"
#include "attention.h"
#include "gemm.h"
#include "pool.h"

typedef struct {
    Packed qkv, out, gate_up, down;
    const float *before, *after;  /* [hidden] weights of the norms before attention and after it */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    char *k, *v;                  /* the layer's pool [slots, kv_heads, head_dim] */
    int64_t windowed;             /* whether it sees a sliding window only */
} DecoderLayer;

typedef struct {
    const DecoderLayer *layers;
    int64_t num_layers, hidden, q_heads, kv_heads, head_dim, pool_type, embeddings_type, vocab;
    const char *embeddings;       /* [vocab, hidden] */
    const float *norm;            /* [hidden] */
    const Packed *head;
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    float epsilon, scale;
} Decoder;

typedef struct {
    int64_t rows, num_logits, num_threads;
    const int64_t *tokens, *positions, *slots; /* [rows] */
    const int64_t *logit_rows;                 /* [num_logits] */
    const Step *whole, *windowed;              /* what attends what; windowed NULL if no layer asks */
    float *hidden, *normed, *attended;         /* [rows, hidden] x 2, [rows, q_heads * head_dim] */
    float *qkv, *gated;                        /* [rows, qkv.out], [rows, down.in] */
    float *logits;                             /* [num_logits, vocab] */
    AdaptedRows adapted, wanted_adapted;       /* of rows, and of the rows that get logits */
    float *low, *deltas;                       /* radixkv_adapter_scratch, [rows, 2, down.in] */
} Pass;

#define SOME_ROWS 8 /* that a thread takes at a time where a row is little work */

INLINE void normalise(const float *x, const float *weight, int64_t n, float epsilon, float *out) {
    vf squares = splat(0);
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares += get(x + i) * get(x + i);
    for (; i < n; i++) rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((sum_v(squares) + rest) / n + epsilon);
    for (i = 0; i + LANES <= n; i += LANES) put(out + i, get(weight + i) * (get(x + i) * scale));
    for (; i < n; i++) out[i] = weight[i] * (x[i] * scale);
}

typedef struct {
    const Decoder *d;
    const DecoderLayer *layer;
    const Pass *p;
    const float *weight;
} Work;

/* Do something for SOME_ROWS rows an item. */
static void each_rows(Work *work, Task task) {
    const Pass *p = work->p;
    int64_t items = (p->rows + SOME_ROWS - 1) / SOME_ROWS;
    radixkv_parallel(items, items > 1 ? p->num_threads : 1, task, work);
}

static void normalise_some(void *context, int64_t item, int64_t thread) {
    const Work *w = context;
    int64_t n = w->d->hidden, end = (item + 1) * SOME_ROWS;
    for (int64_t r = item * SOME_ROWS; r < end && r < w->p->rows; r++)
        normalise(w->p->hidden + r * n, w->weight, n, w->d->epsilon, w->p->normed + r * n);
}

static void normalise_rows(const Decoder *d, const Pass *p, const float *weight) {
    Work work = {d, NULL, p, weight};
    each_rows(&work, normalise_some);
}

/* Turn the first half of a head's values against the second, as far as its position says. */
INLINE void rotate(float *x, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

INLINE void store(char *to, const float *from, int64_t n, int type) {
    for (int64_t i = 0; i < n; i++) store_one(to + i * element_size(type), from[i], type);
}

/* Norm and position of queries and keys, in place; keys and values go to their slots. */
INLINE void place_row(int type, const Decoder *d, const DecoderLayer *layer, const Pass *p,
                      int64_t row) {
    int64_t dim = d->head_dim, half = dim / 2, heads = d->q_heads + d->kv_heads;
    float *q = p->qkv + row * layer->qkv.out;
    const float *cosines = d->cosines + p->positions[row] * half;
    const float *sines = d->sines + p->positions[row] * half;
    for (int64_t h = 0; h < heads; h++) {
        const float *weight = h < d->q_heads ? layer->q_norm : layer->k_norm;
        if (weight) normalise(q + h * dim, weight, dim, d->epsilon, q + h * dim);
        rotate(q + h * dim, cosines, sines, half);
    }
    int64_t width = d->kv_heads * dim, to = p->slots[row] * width * element_size(type);
    store(layer->k + to, q + d->q_heads * dim, width, type);
    store(layer->v + to, q + heads * dim, width, type);
}

static void place_some(void *context, int64_t item, int64_t thread) {
    const Work *w = context;
    int64_t end = (item + 1) * SOME_ROWS;
    for (int64_t r = item * SOME_ROWS; r < end && r < w->p->rows; r++) switch (w->d->pool_type) {
        case FLOAT32: place_row(FLOAT32, w->d, w->layer, w->p, r); break;
        case BFLOAT16: place_row(BFLOAT16, w->d, w->layer, w->p, r); break;
        default: place_row(FLOAT16, w->d, w->layer, w->p, r);
        }
}

static void place_rows(const Decoder *d, const DecoderLayer *layer, const Pass *p) {
    Work work = {d, layer, p, NULL};
    each_rows(&work, place_some);
}

INLINE void attend(const Decoder *d, const DecoderLayer *layer, const Pass *p) {
    Layer call = {
        .q = p->qkv,
        .k = layer->k,
        .v = layer->v,
        .out = p->attended,
        .q_row_stride = layer->qkv.out,
        .q_head_stride = d->head_dim,
        .out_row_stride = d->q_heads * d->head_dim,
        .out_head_stride = d->head_dim,
        .scale = d->scale,
    };
    radixkv_attend(layer->windowed ? p->windowed : p->whole, &call);
}

INLINE void multiply(const Packed *w, const float *x, int64_t x_stride, float *out,
                     int64_t out_stride, int64_t rows, int64_t what, int64_t num_threads) {
    Rows r = {x, out, rows, x_stride, out_stride};
    radixkv_multiply(w, &r, what, num_threads);
}

/* What the rows' adapters add to a product of num_targets parts, each at a column of `out`. */
static void adapt(const Decoder *d, const DecoderLayer *layer, const Pass *p, const float *x,
                  int64_t x_stride, float *out, int64_t out_stride, int64_t what,
                  const Target *targets, int64_t num_targets) {
    Adapting call = {&p->adapted, layer - d->layers, targets, num_targets, x, out,
                     x_stride,    out_stride,        what,    p->low};
    if (p->adapted.num_runs) radixkv_adapt(&call, p->num_threads);
}

static void adapt_qkv(const Decoder *d, const DecoderLayer *layer, const Pass *p) {
    int64_t q = d->q_heads * d->head_dim, kv = d->kv_heads * d->head_dim;
    const Target targets[] = {{ADAPT_Q, 0, q}, {ADAPT_K, q, kv}, {ADAPT_V, q + kv, kv}};
    adapt(d, layer, p, p->normed, d->hidden, p->qkv, layer->qkv.out, ADD, targets, 3);
}

/* silu(gate) * up. What adapters add comes before the activation, so it is computed before. */
static void gate_up(const Decoder *d, const DecoderLayer *layer, const Pass *p) {
    int64_t width = layer->down.in;
    Rows r = {p->normed, p->gated, p->rows, d->hidden, width};
    if (p->adapted.gated) {
        const Target targets[] = {{ADAPT_GATE, 0, width}, {ADAPT_UP, width, width}};
        adapt(d, layer, p, p->normed, d->hidden, p->deltas, 2 * width, STORE, targets, 2);
        r.plus = p->deltas, r.has_plus = p->adapted.gated;
    }
    radixkv_multiply(&layer->gate_up, &r, GATE, p->num_threads);
}

/* What follows attention in a layer. */
static void finish_layer(const Decoder *d, const DecoderLayer *layer, const Pass *p) {
    const Target out = {ADAPT_OUT, 0, d->hidden}, down = {ADAPT_DOWN, 0, d->hidden};
    int64_t hidden = d->hidden, n = p->rows, threads = p->num_threads;
    multiply(&layer->out, p->attended, layer->out.in, p->hidden, hidden, n, ADD, threads);
    adapt(d, layer, p, p->attended, layer->out.in, p->hidden, hidden, ADD, &out, 1);
    normalise_rows(d, p, layer->after);
    gate_up(d, layer, p);
    multiply(&layer->down, p->gated, layer->down.in, p->hidden, hidden, n, ADD, threads);
    adapt(d, layer, p, p->gated, layer->down.in, p->hidden, hidden, ADD, &down, 1);
}

/* Copy the rows that get logits together, to where queries lay; return a pass over them alone. */
static Pass only_wanted(const Decoder *d, const Pass *p) {
    int64_t width = d->q_heads * d->head_dim;
    Pass wanted = *p;
    wanted.rows = p->num_logits;
    wanted.adapted = p->wanted_adapted;
    wanted.hidden = p->qkv;
    wanted.attended = p->qkv + p->num_logits * d->hidden;
    for (int64_t i = 0; i < p->num_logits; i++) {
        int64_t row = p->logit_rows[i];
        memcpy(wanted.hidden + i * d->hidden, p->hidden + row * d->hidden, d->hidden * sizeof(float));
        memcpy(wanted.attended + i * width, p->attended + row * width, width * sizeof(float));
    }
    return wanted;
}

void radixkv_decoder(const Decoder *d, const Pass *p) {
    for (int64_t r = 0; r < p->rows; r++) {
        const char *from = d->embeddings + p->tokens[r] * d->hidden * element_size(d->embeddings_type);
        for (int64_t i = 0; i < d->hidden; i++)
            p->hidden[r * d->hidden + i] =
                load_one(from + i * element_size(d->embeddings_type), d->embeddings_type);
    }
    Pass rest = *p;
    int64_t compact = 0; /* whether rest holds just the rows that get logits */
    for (int64_t i = 0; i < d->num_layers; i++) {
        const DecoderLayer *layer = d->layers + i;
        int64_t last = i == d->num_layers - 1;
        normalise_rows(d, p, layer->before);
        multiply(&layer->qkv, p->normed, d->hidden, p->qkv, layer->qkv.out, p->rows, STORE,
                 p->num_threads);
        adapt_qkv(d, layer, p);
        place_rows(d, layer, p);
        if (last && !p->num_logits) return; /* its keys and values were all that was wanted */
        attend(d, layer, p);
        int64_t floats = p->num_logits * (d->hidden + d->q_heads * d->head_dim);
        if (last && floats <= p->rows * layer->qkv.out) rest = only_wanted(d, p), compact = 1;
        finish_layer(d, layer, &rest);
    }
    for (int64_t i = 0; i < p->num_logits; i++)
        normalise(rest.hidden + (compact ? i : p->logit_rows[i]) * d->hidden, d->norm, d->hidden,
                  d->epsilon, p->normed + i * d->hidden);
    multiply(d->head, p->normed, d->hidden, p->logits, d->vocab, p->num_logits, STORE,
             p->num_threads);
}
