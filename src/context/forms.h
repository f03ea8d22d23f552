/* Forms of rows: how wide the queries, the states and the results of each are, and the cache of a layer as each sees
 * it. Without forms in the options there is one, that of the shape. */
#ifndef CPA_CONTEXT_FORMS_H
#define CPA_CONTEXT_FORMS_H

#include <cpattn/context.h>

typedef struct cpa_form {
    int32_t index;             /* index among the context's forms */
    cpa_attention_shape shape; /* shape of the form's queries, and of the columns of the cache that they attend */
    int32_t out_dim;           /* width of a head of results, and of states that travel */
    int has_matrix;            /* not 0: states are multiplied by a matrix; 0: out_dim is the v_dim of the shape */
    int is_expanded;           /* not 0: keys of `shape` are made of latents, those of the options' shape */
    cpa_absorb absorbs;        /* which rows of an expanded form attend latents as they lie */
} cpa_form;

/* Whether results are made of the states of rows by a merge, if of one state alone; else attend may leave them. */
static inline int cpa_form_ends_in_merge(const cpa_form *form) {
    return form->has_matrix || form->is_expanded;
}

typedef struct cpa_forms {
    cpa_form list[CPA_MOST_ROW_FORMS];
    int32_t count;
} cpa_forms;

/* The rows of a form in the layer at hand. */
typedef struct cpa_form_layer {
    cpa_form_rows rows; /* scale is not 0, unless the caller forgot it over latents */
    cpa_kv_view kv;     /* the cache of the layer as the form sees it */
} cpa_form_layer;

/* The layer at hand, as its arguments say it. */
typedef struct cpa_layer {
    cpa_kv_view kv;
    const cpa_score_rules *rules;
    const cpa_key_selection *selection;
    const cpa_score_bias *bias;
    cpa_form_layer forms[CPA_MOST_ROW_FORMS];
} cpa_layer;

/* The forms that options name; refused unless the device attends each over their cache. */
cpa_status cpa_forms_take(const cpa_device *device, const cpa_context_options *options, cpa_forms *out, cpa_error *err);

/* A cache of the shape of the options as rows of a form see it: the first columns of its rows, or all of latents that are
 * expanded. */
cpa_kv_view cpa_form_view(const cpa_form *form, const cpa_kv_view *kv);

/* A layer from its arguments. */
void cpa_forms_layer(const cpa_forms *forms, const cpa_context_args *args, cpa_layer *out);

#endif
