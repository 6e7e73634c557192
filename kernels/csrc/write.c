/* Stores new keys and values in their slots. Knows bytes and strides, all of them in bytes. */

#include <stdint.h>
#include <string.h>

typedef struct {
    char *k_pool, *v_pool;
    const char *k, *v;
    const int64_t *slots;
    int64_t num_tokens, num_slots, num_heads, head_bytes;
    int64_t k_row, k_head, v_row, v_head;
} Write;

/* Returns the first token whose slot is out of range, before anything is written, or -1. */
int64_t radixkv_write(const Write *w) {
    for (int64_t t = 0; t < w->num_tokens; t++)
        if (w->slots[t] < 0 || w->slots[t] >= w->num_slots) return t;
    for (int64_t t = 0; t < w->num_tokens; t++) {
        int64_t to = w->slots[t] * w->num_heads * w->head_bytes;
        for (int64_t h = 0; h < w->num_heads; h++, to += w->head_bytes) {
            memcpy(w->k_pool + to, w->k + t * w->k_row + h * w->k_head, w->head_bytes);
            memcpy(w->v_pool + to, w->v + t * w->v_row + h * w->v_head, w->head_bytes);
        }
    }
    return -1;
}
