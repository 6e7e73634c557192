/* A team of threads for short loops, thousands of them a second.

   A loop is over when its items are done, not when every thread has come to say so: on a machine
   that others use too, a thread that the system has put aside costs the items it holds, while
   OpenMP's barriers cost a time slice for every loop. Threads wait awake for a moment, because the
   next loop of a step follows within microseconds, and then sleep. Knows nothing of what is done.

   A ticket is one number: the loop's turn, its threads, and how many of its items nobody has taken.
   Items are taken by compare-and-swap, so whoever has one knows that its loop is not over and that
   the fields of `job` are that loop's. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "pool.h"

#define MOST_THREADS 255
#define AWAKE 2000   /* looks at the ticket before a worker goes to sleep: some tens of microseconds */
#define PATIENCE 200 /* looks at the count before the caller lets others have its processor */

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

static struct {
    Task task;
    void *context;
    int64_t items;
} job;

static _Atomic uint64_t ticket; /* turn << 40 | threads << 32 | items left */
static _Atomic int64_t num_done, num_asleep;
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER, bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;
static int64_t num_workers; /* under in_use */

static int64_t threads_of(uint64_t t) { return t >> 32 & 0xff; }

static int64_t left_of(uint64_t t) { return t & 0xffffffff; }

/* Take and do items of the present loop until none is left that this thread may take. */
static void help(int64_t thread) {
    uint64_t now = atomic_load_explicit(&ticket, memory_order_acquire);
    while (left_of(now) && thread < threads_of(now)) {
        if (!atomic_compare_exchange_weak_explicit(&ticket, &now, now - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        job.task(job.context, job.items - left_of(now), thread);
        atomic_fetch_add_explicit(&num_done, 1, memory_order_release);
        now = atomic_load_explicit(&ticket, memory_order_acquire);
    }
}

static void *work(void *argument) {
    int64_t thread = (intptr_t)argument;
    uint64_t seen = 0;
    for (;;) {
        uint64_t now = atomic_load_explicit(&ticket, memory_order_acquire);
        for (int i = 0; i < AWAKE && now >> 32 == seen; i++) {
            RELAX();
            now = atomic_load_explicit(&ticket, memory_order_acquire);
        }
        if (now >> 32 == seen) {
            pthread_mutex_lock(&bed);
            atomic_fetch_add(&num_asleep, 1);
            while ((now = atomic_load(&ticket)) >> 32 == seen) pthread_cond_wait(&called, &bed);
            atomic_fetch_sub(&num_asleep, 1);
            pthread_mutex_unlock(&bed);
        }
        seen = now >> 32;
        help(thread);
    }
    return NULL;
}

/* Start workers until there are enough; fewer if the system gives no more. */
static void enlist(int64_t wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (num_workers < wanted) {
        pthread_t handle;
        if (pthread_create(&handle, &attributes, work, (void *)(intptr_t)(num_workers + 1))) break;
        num_workers++;
    }
    pthread_attr_destroy(&attributes);
}

void radixkv_parallel(int64_t items, int64_t threads, Task task, void *context) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > items) threads = items;
    if (threads < 2 || pthread_mutex_trylock(&in_use)) {
        for (int64_t i = 0; i < items; i++) task(context, i, 0);
        return;
    }
    if (num_workers < threads - 1) enlist(threads - 1);
    job.task = task, job.context = context, job.items = items;
    atomic_store_explicit(&num_done, 0, memory_order_relaxed);
    uint64_t turn = (atomic_load_explicit(&ticket, memory_order_relaxed) >> 40) + 1;
    atomic_store(&ticket, turn << 40 | (uint64_t)threads << 32 | (uint64_t)items);
    if (atomic_load(&num_asleep)) {
        pthread_mutex_lock(&bed);
        pthread_cond_broadcast(&called);
        pthread_mutex_unlock(&bed);
    }
    help(0);
    for (int looks = 0; atomic_load_explicit(&num_done, memory_order_acquire) < items; looks++) {
        if (looks < PATIENCE) RELAX();
        else sched_yield();
    }
    pthread_mutex_unlock(&in_use);
}

void *radixkv_scratch(int64_t bytes) {
    static __thread char *memory;
    static __thread int64_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, size);
        if (!memory) abort();
    }
    return memory;
}
