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
    /* What the choice of the model's indexer was asked, and the lists that it gave; NULL: it was not. */
    cpa_context_select_args asked;
    const int32_t *chosen;
} cpa_worker_selection;
/* Asks the model. A failure that is ours, not the stream's, is told by err. */
cpa_status cpa_worker_select(cpa_worker *worker, int32_t layer, const cpa_model_step *step, const cpa_kv_view *kv,
                             cpa_worker_selection *out, cpa_error *err);

/* What the lists of a selection were chosen by; NULL: they are not those of an indexer. */
static inline const cpa_context_select_args *cpa_worker_chosen_by(const cpa_worker_selection *selection) {
    const cpa_key_indices *lists = selection->of.indices;
    return lists && selection->chosen && lists->indices == selection->chosen ? &selection->asked : NULL;
}

#endif
