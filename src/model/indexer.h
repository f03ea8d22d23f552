/* What an indexer (index_config.h) makes of the rows of a layer: its keys, which go to the cache, and queries and weights,
 * by which keys are chosen. */
#ifndef CPA_MODEL_INDEXER_H
#define CPA_MODEL_INDEXER_H

#include <cpattn/model.h>

#include "src/model/weights.h"

/* What the layers have in common. The room holds rows of one layer at a time. */
typedef struct cpa_indexer {
    const cpa_model_config *config;
    cpa_dtype dtype;
    cpa_rope rope;         /* table on the device, and the pairs of the indexer */
    void *q_product;       /* [rows, heads, dim] */
    void *k_product;       /* [rows, dim] */
    float *weight_product; /* [rows, heads] */
    void *q;               /* [rows, heads, dim], in the dtype of the indexer */
    float *weights;        /* [rows, heads] */
} cpa_indexer;

/* With the table of rotary positions, and the room, still to be set. */
cpa_indexer cpa_indexer_of(const cpa_model_config *config, cpa_dtype dtype);

/* Bytes of the room for so many rows; with memory, the room lies there. */
int64_t cpa_indexer_place(cpa_indexer *indexer, int64_t rows, void *memory);

/* Of the normed rows x [rows, hidden] and the normed latents of their queries [rows, q_latent], a stride apart: keys to
 * args->index, queries and weights to the room. */
cpa_status cpa_indexer_in(const cpa_indexer *indexer, const cpa_indexer_weights *weights, const void *x,
                          const void *q_latent, int64_t q_latent_stride, const cpa_model_step *step,
                          const cpa_layer_args *args, cpa_stream *stream);

/* Which keys the rows of the step attend, by the queries that cpa_indexer_in has left. */
cpa_status cpa_indexer_select(const cpa_indexer *indexer, const cpa_select_args *args, cpa_key_indices *out,
                              cpa_stream *stream);

#endif
