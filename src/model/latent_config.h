/* Latent attention (MLA; DeepSeek-AI, arXiv:2405.04434, section 2.1) as config.json describes it. Of a row x of the
 * layer's input,
 *
 *     c = norm(W_kv_a x), r = rotated W_k_rope x       what the cache keeps, for all heads
 *     key of head h   [W_k_b,h c | r]
 *     value           W_v_b,h c
 *     query           [q_nope | rotated q_rope] = W_q x, or W_q_b norm(W_q_a x)
 */
#ifndef CPA_MODEL_LATENT_CONFIG_H
#define CPA_MODEL_LATENT_CONFIG_H

#include "base/json_file.h"

/* All zeros: a model whose keys and values are cached as they are attended. */
typedef struct cpa_latent_config {
    int32_t latent;   /* elements of c (kv_lora_rank) */
    int32_t rope;     /* rotated elements of a key and of each head's query (qk_rope_head_dim) */
    int32_t nope;     /* their other elements (qk_nope_head_dim) */
    int32_t value;    /* elements of a head's value (v_head_dim) */
    int32_t q_latent; /* elements of the norm between W_q_a and W_q_b (q_lora_rank); 0: there is W_q alone */
    int interleaved;  /* pairs that are rotated: 1: (2 i, 2 i + 1); 0: (i, i + rope / 2) */
    float norm_eps;   /* of the norms of c and of queries */
    float scale;      /* of scores: m^2 / sqrt(nope + rope), m = 0.1 mscale_all_dim ln(factor) + 1 with a scaling of
                         rotary positions that says mscale_all_dim, else 1 */
} cpa_latent_config;

/* Reads what attention needs but rotary positions. CPA_INVALID and CPA_UNSUPPORTED come with a line that names file and
 * key. *out is set only on success. */
cpa_status cpa_latent_config_read(const cpa_json *json, cpa_latent_config *out, cpa_error *err);

#endif
