/* A decoder-only model as its Hugging Face folder describes it: config.json, as transformers 4 and 5 write it, and
 * generation_config.json. Llama 2 and 3, Mistral, Mixtral, Qwen 2, 2.5 and 3 are one network with or without biases,
 * norms of queries and keys, windows, tied embeddings, and experts; DeepSeek V2 and V3 have latent attention, V3 may have
 * a module that predicts the token after next (draft_layer.h), and V3.2 has an indexer. */
#ifndef CPA_MODEL_CONFIG_H
#define CPA_MODEL_CONFIG_H

#include <cpattn/engine.h>
#include <cpattn/nn.h>

#include "src/model/index_config.h"
#include "src/model/latent_config.h"
#include "src/model/moe_config.h"

enum { CPA_CONFIG_MAX_END_IDS = 32 };

/* Plain memory: rank 0 may send it to the others. */
typedef struct cpa_model_config {
    char family[16]; /* model_type of the file, such as "llama" */
    int32_t layers, hidden;
    int32_t next_modules; /* what predicts further tokens behind the layers, num_nextn_predict_layers, of DeepSeek-V3 */
    int32_t draft_layers; /* how many of these are used, 0 or 1: files do not say it, whoever loads the model does */
    int32_t intermediate; /* width of a dense layer's feed-forward */
    int32_t q_heads;
    int32_t kv_heads, head_dim; /* of ordinary attention; 0 with latent attention */
    cpa_latent_config latent;   /* what the cache has in their place; zeros without latent attention */
    cpa_index_form index; /* which keys rows attend; its heads are 0: all. Whoever loads the model sets the dtype */
    int32_t vocabulary;
    int64_t max_position; /* positions that the model is made for */
    float norm_eps;
    int has_dtype; /* whether the file names a dtype; of the weights otherwise */
    cpa_dtype dtype;
    int qkv_bias, o_bias, mlp_bias;
    int qk_norm;                            /* each head of queries and keys is normed */
    int tied;                               /* the embedding is also the last product's weight */
    cpa_moe_config moe;                     /* layers whose feed-forward is a mixture of experts */
    cpa_rope_config rope;                   /* rotary positions; max_position is the model's */
    int64_t windows[CPA_CONFIG_MAX_LAYERS]; /* window of each layer; 0: all keys */
    int32_t n_end_ids;
    uint32_t end_ids[CPA_CONFIG_MAX_END_IDS]; /* ids that end an answer */
} cpa_model_config;

/* The layers of the model, and behind them those that draft. */
static inline int32_t cpa_config_all_layers(const cpa_model_config *config) {
    return config->layers + config->draft_layers;
}

/* Reads and checks the files of a folder; generation_config.json may be missing. CPA_IO, CPA_INVALID and
 * CPA_UNSUPPORTED come with a line that names file and key. *out is set only on success. */
cpa_status cpa_model_config_load(const char *folder, cpa_model_config *out, cpa_error *err);

/* The attention of the model, computed and cached in a dtype. The masks of all its layers are written to layer_masks
 * [cpa_config_all_layers], which the shape points to where layers differ. */
cpa_model_shape cpa_model_config_shape(const cpa_model_config *config, cpa_dtype dtype, cpa_mask *layer_masks);

#endif
