/* Masks of steps with trees of drafts: of the drafts of its chunk a row sees its own and those that it comes behind. */
#ifndef CPA_WORKER_TREES_H
#define CPA_WORKER_TREES_H

#include <cpattn/selection.h>

#include "src/worker/worker.h"

/* Counts rows and words of the masks of the step that is listed; 0 where it has no tree. */
void cpa_worker_count_masks(cpa_worker *worker, const cpa_step_plan *plan);
/* The same for any padded step of so many rows on all ranks. */
void cpa_worker_pad_masks(const cpa_worker *worker, int64_t all_rows, cpa_step_sizes *sizes);
/* Fills them in on the host. */
void cpa_worker_list_masks(const cpa_worker *worker, const cpa_step_plan *plan);
/* That of the step, on the device; 0: it has none. */
int cpa_worker_mask(const cpa_worker *worker, cpa_key_bits *out);

#endif
