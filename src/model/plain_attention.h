/* The attention of a plain forward, expanded: every head has its keys and values, and every pair its score. */
#ifndef CPA_MODEL_PLAIN_ATTENTION_H
#define CPA_MODEL_PLAIN_ATTENTION_H

#include "src/model/plain_rows.h"

/* The heads that are attended; with latent attention each has a key and a value of its own. */
typedef struct cpa_plain_heads {
    int32_t q_heads, kv_heads, k_dim, v_dim;
    float scale; /* of scores */
} cpa_plain_heads;
cpa_plain_heads cpa_plain_heads_of(const cpa_model_config *config);

/* The attention of a layer, from its norm to its sum. */
cpa_status cpa_plain_attention(cpa_plain *f, int32_t layer);

#endif
