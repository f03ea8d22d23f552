/* What becomes of drafts on a rank: which of a step's were right follows from what the step has drawn, which every rank
 * has; where the cache of a sequence ends after it, the next plan says. */
#ifndef CPA_WORKER_DRAFTS_H
#define CPA_WORKER_DRAFTS_H

#include "src/worker/worker.h"

/* Of the emissions of a chunk of the step that ran last, which `emission` is the first of as cpa_worker_drawn counts
 * them: the one behind emission `at` (0: the first), whose row has the draft that is what `at` has drawn; -1: there is
 * no such draft. All that count are those from 0 on. */
int64_t cpa_worker_next_accepted(const cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk,
                                 int64_t emission, int64_t at);

/* The step is done: notes how far its sequences have come, and forgets what is not finite in rows of wrong drafts. */
void cpa_worker_judge_drafts(cpa_worker *worker, const cpa_step_plan *plan);

/* Leaves a sequence its first blocks on this rank, in all groups of layers. */
void cpa_worker_cut_tables(cpa_worker *worker, int32_t seq, int64_t blocks);
/* The cache of a sequence ends where the plan says: the length of this rank's shard follows from that alone.
 * CPA_INTERNAL where this rank has counted otherwise. */
cpa_status cpa_worker_cut(cpa_worker *worker, const cpa_plan_cut *cut, cpa_error *err);

#endif
