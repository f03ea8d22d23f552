/* What a rank puts into the engine's store of blocks, and takes from it (cpattn/blocks.h). A rank puts its own tokens of
 * a parcel as one part: the ranks that have any of them are numbered in their order. It takes those parts that have
 * tokens which lie on it, whoever has put them, and from wherever they lay. */
#ifndef CPA_WORKER_TRANSFER_H
#define CPA_WORKER_TRANSFER_H

#include "src/worker/worker.h"

/* Fills the blocks of the imports of a plan, and says in worker->arrived how many of the first tokens of each transfer
 * are there, as far as this rank has them. */
cpa_status cpa_worker_import(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* Whether this rank has found rows of the request of an export, up to the end of its step, that are not finite. */
int cpa_worker_is_spoiled(const cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_transfer *of);
/* Puts what this rank has of an export of a step that is done into the store, which has taken it of the first *put
 * tokens: of all but where it fails, which is logged. */
cpa_status cpa_worker_export(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_transfer *of, int64_t *put,
                             cpa_error *err);

#endif
