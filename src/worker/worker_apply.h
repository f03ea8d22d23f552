/* What a plan does to a rank before its layers run: the tables of its sequences, and blocks that move. */
#ifndef CPA_WORKER_APPLY_H
#define CPA_WORKER_APPLY_H

#include "src/worker/worker.h"

/* Cuts, voids, releases, appends and chunks: the sequences, and the chunks as their attention sees them. */
cpa_status cpa_worker_apply(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* What moves before the step's rows are written: out to host memory, back, and between blocks. */
cpa_status cpa_worker_move(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);

#endif
