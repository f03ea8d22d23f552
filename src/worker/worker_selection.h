/* Which keys a layer attends: by its trees of drafts (worker_trees.h), and by what the model selects. */
#ifndef CPA_WORKER_SELECTION_H
#define CPA_WORKER_SELECTION_H

#include "src/worker/worker.h"

/* Counts the rows of the step that is listed, on all ranks, if the model selects for them; else 0. */
void cpa_worker_count_selected(cpa_worker *worker, const cpa_step_plan *plan);
/* Lists their indices on the host. */
void cpa_worker_list_selected(const cpa_worker *worker, const cpa_step_plan *plan);

/* The selection of a layer, whose parts it points to. */
typedef struct cpa_worker_selection {
    cpa_key_selection of;
    cpa_key_bits tree;
} cpa_worker_selection;
/* Asks the model. A failure that is ours, not the stream's, is told by err. */
cpa_status cpa_worker_select(cpa_worker *worker, int32_t layer, const cpa_model_step *step, const cpa_kv_view *kv,
                             cpa_worker_selection *out, cpa_error *err);

#endif
