/* What creating an engine (engine.c) and running it (engine_run.c) share. */
#ifndef CPA_ENGINE_INTERNAL_H
#define CPA_ENGINE_INTERNAL_H

#include <stdatomic.h>

#include <uthash.h>

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "src/check/verify.h"
#include "src/model/source_synthetic.h"
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
    cpa_source source;
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
    cpa_error error;
};

/* Fills the defaults of the options and checks every value. */
cpa_status cpa_engine_resolve(const cpa_engine_options *given, cpa_engine_options *out, cpa_error *err);

enum { CPA_IDENTITY_BYTES = 256 };

/* Bytes of one block of the cache with all layers. */
int64_t cpa_engine_block_bytes(const cpa_engine_options *options);
/* Blocks of one rank that host memory has room for; 0 where nothing is swapped. */
int64_t cpa_engine_host_blocks(const cpa_engine_options *options);
/* The planner that these options, resolved, ask for, without rates. */
cpa_planner cpa_engine_planner(const cpa_engine_options *options, int32_t cp_size);
/* A request as the scheduler takes it. */
cpa_scheduler_request cpa_engine_scheduled(const cpa_request *request);
/* The scheduler that these options, resolved, ask for, without host memory. Both arguments must outlive it or its
 * creation: `options` the scheduler, `identity`, which is filled, its creation. */
cpa_scheduler_options cpa_engine_scheduler_options(cpa_engine_options *options, cpa_planner planner,
                                                   char identity[CPA_IDENTITY_BYTES]);
/* What the scheduler counts of cache and preemption. */
void cpa_engine_take_stats(const cpa_scheduler_stats *scheduled, cpa_engine_stats *out);

#endif
