/* A team of threads for short loops, thousands of them a second. */

#ifndef RADIXKV_POOL_H
#define RADIXKV_POOL_H

#include <stdint.h>

/* Do item number `item`; `thread` is below the number of threads that the loop was started with. */
typedef void (*Task)(void *context, int64_t item, int64_t thread);

/* Do items 0..items, in ascending order of their beginnings, on up to `threads` threads, of which
   the caller is one; return when all are done. Loops started from several threads at once are not
   interleaved: whoever finds the team at work does its own loop alone. */
void radixkv_parallel(int64_t items, int64_t threads, Task task, void *context);

/* Scratch memory of the calling thread, 64-byte aligned, of at least so many bytes. Valid until the
   thread asks again. */
void *radixkv_scratch(int64_t bytes);

#endif
