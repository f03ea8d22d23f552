/* What a rank puts into the engine's store of blocks, and takes from it (cpattn/blocks.h). A rank puts its own tokens of
 * a parcel as one part: the ranks that have any of them are numbered in their order. It takes those parts that have
 * tokens which lie on it, whoever has put them, and from wherever they lay. */
#ifndef CPA_WORKER_TRANSFER_H
#define CPA_WORKER_TRANSFER_H

#include "src/worker/worker.h"

/* Fills the blocks of the imports of a plan, and says in worker->arrived how many of the first tokens of each transfer
 * are there, as far as this rank has them. */
cpa_status cpa_worker_import(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* Puts the exports of a step that is done into the store; of a request with rows that are not finite, nothing. */
cpa_status cpa_worker_export(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);

#endif
