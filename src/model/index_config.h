/* The indexer of a layer (DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556, section 2.1) as config.json describes it: which
 * keys a row attends. Of a row x of the layer's input and the normed latent u of its queries (latent_config.h)
 *
 *     key of the token   rotated LayerNorm(W_k x)
 *     query of head h    rotated W_q,h u
 *     weight of head h   W_w,h x / sqrt(heads dim)
 *
 * and a row attends the k keys of the greatest sum over heads of weight * max(query . key, 0). The first elements are
 * rotated, in pairs (i, i + rope / 2). */
#ifndef CPA_MODEL_INDEX_CONFIG_H
#define CPA_MODEL_INDEX_CONFIG_H

#include <cpattn/context.h>

#include "base/json_file.h"
#include "src/model/latent_config.h"

/* Of the norm of keys, whatever rms_norm_eps says, as transformers has it. */
#define CPA_INDEX_NORM_EPS 1e-6f

/* Reads the indexer of layers with that latent attention; its dtype is bf16. CPA_INVALID and CPA_UNSUPPORTED come with a
 * line that names file and key. *out is set only on success. */
cpa_status cpa_index_config_read(const cpa_json *json, const cpa_latent_config *latent, cpa_index_form *out,
                                 cpa_error *err);

/* The dtype of index keys beside a cache: codes beside codes, else what the network computes in, fp16 as bf16. */
cpa_dtype cpa_index_dtype_beside(cpa_dtype dtype, cpa_dtype kv_dtype);

#endif
