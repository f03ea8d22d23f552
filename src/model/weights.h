/* The weights of a decoder on a device, in the dtype that it computes in. Products that read the same rows are one
 * matrix: queries, keys and values; gates and what they scale. A matrix is [outputs, inputs], row-major. */
#ifndef CPA_MODEL_WEIGHTS_H
#define CPA_MODEL_WEIGHTS_H

#include <cpattn/device.h>

#include "src/model/model_config.h"
#include "src/model/safetensors.h"
#include "src/model/sliced_linear.h"

/* What a rank has of the weights; with 1 rank all of them. Of several ranks each has its slice, as sliced_linear.h
 * says, of the rows of qkv, gates, what they scale, and an lm_head that is not tied, and of the columns of o and down:
 * those of its heads. Norms, the embedding, routers, and the biases of o and down are on all. Of experts that are spread
 * over ranks each has some as a whole. */
typedef struct cpa_weights_part {
    int32_t rank, ranks;
    int32_t expert_rank, expert_ranks; /* of each layer's experts it has cpa_own_experts(experts, these) */
} cpa_weights_part;

/* What a rank has of the experts of a layer, as cpa_first_expert says. */
cpa_slice cpa_own_experts(int32_t experts, int32_t ranks, int32_t rank);

/* Of a layer's feed-forward; NULL where that has no such part. */
typedef struct cpa_feed_forward_weights {
    int is_slice; /* of a dense one: the slice of the rank alone */
    /* A dense one. */
    void *gate_up, *gate_up_bias; /* [2 * intermediate, hidden]: gates, then the rows that they scale */
    void *down, *down_bias;       /* [hidden, intermediate] */
    /* A mixture of experts, of which the rank has `own` (cpa_own_experts). */
    void *router;         /* [experts, hidden] */
    float *router_bias;   /* [experts] added to scores where experts are chosen */
    void *expert_gate_up; /* [own, 2 * moe.intermediate, hidden]: of each, gates, then the rows that they scale */
    void *expert_down;    /* [own, hidden, moe.intermediate] */
    void *shared_gate_up; /* [2 * moe.shared, hidden]: of the experts that every token has */
    void *shared_down;    /* [hidden, moe.shared] */
} cpa_feed_forward_weights;

/* Of latent attention (latent_config.h); NULL where the model has no such part. */
typedef struct cpa_latent_weights {
    void *front;   /* [q_latent + latent + rope, hidden]: W_q_a, or [q_heads * (nope + rope), ...] W_q; then W_kv_a */
    void *q_norm;  /* [q_latent] */
    void *q_b;     /* [q_heads * (nope + rope), q_latent] */
    void *kv_norm; /* [latent] */
    void *kv_b;    /* [q_heads, nope + value, latent]: of each head W_k_b, then W_v_b */
    void *k_up;    /* [q_heads, latent, nope]: W_k_b of each head, transposed */
    void *v_up;    /* [q_heads, latent, value]: W_v_b of each head, transposed */
} cpa_latent_weights;

/* Of an indexer (index_config.h); NULL where the model has none. */
typedef struct cpa_indexer_weights {
    void *q;                  /* [heads * dim, q_latent] */
    void *k;                  /* [dim, hidden] */
    float *k_scale, *k_shift; /* [dim], of the norm of keys */
    void *weights;            /* [heads, hidden] */
} cpa_indexer_weights;

/* Of one layer; NULL where the model has no such part. */
typedef struct cpa_layer_weights {
    int is_slice;
    void *attention_norm;      /* [hidden] */
    void *qkv, *qkv_bias;      /* [(q_heads + 2 kv_heads) * head_dim, hidden]: queries, keys, values */
    void *q_norm, *k_norm;     /* [head_dim] */
    cpa_latent_weights latent; /* in the place of these three */
    cpa_indexer_weights indexer;
    void *o, *o_bias; /* [hidden, q_heads * head_dim], of heads of values */
    void *mlp_norm;   /* [hidden] */
    cpa_feed_forward_weights feed_forward;
} cpa_layer_weights;

/* Of a layer that drafts, beside that layer (draft_layer.h); NULL without one. */
typedef struct cpa_draft_weights {
    void *token_norm, *hidden_norm; /* [hidden]: enorm and hnorm */
    void *join;                     /* [hidden, 2 * hidden]: eh_proj */
    void *final_norm;               /* [hidden]: shared_head.norm */
} cpa_draft_weights;

typedef struct cpa_weights {
    cpa_device *device;
    void *memory; /* memory of all weights */
    int64_t bytes;
    void *embedding;  /* [vocabulary, hidden] */
    void *final_norm; /* [hidden] */
    void *lm_head;    /* [vocabulary, hidden]; the embedding, if that is tied */
    int head_is_slice;
    cpa_layer_weights *layers; /* [cpa_config_all_layers] */
    cpa_draft_weights draft;
} cpa_weights;

/* Bytes of the weights of such a model in a dtype. */
int64_t cpa_weights_bytes(const cpa_model_config *config, cpa_weights_part held, cpa_dtype dtype);

/* Copies, and converts where the files have another dtype, the tensors to memory of the stream's device; returns when
 * they are there. CPA_INVALID names a tensor that is missing, or has not the shape that the config asks for. *out is
 * set only on success; cpa_weights_release frees it. */
cpa_status cpa_weights_load(const cpa_model_config *config, cpa_weights_part held, const cpa_safetensors *files,
                            cpa_dtype dtype, cpa_stream *stream, cpa_weights *out, cpa_error *err);
void cpa_weights_release(cpa_weights *weights);

#endif
