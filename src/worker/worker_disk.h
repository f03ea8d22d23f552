/* The blocks that a plan moves between a rank's host memory and its folder (src/cache/disk_blocks.h). */
#ifndef CPA_WORKER_DISK_H
#define CPA_WORKER_DISK_H

#include "src/worker/worker.h"

/* Opens the folder of the options, if there is one. */
cpa_status cpa_worker_disk_open(cpa_worker *worker, cpa_error *err);
/* Waits until all is written. */
void cpa_worker_disk_close(cpa_worker *worker);

/* Starts the loads of a plan; they write worker->lost and host blocks until cpa_worker_disk_finish. */
cpa_status cpa_worker_disk_load(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* Hands over what the swap_outs of the plan have brought to host memory: in the last plan all of it, however long that
 * takes, otherwise what there is room for. */
void cpa_worker_disk_store(cpa_worker *worker, const cpa_step_plan *plan);
/* The step is done: waits for its loads, and completes worker->lost. */
void cpa_worker_disk_finish(cpa_worker *worker, const cpa_step_plan *plan);

#endif
