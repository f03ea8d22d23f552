/* The options of an engine, resolved, and what follows from them for its parts. */
#ifndef CPA_ENGINE_OPTIONS_H
#define CPA_ENGINE_OPTIONS_H

#include <cpattn/engine.h>

#include "src/engine/engine_identity.h"
#include "src/schedule/planner.h"
#include "src/schedule/scheduler.h"

/* Fills the defaults of the options and checks every value. */
cpa_status cpa_engine_resolve(const cpa_engine_options *given, cpa_engine_options *out, cpa_error *err);

/* Bytes of one block of the cache with all layers. */
int64_t cpa_engine_block_bytes(const cpa_engine_options *options);
/* The groups of layers, with the blocks of one rank, on the device, in host memory and on disk. */
cpa_layer_groups cpa_engine_groups(const cpa_engine_options *options, int32_t cp_size);
/* CPA_INVALID where what is evicted is to be kept and a group has no blocks for that. */
cpa_status cpa_engine_check_room(const cpa_engine_options *options, const cpa_layer_groups *groups, cpa_error *err);
/* The planner that these options, resolved, ask for, without rates. */
cpa_planner cpa_engine_planner(const cpa_engine_options *options, int32_t cp_size);
/* A request as the scheduler takes it, whose output tokens are given. */
cpa_scheduler_request cpa_engine_scheduled(const cpa_request *request);
/* How a request's tokens are drawn, checked; zeros for NULL. */
cpa_status cpa_engine_check_sampling(uint64_t request, const cpa_sampling *given, cpa_sampling *out, cpa_error *err);
/* The same as ranks are told it. */
cpa_plan_sampling cpa_engine_planned_sampling(const cpa_sampling *sampling);
/* The scheduler that these options, resolved, ask for, with the groups of cpa_engine_groups and without rates; `scales`
 * as for engine_identity.h. `options` must outlive the scheduler, and `identity`, which is filled, its creation. */
cpa_scheduler_options cpa_engine_scheduler_options(cpa_engine_options *options, const cpa_layer_groups *groups,
                                                   cpa_planner planner, uint64_t scales,
                                                   char identity[CPA_IDENTITY_BYTES]);

/* The groups of layers and their blocks, in the statistics. */
void cpa_engine_describe_groups(const cpa_layer_groups *groups, cpa_engine_stats *out);
/* What the scheduler counts of cache and preemption; the groups are described. */
void cpa_engine_take_stats(const cpa_scheduler_stats *scheduled, cpa_engine_stats *out);

#endif
