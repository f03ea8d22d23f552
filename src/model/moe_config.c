#include "src/model/moe_config.h"

#include <cpattn/experts.h>

#include "base/check.h"

static cpa_status read_count(const cpa_json *json, const char *key, cpa_json_presence presence, int32_t most,
                             int32_t *out, cpa_error *err) {
    int64_t value = *out;
    CPA_TRY(cpa_json_int(json, key, presence, 1, most, &value, err));
    *out = (int32_t)value;
    return CPA_OK;
}

/* What transformers has without a key stands in *moe. */
static cpa_status read_choice(const cpa_json *json, const char *experts, cpa_moe_config *moe, cpa_error *err) {
    CPA_TRY(read_count(json, experts, CPA_JSON_REQUIRED, CPA_MOST_EXPERTS, &moe->experts, err));
    CPA_TRY(read_count(json, "num_experts_per_tok", CPA_JSON_OPTIONAL, CPA_MOST_TOP_K, &moe->top_k, err));
    if (moe->top_k <= moe->experts) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "%s: num_experts_per_tok: found %d, expected at most %s, %d", json->path,
                    moe->top_k, experts, moe->experts);
}

/* All layers are sparse. */
static cpa_status read_mixtral(const cpa_json *json, int32_t layers, int32_t intermediate, cpa_moe_config *moe,
                               cpa_error *err) {
    moe->top_k = 2;
    moe->intermediate = intermediate;
    moe->renormalise = 1;
    for (int32_t layer = 0; layer < layers; layer++) moe->sparse[layer] = 1;
    return read_choice(json, "num_local_experts", moe, err);
}

/* The layers of decoder_sparse_step's making but those of mlp_only_layers are sparse. */
static cpa_status read_qwen3_layers(const cpa_json *json, int32_t layers, cpa_moe_config *moe, cpa_error *err) {
    const json_t *dense = cpa_json_get(json, "mlp_only_layers");
    int32_t step = 1;
    CPA_TRY(read_count(json, "decoder_sparse_step", CPA_JSON_OPTIONAL, INT32_MAX, &step, err));
    for (int32_t layer = 0; layer < layers; layer++) moe->sparse[layer] = (layer + 1) % step == 0;
    if (dense && !json_is_array(dense)) return cpa_json_refuse(json, "mlp_only_layers", "a list of layers", err);
    for (size_t i = 0; i < json_array_size(dense); i++) {
        const json_t *layer = json_array_get(dense, i);
        if (!json_is_integer(layer) || json_integer_value(layer) < 0 || json_integer_value(layer) >= layers)
            return cpa_json_refuse(json, "mlp_only_layers", "a list of layers", err);
        moe->sparse[json_integer_value(layer)] = 0;
    }
    return CPA_OK;
}

static cpa_status read_qwen3(const cpa_json *json, int32_t layers, cpa_moe_config *moe, cpa_error *err) {
    moe->top_k = 8;
    moe->intermediate = 768;
    CPA_TRY(read_choice(json, cpa_json_get(json, "num_experts") ? "num_experts" : "num_local_experts", moe, err));
    CPA_TRY(read_count(json, "moe_intermediate_size", CPA_JSON_OPTIONAL, 1 << 20, &moe->intermediate, err));
    CPA_TRY(cpa_json_flag(json, "norm_topk_prob", &moe->renormalise, err));
    return read_qwen3_layers(json, layers, moe, err);
}

cpa_status cpa_moe_config_read(const cpa_json *json, cpa_moe_names names, int32_t layers, int32_t intermediate,
                               cpa_moe_config *out, cpa_error *err) {
    cpa_moe_config moe = {.names = names};
    CPA_TRY(names == CPA_MOE_MIXTRAL ? read_mixtral(json, layers, intermediate, &moe, err)
                                     : read_qwen3(json, layers, &moe, err));
    *out = moe;
    return CPA_OK;
}
