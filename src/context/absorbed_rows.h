/* Rows of an expanded form whose keys are not expanded: they attend latents as these lie (cpa_row_form.absorbs).
 *
 *     fold      q_h [nope | rope] becomes [W_h^T nope | rope], of a latent's columns, rounded to the dtype
 *     attend    over the latents, from the empty state
 *     unfold    O_h becomes V_h O_h, in fp32: a state as wide as those of expanded keys, which joins what is resumed
 *
 * By pass-Q the rank that has the keys does so: queries and states travel as narrow as heads are. */
#ifndef CPA_ABSORBED_ROWS_H
#define CPA_ABSORBED_ROWS_H

#include "src/context/context_ops.h"

typedef struct cpa_absorbed_rows {
    cpa_row_run *runs; /* rows of the plan's items, neighbours joined */
    int64_t n_runs, runs_capacity;
    int64_t end; /* end of the last of them; 0: no row of the plan is absorbed */
} cpa_absorbed_rows;

/* Whether the first n of ops->items are, or their keys are expanded. */
int cpa_absorbed_rows_wanted(const cpa_context_ops *ops, const cpa_form *form, int64_t n_items);

/* Takes the rows of the first n of ops->items, which a plan of attend over latents has. */
cpa_status cpa_absorbed_rows_set(cpa_absorbed_rows *rows, cpa_context_ops *ops, const cpa_form *form, int64_t n_items);
void cpa_absorbed_rows_free(cpa_absorbed_rows *rows);

/* Enqueues an attend of `plan` as one over expanded keys; a message of what fails is the stream's, or the context's. */
cpa_status cpa_absorbed_rows_attend(const cpa_absorbed_rows *rows, cpa_context_ops *ops, const cpa_form *form,
                                    const cpa_form_layer *layer, const cpa_attend_plan *plan,
                                    const cpa_attend_args *args, cpa_stream *stream);

#endif
