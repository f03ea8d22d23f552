/* What a plan does to a rank before its layers run: the tables of its sequences, the rows of the step, and blocks that
 * move. */
#ifndef CPA_WORKER_APPLY_H
#define CPA_WORKER_APPLY_H

#include "src/worker/worker.h"

/* Behind the blocks that rank 0 hands out lies the null block, all zeros: entries of block tables that no query sees
 * name it. attend may load such keys all the same, beside others in one tile, and give them the weight 0; so they have
 * to be numbers, which what lies in a block that is free or someone else's need not be. */
static inline int32_t cpa_worker_null_block(const cpa_worker *worker) {
    return (int32_t)worker->options.num_blocks;
}

/* Voids, releases, appends and chunks: the sequences, and the rows of the step on the host. */
cpa_status cpa_worker_apply(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* What moves before the step's rows are written: out to host memory, back, and between blocks. */
cpa_status cpa_worker_move(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);

#endif
