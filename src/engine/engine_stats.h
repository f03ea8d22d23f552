/* The statistics of an engine: what a run adds up, and what other threads read of it meanwhile. */
#ifndef CPA_ENGINE_STATS_H
#define CPA_ENGINE_STATS_H

#include "src/engine/engine_internal.h"

/* What this rank has added up. */
cpa_rank_totals cpa_engine_own_totals(const cpa_engine *engine);
/* Rank 0: engine->totals of all ranks into engine->stats. */
void cpa_engine_join_totals(cpa_engine *engine);

/* Totals over the ranks into engine->stats, once a run has ended. Collective. */
cpa_status cpa_engine_collect_stats(cpa_engine *engine, cpa_error *err);

/* From now on cpa_engine_get_stats gives engine->stats; on rank 0, during a run, with what the scheduler has counted
 * (NULL: what stands there). */
void cpa_engine_publish_stats(cpa_engine *engine, const cpa_scheduler_stats *scheduled);

#endif
