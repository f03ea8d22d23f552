/* What creating an engine (engine.c) and running it (engine_run.c) share. */
#ifndef CPA_ENGINE_INTERNAL_H
#define CPA_ENGINE_INTERNAL_H

#include <stdatomic.h>

#ifndef HASH_NONFATAL_OOM
#define HASH_NONFATAL_OOM 1 /* an entry that does not fit has no table */
#endif
#include <uthash.h>

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "src/check/verify.h"
#include "src/model/synthetic.h"
#include "src/schedule/scheduler.h"
#include "src/trace/timeline.h"
#include "src/worker/worker.h"

/* A request that was submitted and has not finished (rank 0). */
typedef struct cpa_engine_request {
    uint64_t id;
    int64_t prompt_tokens, output_tokens;
    double arrival_s;
    int64_t emitted;
    double *token_s; /* [output_tokens], from the first token on */
    UT_hash_handle hh;
} cpa_engine_request;

struct cpa_engine {
    cpa_engine_options options; /* with defaults filled in */
    cpa_control control;
    cpa_device *device;
    const cpa_transport_table *transport;
    cpa_synthetic synthetic;
    cpa_model network;
    cpa_worker *worker;
    cpa_verify *verify;       /* NULL when nothing is checked */
    cpa_scheduler *scheduler; /* rank 0 */
    cpa_engine_request *requests;
    cpa_planner planner;
    int64_t host_blocks;   /* of one rank */
    double host_bandwidth; /* rank 0, when it has host blocks */
    cpa_engine_stats stats;
    cpa_timeline timeline;
    atomic_int stop;
    atomic_int running; /* cpa_engine_run is under way */
    cpa_error error;
};

#endif
