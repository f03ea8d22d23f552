#include "src/model/config_keys.h"

#include <string.h>
#include <strings.h>

#include "base/check.h"

enum {
    LLAMA = 1,
    MISTRAL = 2,
    QWEN2 = 4,
    QWEN3 = 8,
    MIXTRAL = 16,
    QWEN3_MOE = 32,
    DEEPSEEK_V2 = 64,
    DEEPSEEK_V3 = 128,
    KIMI_K2 = 256,
    DEEPSEEK_V32 = 512,
    QWEN = QWEN2 | QWEN3,
    DEEPSEEK = DEEPSEEK_V2 | DEEPSEEK_V3 | KIMI_K2 | DEEPSEEK_V32,
    WITH_EXPERTS = MIXTRAL | QWEN3_MOE,
    ALL = LLAMA | MISTRAL | QWEN | WITH_EXPERTS | DEEPSEEK
};

typedef struct known_key {
    const char *name;
    int families;
} known_key;

/* Names with one of `words` that are read, or that transformers passes over in these families whatever their value. */
static const known_key of_files[] = {
    {"_attn_implementation", ALL},
    {"_attn_implementation_autoset", ALL},
    {"_flash_attn_2_enabled", ALL},
    {"attention_bias", ALL},
    {"attention_dropout", ALL},
    {"attn_implementation", ALL},
    {"chunk_size_feed_forward", ALL},
    {"decoder_sparse_step", QWEN3_MOE},
    {"index_topk", DEEPSEEK_V32},
    {"max_window_layers", QWEN | QWEN3_MOE},
    {"moe_intermediate_size", QWEN3_MOE | DEEPSEEK},
    {"moe_layer_freq", DEEPSEEK},
    {"n_group", DEEPSEEK},
    {"n_routed_experts", DEEPSEEK},
    {"n_shared_experts", DEEPSEEK},
    {"norm_topk_prob", QWEN3_MOE | DEEPSEEK},
    {"num_attention_heads", ALL},
    {"num_experts", QWEN3_MOE},
    {"num_experts_per_tok", WITH_EXPERTS | DEEPSEEK},
    {"num_local_experts", WITH_EXPERTS},
    {"original_max_position_embeddings", ALL},
    {"output_attentions", ALL},
    {"output_router_logits", ALL},
    {"partial_rotary_factor", ALL},
    {"qk_rope_head_dim", DEEPSEEK},
    {"rms_norm_eps", ALL},
    {"rope_interleave", DEEPSEEK_V3 | KIMI_K2},
    {"rope_parameters", ALL},
    {"rope_scaling", ALL},
    {"rope_theta", ALL},
    {"routed_scaling_factor", DEEPSEEK},
    {"router_aux_loss_coef", WITH_EXPERTS},
    {"router_jitter_noise", WITH_EXPERTS},
    {"scoring_func", DEEPSEEK},
    {"sliding_window", MISTRAL | QWEN | WITH_EXPERTS},
    {"topk_group", DEEPSEEK},
    {"topk_method", DEEPSEEK},
    {"use_sliding_window", QWEN | QWEN3_MOE},
    {NULL, 0},
};

/* Those of the object of rope_parameters or rope_scaling. */
static const known_key of_scalings[] = {
    {"attention_factor", ALL},
    {"mscale", ALL},
    {"mscale_all_dim", ALL},
    {"partial_rotary_factor", ALL},
    {"rope_theta", ALL},
    {"rope_type", ALL},
    {NULL, 0},
};

static const char *const words[] = {"attn",   "attention", "rope",       "rotary",  "chunk",  "window", "softcap",
                                    "scal",   "gate",      "multiplier", "norm",    "causal", "expert", "moe",
                                    "router", "topk",      "sparse",     "scoring", "n_group"};

static int family_bit(const char *family) {
    static const char *const names[] = {"llama",     "mistral",     "qwen2",       "qwen3",   "mixtral",
                                        "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32"};
    int i = 0;
    while (strcmp(names[i], family) != 0) i++;
    return 1 << i;
}

static int may_change_results(const char *key) {
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcasestr(key, words[i])) return 1;
    return 0;
}

static int is_known(const known_key *known, const char *key, int family) {
    for (; known->name; known++)
        if (strcmp(known->name, key) == 0) return (known->families & family) != 0;
    return 0;
}

/* Whether the value is what transformers has without the key. */
static int is_default(const char *key, const json_t *value) {
    if (strcmp(key, "is_causal") == 0) return json_is_true(value);
    return json_is_null(value) || json_is_false(value);
}

static cpa_status check(const cpa_json *json, const known_key *known, int family, cpa_error *err) {
    const char *key;
    const json_t *value;
    json_object_foreach((json_t *)(uintptr_t)json->object, key, value) {
        if (!may_change_results(key) || is_known(known, key, family) || is_default(key, value)) continue;
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: %s%.80s: not a key that this family has; it may change results",
                        json->path, json->prefix, key);
    }
    return CPA_OK;
}

cpa_status cpa_config_keys_check(const cpa_json *json, const char *family, cpa_error *err) {
    return check(json, of_files, family_bit(family), err);
}

cpa_status cpa_config_keys_check_scaling(const cpa_json *json, cpa_error *err) {
    return check(json, of_scalings, ALL, err);
}
