/* Replicated rows of one form: every rank has the queries of all rows, attends them over its shard, and the states are scattered by
 * heads. See scatter_heads.c. */
#ifndef CPA_SCATTER_HEADS_H
#define CPA_SCATTER_HEADS_H

#include "src/context/context_ops.h"
#include "src/context/planned_step.h"
#include "src/context/step_maps.h"
#include "src/context/table_plans.h"

typedef struct cpa_scatter_heads {
    cpa_context_ops *ops;
    const cpa_planned_step *step;
    const cpa_form *form;
    int32_t heads;         /* heads of this rank */
    cpa_table_plans plans; /* all rows over the own shard */
    /* [rows] the row of the own state that is packed, -1 without a key here; then [rows, cp_size] the ranks whose
     * states of a row are merged, in order */
    cpa_step_maps maps;
    cpa_context_buffer states_memory, projected_memory, packed_memory, received_memory;
    cpa_partial states, projected; /* projected: the states times the matrix of the form, if it has one */
    void **slices;                 /* [cp_size]: the own states, packed for each rank */
    const void **parts;            /* [cp_size]: the states of the own heads, from each rank */
    cpa_context_exchange exchange;
} cpa_scatter_heads;

cpa_status cpa_scatter_heads_create(cpa_scatter_heads *s, cpa_context_ops *ops, const cpa_form *form,
                                    const cpa_planned_step *step);
void cpa_scatter_heads_destroy(cpa_scatter_heads *s);

/* As those of pass-Q, for a step with replicated rows. */
cpa_status cpa_scatter_heads_plan(cpa_scatter_heads *s);
cpa_status cpa_scatter_heads_upload(cpa_scatter_heads *s, cpa_stream *stream);
uint64_t cpa_scatter_heads_shape(const cpa_scatter_heads *s);

/* One layer. */
cpa_status cpa_scatter_heads_attend(cpa_scatter_heads *s, const cpa_form_layer *layer, cpa_stream *stream);

#endif
