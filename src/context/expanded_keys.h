/* Keys and values that are expanded from latents before they are attended (cpa_row_form.expanded).
 *
 * What a plan attends goes through the workspace of the context in passes (kernels/key_source.h): latents of some blocks
 * are gathered as rows, widened where they are codes, multiplied by the matrix of the layer, and attended as the cache
 * that they are then. Keys of an item that is longer than the workspace take several passes, each resumed from the
 * states that the one before left. So what is cached, and travels, are latents, whatever the length of a context. */
#ifndef CPA_EXPANDED_KEYS_H
#define CPA_EXPANDED_KEYS_H

#include "src/context/context_ops.h"

/* Items that share the workspace, or some keys of one. */
typedef struct cpa_expanded_pass {
    cpa_attend_plan *plan; /* over blocks of the workspace */
    int64_t item, n_items; /* range of items of the pass */
    int64_t rows;          /* rows of the workspace in use */
    int resumes;           /* 1: keys of one item, behind those of the pass before */
} cpa_expanded_pass;

typedef struct cpa_expanded_keys {
    cpa_expanded_pass *passes;
    int64_t n_passes, passes_capacity;
    int64_t n_plans;        /* first passes that have a plan, of whatever setting */
    cpa_attend_item *items; /* items of all passes; their tables are blocks of the workspace */
    int64_t *latents;       /* of each item: index in `table` of the block that holds its first latent */
    cpa_kv_span *spans;     /* scratch: what a pass gathers */
    int64_t items_capacity, latents_capacity, spans_capacity;
    int32_t *table; /* blocks of the cache, or of staging, that the latents lie in */
    int64_t n_entries, table_capacity;
    int32_t *places; /* blocks of the workspace, in order */
    int64_t n_places, places_capacity;
    cpa_key_item *keys; /* scratch: what is cut into passes */
    cpa_key_pass *cut;
    int64_t keys_capacity, cut_capacity;
} cpa_expanded_keys;

/* The least bytes of a workspace that keys of a form are expanded in; 0 if they are not. `split`: local tokens at whose
 * multiples keys may be cut. */
int64_t cpa_expanded_keys_least(const cpa_context_options *options, const cpa_form *form, int64_t split);

/* Makes a product as those of a form that is expanded: the first of a library loads its kernels, which takes seconds on
 * CUDA, and that is not for the first request to wait for. The context has its workspace. */
cpa_status cpa_expanded_keys_warm_up(cpa_context_ops *ops, const cpa_form *form);

/* Plans the first n of ops->items, by tables on the host, of which it takes a copy. */
cpa_status cpa_expanded_keys_set(cpa_expanded_keys *keys, cpa_context_ops *ops, const cpa_form *form, int64_t n_items,
                                 const int32_t *block_tables);
void cpa_expanded_keys_free(cpa_expanded_keys *keys, const cpa_context_ops *ops);

/* Enqueues an attend of what is planned over the latents of args->kv; a message of what fails is the stream's. */
cpa_status cpa_expanded_keys_attend(const cpa_expanded_keys *keys, const cpa_context_ops *ops, const cpa_form *form,
                                    const cpa_form_layer *layer, const cpa_attend_args *args, cpa_stream *stream);

#endif
