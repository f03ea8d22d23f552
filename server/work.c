#include "server/work.h"

#include "base/check.h"

static void *work_on(void *ctx) {
    cpa_work *work = ctx;
    pthread_mutex_lock(&work->lock);
    for (;;) {
        while (!work->first && !work->is_stopping) pthread_cond_wait(&work->changed, &work->lock);
        cpa_work_item *item = work->first;
        if (!item) break;
        work->first = item->next;
        if (!work->is_stopping) {
            pthread_mutex_unlock(&work->lock);
            item->run(item->ctx);
            pthread_mutex_lock(&work->lock);
        }
        MHD_resume_connection(item->connection); /* from now on the item is its connection's */
    }
    pthread_mutex_unlock(&work->lock);
    return NULL;
}

static void stop(cpa_work *work, int n_threads) {
    pthread_mutex_lock(&work->lock);
    work->is_stopping = 1;
    pthread_cond_broadcast(&work->changed);
    pthread_mutex_unlock(&work->lock);
    for (int i = 0; i < n_threads; i++) pthread_join(work->threads[i], NULL);
}

cpa_status cpa_work_start(cpa_work *work, cpa_error *err) {
    *work = (cpa_work){.is_stopping = 0};
    pthread_mutex_init(&work->lock, NULL);
    pthread_cond_init(&work->changed, NULL);
    for (int i = 0; i < CPA_WORK_THREADS; i++) {
        if (pthread_create(&work->threads[i], NULL, work_on, work) == 0) continue;
        stop(work, i);
        return cpa_fail(err, CPA_NO_MEMORY, "the server cannot start its %d threads", CPA_WORK_THREADS);
    }
    return CPA_OK;
}

int cpa_work_hand_over(cpa_work *work, cpa_work_item *item) {
    pthread_mutex_lock(&work->lock);
    const int is_taken = !work->is_stopping;
    if (is_taken) {
        item->next = NULL;
        if (work->first) {
            work->last->next = item;
        } else {
            work->first = item;
        }
        work->last = item;
        MHD_suspend_connection(item->connection);
        pthread_cond_signal(&work->changed);
    }
    pthread_mutex_unlock(&work->lock);
    return is_taken;
}

void cpa_work_stop(cpa_work *work) {
    stop(work, CPA_WORK_THREADS);
}
