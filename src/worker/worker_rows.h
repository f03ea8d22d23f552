/* The rows of a step on the host: tokens, positions and slots of this rank, the tokens that the step yields on all of
 * them, and how these are drawn. */
#ifndef CPA_WORKER_ROWS_H
#define CPA_WORKER_ROWS_H

#include "src/worker/worker.h"

/* Whether the rows of a step are replicated, as the model takes it with slices. The same on every rank. */
int cpa_worker_replicates(const cpa_worker *worker, const cpa_step_plan *plan);

/* The tokens of a sequence that have rows on a rank in a step whose rows are replicated or not. */
cpa_token_set cpa_worker_listed(const cpa_worker *worker, int replicated, cpa_placement placement, int32_t rank);

/* The rows that every rank has if the step is captured, 0 if it may not be: the same on every rank. */
int64_t cpa_worker_padded_rows(const cpa_worker *worker, const cpa_step_plan *plan);
/* Fills worker->rows from a plan that the sequences have taken in; padded_rows as above, 0 for a step that is not
 * captured. */
cpa_status cpa_worker_list_rows(cpa_worker *worker, const cpa_step_plan *plan, int64_t padded_rows, cpa_error *err);
/* Enqueues what brings the rows to the device. */
cpa_status cpa_worker_upload_rows(cpa_worker *worker, cpa_error *err);

#endif
