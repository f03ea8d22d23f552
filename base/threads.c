#include "base/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"

typedef struct pool_job {
    cpa_threads_work work;
    void *ctx;
    int64_t items;
    atomic_int_fast64_t next;
} pool_job;

typedef struct pool_thread {
    cpa_threads *pool;
    pthread_t handle;
    int32_t index;
} pool_thread;

struct cpa_threads {
    pthread_mutex_t run_lock; /* one run at a time */
    pthread_mutex_t lock;     /* guards what follows */
    pthread_cond_t opened;
    pthread_cond_t left;
    pool_job *job;       /* open for workers to join; NULL between runs */
    uint64_t generation; /* number of the open job, so that a worker joins it once */
    int32_t joined;      /* workers inside the job */
    int stopping;
    int32_t count;
    int32_t started;
    pool_thread workers[];
};

static void drain(pool_job *job, int32_t thread, const cpa_progress *progress) {
    for (;;) {
        int64_t item = atomic_fetch_add(&job->next, 1);
        if (item >= job->items) return;
        job->work(job->ctx, item, thread);
        if (progress) cpa_progress_look(progress);
    }
}

static void *run_worker(void *ctx) {
    const pool_thread *self = ctx;
    cpa_threads *pool = self->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stopping && (!pool->job || pool->generation == seen))
            pthread_cond_wait(&pool->opened, &pool->lock);
        if (pool->stopping) break;
        pool_job *job = pool->job;
        seen = pool->generation;
        pool->joined++;
        pthread_mutex_unlock(&pool->lock);
        drain(job, self->index, NULL);
        pthread_mutex_lock(&pool->lock);
        if (--pool->joined == 0) pthread_cond_signal(&pool->left);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Closes the job to workers that have not joined it yet, and waits for those that have. */
static void close_job(cpa_threads *pool, const cpa_progress *progress) {
    const double wait_s = 300e-6;
    pthread_mutex_lock(&pool->lock);
    pool->job = NULL;
    while (pool->joined > 0) {
        const struct timespec until = cpa_clock_after(wait_s);
        pthread_cond_clockwait(&pool->left, &pool->lock, CLOCK_MONOTONIC, &until);
        pthread_mutex_unlock(&pool->lock);
        if (progress) cpa_progress_look(progress);
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

void cpa_threads_run(cpa_threads *pool, int64_t items, cpa_threads_work work, void *ctx, const cpa_progress *progress) {
    pool_job job = {.work = work, .ctx = ctx, .items = items};
    int shared = pool->count > 1 && items > 1;
    atomic_init(&job.next, 0);
    pthread_mutex_lock(&pool->run_lock);
    if (shared) {
        pthread_mutex_lock(&pool->lock);
        pool->job = &job;
        pool->generation++;
        pthread_cond_broadcast(&pool->opened);
        pthread_mutex_unlock(&pool->lock);
    }
    drain(&job, 0, progress);
    if (shared) close_job(pool, progress);
    pthread_mutex_unlock(&pool->run_lock);
}

static cpa_status bind_thread(pthread_t thread, int32_t cpu, cpa_error *err) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < 0 || cpu >= CPU_SETSIZE)
        return cpa_fail(err, CPA_INVALID, "threads: CPU %d is out of range 0..%d", cpu, CPU_SETSIZE - 1);
    CPU_SET(cpu, &set);
    int error = pthread_setaffinity_np(thread, sizeof set, &set);
    if (error) return cpa_fail(err, CPA_DEVICE, "threads: cannot bind a thread to CPU %d: %s", cpu, strerror(error));
    return CPA_OK;
}

cpa_status cpa_threads_create(int32_t count, const int32_t *cpus, int32_t n_cpus, cpa_threads **out, cpa_error *err) {
    cpa_status status = CPA_OK;
    cpa_threads *pool = calloc(1, sizeof *pool + (size_t)count * sizeof *pool->workers);
    if (!pool) return cpa_fail(err, CPA_NO_MEMORY, "threads: no memory for %d", count);
    pthread_mutex_init(&pool->run_lock, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->opened, NULL);
    pthread_cond_init(&pool->left, NULL);
    pool->count = count;
    for (int32_t i = 1; i < count; i++) {
        pool_thread *worker = &pool->workers[pool->started];
        *worker = (pool_thread){.pool = pool, .index = i};
        int error = pthread_create(&worker->handle, NULL, run_worker, worker);
        if (error) {
            status = cpa_fail(err, CPA_DEVICE, "threads: cannot start thread %d of %d: %s", i, count, strerror(error));
            goto failed;
        }
        pool->started++;
        if (n_cpus > 0) CPA_TRY_GOTO(bind_thread(worker->handle, cpus[i % n_cpus], err), failed);
    }
    if (n_cpus > 0) CPA_TRY_GOTO(bind_thread(pthread_self(), cpus[0], err), failed);
    *out = pool;
    return CPA_OK;
failed:
    cpa_threads_destroy(pool);
    return status;
}

void cpa_threads_destroy(cpa_threads *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->opened);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->started; i++) pthread_join(pool->workers[i].handle, NULL);
    pthread_cond_destroy(&pool->left);
    pthread_cond_destroy(&pool->opened);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->run_lock);
    free(pool);
}
