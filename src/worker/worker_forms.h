/* The rows of a step by form (cpa_model_shape.forms): which form a chunk has, and where the queries and results of each
 * form lie. A worker without forms has one, that of its model's attention. */
#ifndef CPA_WORKER_FORMS_H
#define CPA_WORKER_FORMS_H

#include "src/worker/worker.h"

/* Whether a chunk of a prompt may take the form of those that decode, where that is less work: prompts expand latents, and
 * both forms see the same keys. */
int cpa_worker_forms_may_change(const cpa_worker_options *options, const cpa_forms *forms);

/* The form of a chunk's rows, the same on every rank. */
int32_t cpa_worker_form_of(const cpa_worker *worker, const cpa_plan_chunk *chunk);

/* The forms of a model, as the options of a context name them; `widths` are those of `options`. */
void cpa_worker_give_forms(const cpa_model_shape *model, cpa_row_form widths[CPA_MOST_ROW_FORMS],
                           cpa_context_options *options);

/* Forms whose rows the emissions of a step are listed by: none where there is one. */
static inline int64_t cpa_worker_listed_forms(const cpa_worker *worker) {
    return worker->forms.count > 1 ? worker->forms.count : 0;
}

/* Bytes that the queries, and the results of one layer, of so many rows take at most. */
int64_t cpa_worker_most_q_bytes(const cpa_worker *worker, int64_t rows);
int64_t cpa_worker_most_out_bytes(const cpa_worker *worker, int64_t rows);

/* Places the forms of the step that is listed, which are counted. */
void cpa_worker_place_forms(cpa_worker *worker);
/* Fills in which row of its form each emission has, behind all emissions. */
void cpa_worker_list_forms(const cpa_worker *worker);
/* What the context is given of a layer: queries at worker->q, results to `out`. */
void cpa_worker_form_rows(const cpa_worker *worker, int32_t layer, void *out, cpa_form_rows rows[CPA_MOST_ROW_FORMS]);

#endif
