#include "src/model/moe_config.h"

#include <string.h>

#include "base/check.h"

/* Elements of all experts of a layer between their products, and of those that every token has: with as many layers and
 * hidden elements as there may be, the bytes of all weights are below 2^63. */
enum { MOST_INNER = 1 << 26, MOST_SHARED = 1 << 22 };

/* What transformers has without a key stands in *moe; 0: the key must be there. */
static cpa_status read_choice(const cpa_json *json, const char *experts, cpa_moe_config *moe, cpa_error *err) {
    CPA_TRY(cpa_json_int32(json, experts, CPA_JSON_REQUIRED, 1, CPA_MOST_EXPERTS, &moe->experts, err));
    const cpa_json_presence presence = moe->top_k ? CPA_JSON_OPTIONAL : CPA_JSON_REQUIRED;
    CPA_TRY(cpa_json_int32(json, "num_experts_per_tok", presence, 1, CPA_MOST_TOP_K, &moe->top_k, err));
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
    CPA_TRY(cpa_json_int32(json, "decoder_sparse_step", CPA_JSON_OPTIONAL, 1, INT32_MAX, &step, err));
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
    CPA_TRY(cpa_json_int32(json, "moe_intermediate_size", CPA_JSON_OPTIONAL, 1, 1 << 20, &moe->intermediate, err));
    CPA_TRY(cpa_json_flag(json, "norm_topk_prob", &moe->renormalise, err));
    return read_qwen3_layers(json, layers, moe, err);
}

static cpa_status refuse_unless(const cpa_json *json, const char *key, const char *found, const char *supported,
                                cpa_error *err) {
    if (strcmp(found, supported) == 0) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "%s: %s: found %.40s, supported is %s", json->path, key, found, supported);
}

static cpa_status read_groups(const cpa_json *json, cpa_moe_config *moe, cpa_error *err) {
    CPA_TRY(cpa_json_int32(json, "n_group", CPA_JSON_REQUIRED, 1, moe->experts, &moe->n_group, err));
    if (moe->experts % moe->n_group != 0)
        return cpa_json_refuse(json, "n_group", "a number that divides n_routed_experts", err);
    CPA_TRY(cpa_json_int32(json, "topk_group", CPA_JSON_REQUIRED, 1, moe->n_group, &moe->topk_group, err));
    if (moe->topk_group * (moe->experts / moe->n_group) >= moe->top_k) return CPA_OK;
    return cpa_json_refuse(json, "topk_group", "groups with at least num_experts_per_tok experts", err);
}

/* DeepSeek-V2's: a softmax; its `greedy` has no groups. Its own code divides by the sum in place of the factor where
 * norm_topk_prob is true, which transformers passes over; no file says so. */
static cpa_status read_v2_choice(const cpa_json *json, cpa_moe_config *moe, cpa_error *err) {
    const char *method = "greedy", *scores = "softmax";
    moe->group_scores = CPA_GROUP_BEST;
    CPA_TRY(cpa_json_text(json, "topk_method", CPA_JSON_OPTIONAL, &method, err));
    CPA_TRY(cpa_json_text(json, "scoring_func", CPA_JSON_OPTIONAL, &scores, err));
    CPA_TRY(refuse_unless(json, "scoring_func", scores, "softmax", err));
    CPA_TRY(cpa_json_flag(json, "norm_topk_prob", &moe->renormalise, err));
    CPA_TRY(refuse_unless(json, "norm_topk_prob", moe->renormalise ? "true" : "false", "false", err));
    if (strcmp(method, "greedy") == 0) return CPA_OK;
    CPA_TRY(refuse_unless(json, "topk_method", method, "group_limited_greedy", err));
    return read_groups(json, moe, err);
}

/* DeepSeek-V3's: sigmoids, and a bias for the choice. */
static cpa_status read_v3_choice(const cpa_json *json, cpa_moe_config *moe, cpa_error *err) {
    const char *method = "noaux_tc", *scores = "sigmoid";
    moe->scores = CPA_SCORES_SIGMOID;
    moe->group_scores = CPA_GROUP_BEST_TWO;
    moe->has_bias = moe->renormalise = 1;
    CPA_TRY(cpa_json_text(json, "topk_method", CPA_JSON_OPTIONAL, &method, err));
    CPA_TRY(cpa_json_text(json, "scoring_func", CPA_JSON_OPTIONAL, &scores, err));
    CPA_TRY(refuse_unless(json, "topk_method", method, "noaux_tc", err));
    CPA_TRY(refuse_unless(json, "scoring_func", scores, "sigmoid", err));
    CPA_TRY(cpa_json_flag(json, "norm_topk_prob", &moe->renormalise, err));
    return read_groups(json, moe, err);
}

/* All layers but the first ones are sparse, and have as many shared experts, which are one of their width together. */
static cpa_status read_deepseek(const cpa_json *json, int32_t layers, cpa_moe_config *moe, cpa_error *err) {
    int64_t dense = 0, frequency = 1, shared = 0;
    double scale = 1;
    CPA_TRY(read_choice(json, "n_routed_experts", moe, err));
    CPA_TRY(cpa_json_int32(json, "moe_intermediate_size", CPA_JSON_REQUIRED, 1, 1 << 20, &moe->intermediate, err));
    CPA_TRY(cpa_json_int(json, "n_shared_experts", CPA_JSON_REQUIRED, 1, 1024, &shared, err));
    CPA_TRY(cpa_json_int(json, "first_k_dense_replace", CPA_JSON_REQUIRED, 0, CPA_CONFIG_MAX_LAYERS, &dense, err));
    CPA_TRY(cpa_json_int(json, "moe_layer_freq", CPA_JSON_OPTIONAL, 1, 1, &frequency, err));
    CPA_TRY(cpa_json_number(json, "routed_scaling_factor", CPA_JSON_REQUIRED, 1e-9, 1e9, &scale, err));
    moe->scale = (float)scale;
    moe->shared = (int32_t)shared * moe->intermediate;
    for (int64_t layer = dense; layer < layers; layer++) moe->sparse[layer] = 1;
    return moe->names == CPA_MOE_DEEPSEEK_V2 ? read_v2_choice(json, moe, err) : read_v3_choice(json, moe, err);
}

cpa_status cpa_moe_config_read(const cpa_json *json, cpa_moe_names names, int32_t layers, int32_t intermediate,
                               cpa_moe_config *out, cpa_error *err) {
    cpa_moe_config moe = {.names = names, .scale = 1};
    cpa_status status = CPA_OK;
    switch (names) {
        case CPA_MOE_NONE: break;
        case CPA_MOE_MIXTRAL: status = read_mixtral(json, layers, intermediate, &moe, err); break;
        case CPA_MOE_QWEN3: status = read_qwen3(json, layers, &moe, err); break;
        case CPA_MOE_DEEPSEEK_V2:
        case CPA_MOE_DEEPSEEK_V3: status = read_deepseek(json, layers, &moe, err); break;
    }
    CPA_TRY(status);
    if ((int64_t)moe.experts * moe.intermediate > MOST_INNER || moe.shared > MOST_SHARED)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "%s: found %d experts of %d elements and %d shared elements, supported are %d elements of all "
                        "experts and %d shared ones",
                        json->path, moe.experts, moe.intermediate, moe.shared, MOST_INNER, MOST_SHARED);
    *out = moe;
    return CPA_OK;
}
