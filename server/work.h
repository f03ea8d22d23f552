/* Threads for what takes long: a large body that is parsed and encoded would hold up the other connections of its
 * thread. */
#ifndef CPA_SERVER_WORK_H
#define CPA_SERVER_WORK_H

#include <microhttpd.h>
#include <pthread.h>

#include <cpattn/status.h>

typedef struct cpa_work_item {
    struct MHD_Connection *connection;
    void (*run)(void *ctx);
    void *ctx;
    struct cpa_work_item *next;
} cpa_work_item;

enum { CPA_WORK_THREADS = 2 };

typedef struct cpa_work {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t threads[CPA_WORK_THREADS];
    cpa_work_item *first, *last; /* guarded by the lock */
    int is_stopping;             /* guarded by the lock */
} cpa_work;

cpa_status cpa_work_start(cpa_work *work, cpa_error *err);

/* From the thread of the connection, which is suspended: another thread calls run(ctx), once, and resumes it. The item
 * must live until then. 0, and nothing happens, once the work is being stopped. */
int cpa_work_hand_over(cpa_work *work, cpa_work_item *item);

/* What has not begun is not run any more; all connections are resumed. */
void cpa_work_stop(cpa_work *work);

#endif
