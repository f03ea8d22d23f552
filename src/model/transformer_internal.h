/* What a transformer is made of, for transformer.c, which makes and ends it, and transformer_step.c, which runs it. */
#ifndef CPA_MODEL_TRANSFORMER_INTERNAL_H
#define CPA_MODEL_TRANSFORMER_INTERNAL_H

#include "src/model/feed_forward.h"
#include "src/model/indexer.h"
#include "src/model/latent_attention.h"
#include "src/model/sampler.h"
#include "src/model/transformer.h"
#include "src/model/weights.h"

struct cpa_transformer {
    cpa_model_config config;
    cpa_transformer_options options;
    cpa_device *device;
    cpa_weights weights;
    cpa_feed_forward feed_forward;
    cpa_latent_attention latent; /* means nothing with ordinary attention, as does the next */
    cpa_latent_forms forms;
    cpa_indexer indexer;    /* means nothing without one */
    cpa_key_indices chosen; /* of the layer at hand */
    cpa_sampler sampler;
    float *rope_table;
    int64_t logit_rows;
    /* [max_rows, ...], in the dtype */
    void *residual; /* [hidden] what the layers have added up */
    void *x;        /* [hidden] normed, or what is to be added next */
    void *wide;     /* outputs of the widest product but those of experts, or a part of a sum over ranks */
    void *inner;    /* [intermediate], or queries, or a slice of queries, keys and values */
    void *mixture;  /* room for those of experts */
    void *indexed;  /* room for those of the indexer */
    /* [logit_rows, ...] */
    void *last_residual, *last_x; /* [hidden] */
    float *logits;                /* [vocabulary] */
    float *own_logits;            /* the slice of `logits` that this rank computes */
    cpa_logits_fn observe;
    void *observe_ctx;
};

/* Outputs of the product for queries, keys and values. */
static inline int32_t cpa_qkv_width(const cpa_model_config *c) {
    return (c->q_heads + 2 * c->kv_heads) * c->head_dim;
}

#endif
