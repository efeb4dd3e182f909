#define _POSIX_C_SOURCE 200809L
#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "float_settings.h"

enum { TILES_AT_ONCE = 64, MOST_THREADS = 64 };

struct job {
    work_on_tiles *work;
    const void *operation;
    int64_t tiles;
    _Atomic int64_t next;
    _Atomic int64_t refused;
};

static void note_refusal(struct job *job, int64_t refused)
{
    int64_t least = job->refused;
    while ((least == 0 || refused < least) && !atomic_compare_exchange_weak(&job->refused, &least, refused))
        ;
}

/* Works on chunks of tiles in their order, until none is left or a block is refused. All chunks before the refused
 * block are then taken by a thread, too, so that the least refusal is that of the payload's first refused block. */
static void *take_chunks(void *shared)
{
    struct job *job = shared;
    float_settings before = use_default_float_settings();
    while (job->refused == 0) {
        int64_t first = atomic_fetch_add(&job->next, TILES_AT_ONCE);
        if (first >= job->tiles)
            break;
        int64_t last = first + TILES_AT_ONCE < job->tiles ? first + TILES_AT_ONCE : job->tiles;
        int64_t refused = job->work(job->operation, first, last);
        if (refused)
            note_refusal(job, refused);
    }
    restore_float_settings(before);
    return 0;
}

static int start_threads(struct job *job, pthread_t *threads, int wanted)
{
    sigset_t all, before;
    int started = 0;
    sigfillset(&all); /* so that only the caller's threads run signal handlers */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < wanted && pthread_create(&threads[started], 0, take_chunks, job) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return started;
}

int64_t diloco_run_tiles(work_on_tiles *work, const void *operation, int64_t tiles, int32_t threads)
{
    struct job job = {work, operation, tiles, 0, 0};
    int64_t chunks = (tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE;
    int64_t useful = threads < chunks ? threads : chunks;
    pthread_t others[MOST_THREADS];
    int started = 0;
    if (useful > 1)
        started = start_threads(&job, others, (int)(useful < MOST_THREADS ? useful : MOST_THREADS) - 1);
    take_chunks(&job);
    for (int i = 0; i < started; i++)
        pthread_join(others[i], 0);
    return job.refused;
}
