/* What creating an engine (engine.c), running it (engine_run.c) and calls from other threads (engine_requests.c)
 * share. */
#ifndef CPA_ENGINE_INTERNAL_H
#define CPA_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "comm/limits.h"
#include "src/check/verify.h"
#include "src/context/context.h"
#include "src/engine/inbox.h"
#include "src/engine/request_spans.h"
#include "src/model/synthetic.h"
#include "src/schedule/scheduler.h"
#include "src/trace/timeline.h"
#include "src/worker/worker_sparse.h"

/* What a rank has added up by itself since the engine was created. It travels with its reports (run_record.c), so that
 * rank 0 knows the totals during a run; engine_stats.c has what becomes of it. Plain memory. */
typedef struct cpa_rank_totals {
    cpa_context_stats context;
    cpa_verify_stats verify;
    cpa_disk_blocks_stats disk;
    cpa_worker_sparse_stats sparse;
    cpa_rank_stats rank;
    int64_t bytes_to[CPA_COMM_MAX_RANKS]; /* of context.bytes_sent, those to each rank */
} cpa_rank_totals;

/* What cpa_engine_get_stats and cpa_engine_get_rank_stats give, to any thread. */
typedef struct cpa_published_stats {
    pthread_mutex_t lock;
    cpa_engine_stats stats;
    cpa_rank_totals *totals; /* rank 0: [ranks] */
} cpa_published_stats;

struct cpa_engine {
    cpa_engine_options options; /* the options given, with defaults filled in */
    cpa_control control;
    cpa_device *device;
    uint64_t scales_hash;
    void *head_scales; /* on the device; NULL: none came from the host */
    const cpa_transport_table *transport;
    cpa_link *links; /* [ranks, ranks] */
    cpa_synthetic synthetic;
    cpa_model network;
    cpa_block_store store; /* zeros: the engine has none */
    cpa_worker *worker;
    cpa_verify *verify;       /* NULL when nothing is checked */
    cpa_scheduler *scheduler; /* rank 0; NULL on the others */
    cpa_inbox *inbox;         /* rank 0; NULL on the others */
    struct cpa_run *stepping; /* the run made by cpa_engine_step; NULL: none */
    cpa_planner planner;
    cpa_layer_groups groups;         /* groups of the model's layers, with the blocks of one rank */
    double host_bandwidth;           /* rank 0, when it has host blocks */
    cpa_engine_stats stats;          /* statistics of the thread that runs the engine */
    cpa_published_stats *published;  /* copies of `stats` for all threads */
    cpa_rank_totals *totals;         /* rank 0: [ranks], as last reported */
    double step_begin_s, step_end_s; /* of the last step with chunks, on the engine's clock */
    cpa_timeline timeline;
    cpa_request_spans *request_spans; /* rank 0; NULL: no timeline is kept */
    atomic_int stop;
    atomic_int running; /* cpa_engine_run or the like is under way */
    cpa_error error;    /* error of the last call of cpa_engine_run or the like */
    uint64_t serial;    /* number of this engine among those of the process, from 1 */
};

#endif
