/* The engine of a job on one rank, and what it stands on: the device, the size of the cache, the network. What requests
 * it gets, and what becomes of them, is its user's: a batch run (run.h) or a server (serve.h).
 *
 * Its steps are collective and return the same code on every rank; what is wrong is then said already. */
#ifndef CPA_LAUNCHER_SERVICE_H
#define CPA_LAUNCHER_SERVICE_H

#include "comm/limits.h"
#include "launcher/block_store.h"
#include "launcher/job.h"
#include "launcher/network.h"
#include "launcher/output/report.h"
#include "launcher/ranks/job_ranks.h"

/* It must not move once its network is there. */
typedef struct cpa_service {
    cpa_job_ranks ranks;
    cpa_job job;
    cpa_rank_placement placement;
    cpa_cache_size cache;     /* cache of a rank */
    cpa_prompt_answer answer; /* rank 0: of `generate`; without a prompt: none */
    cpa_network network;
    cpa_job_store store;
    cpa_engine *engine;                                      /* NULL: not created yet */
    cpa_link links[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS]; /* those of the engine, once they are noted */
    /* Rank 0, with --timeline: what requests have of the cache, wherever that changes. */
    struct cpa_cache_use *cache_use;
    int64_t n_cache_use, cap_cache_use;
    int lost_cache_use; /* memory was lacking for some of it */
} cpa_service;

/* Chooses the device and the cores of each rank. */
cpa_exit_code cpa_service_place(cpa_service *service);

/* Chooses the size of the cache: `choose` does, on rank 0, by what limits it in this job. */
typedef cpa_status (*cpa_cache_size_fn)(void *ctx, const cpa_cache_limits *limits, cpa_cache_size *out, cpa_error *err);
cpa_exit_code cpa_service_size_cache(cpa_service *service, cpa_cache_size_fn choose, void *ctx);

/* Loads the weights of --model-dir, if there are any. The workload is rank 0's, and must outlive the service. */
cpa_exit_code cpa_service_load_network(cpa_service *service, cpa_workload *workload);

/* Creates the engine; of its options those of the device, of the network and of the store of blocks are set here. */
cpa_exit_code cpa_service_create_engine(cpa_service *service, cpa_engine_options options);

/* Rank 0: an outcome of which nothing has happened yet. The workload and the metrics are the caller's. */
cpa_outcome cpa_service_outcome(const cpa_service *service, const cpa_workload *workload, cpa_metrics *metrics);
/* Rank 0: notes in it what the engine runs on: device, transport and links. */
void cpa_service_note_place(cpa_service *service, cpa_outcome *outcome);
/* Rank 0: notes in it what the engine has counted so far. */
void cpa_service_note_stats(const cpa_service *service, cpa_outcome *outcome);

/* Rank 0: the same after a step that ended `elapsed_s` after the start of the run. */
void cpa_service_note_step(cpa_service *service, cpa_outcome *outcome, double elapsed_s);

/* After a run: every rank's spans go to the file of --timeline, which rank 0 writes. Unlike the others, it returns what
 * this rank has met. */
cpa_exit_code cpa_service_write_timeline(cpa_service *service);

/* Destroys the engine, the network and the store. The ranks stay open. */
void cpa_service_close(cpa_service *service);

#endif
