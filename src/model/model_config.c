#include "src/model/model_config.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cpattn/names.h>

#include "base/check.h"
#include "base/json_file.h"
#include "src/model/config_keys.h"
#include "src/model/rope_config.h"
#include "src/model/stored_weight.h"

/* What differs between families where config.json does not say it. */
typedef struct family_traits {
    const char *name;      /* model_type */
    int qkv_bias, qk_norm; /* always there */
    int reads_biases;      /* attention_bias counts */
    int reads_mlp_bias;
    int has_windows;
    int switched_windows;              /* only where use_sliding_window says so */
    int layered_windows;               /* from max_window_layers on */
    int window_of_all;                 /* layer_types is passed over */
    int64_t default_window;            /* of a file without sliding_window; 0: none */
    int32_t default_head_dim;          /* 0: hidden_size / num_attention_heads */
    double default_eps, default_theta; /* 0: 1e-6 and 10000 */
    int latent, indexed;               /* latent attention, and an indexer */
    cpa_moe_names experts;
} family_traits;

static const family_traits families[] = {
    {"llama", .reads_biases = 1, .reads_mlp_bias = 1},
    {"mistral", .has_windows = 1, .default_window = 4096},
    {"qwen2", .qkv_bias = 1, .switched_windows = 1, .layered_windows = 1, .default_window = 4096},
    {"qwen3", .qk_norm = 1, .reads_biases = 1, .switched_windows = 1, .layered_windows = 1, .default_window = 4096,
     .default_head_dim = 128},
    {"mixtral", .has_windows = 1, .window_of_all = 1, .default_eps = 1e-5, .default_theta = 1e6,
     .experts = CPA_MOE_MIXTRAL},
    {"qwen3_moe", .qk_norm = 1, .reads_biases = 1, .switched_windows = 1, .window_of_all = 1, .default_window = 4096,
     .experts = CPA_MOE_QWEN3},
    {"deepseek_v2", .latent = 1, .experts = CPA_MOE_DEEPSEEK_V2},
    {"deepseek_v3", .latent = 1, .experts = CPA_MOE_DEEPSEEK_V3},
    {"kimi_k2", .latent = 1, .experts = CPA_MOE_DEEPSEEK_V3},
    {"deepseek_v32", .latent = 1, .indexed = 1, .window_of_all = 1, .experts = CPA_MOE_DEEPSEEK_V3},
};
enum { N_FAMILIES = sizeof families / sizeof *families };

static cpa_status find_family(const cpa_json *json, const family_traits **out, cpa_error *err) {
    const char *name = NULL;
    CPA_TRY(cpa_json_text(json, "model_type", CPA_JSON_REQUIRED, &name, err));
    for (int i = 0; i < N_FAMILIES; i++) {
        if (strcmp(families[i].name, name) != 0) continue;
        *out = &families[i];
        return CPA_OK;
    }
    if (strncmp(name, "deepseek_v", strlen("deepseek_v")) == 0) /* other attention: V4 and later */
        return cpa_fail(
            err, CPA_UNSUPPORTED,
            "%s: model_type: found %.40s, which is not supported yet, as deepseek_v2, deepseek_v3 and deepseek_v32 are",
            json->path, name);
    char known[256] = "";
    size_t used = 0;
    for (int i = 0; i < N_FAMILIES; i++) {
        const char *before = i == 0 ? "" : i < N_FAMILIES - 1 ? ", " : " and ";
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", before, families[i].name);
    }
    return cpa_fail(err, CPA_UNSUPPORTED, "%s: model_type: found %.40s, supported are %s", json->path, name, known);
}

/* FP8 in blocks, as stored_weight.h reads it, is the one kind; which tensors are stored so, they say themselves. Rows are
 * not quantised, which activation_scheme "dynamic" allows other programs. */
static cpa_status check_quantization(const cpa_json *json, cpa_error *err) {
    static const struct {
        const char *key, *supported;
    } texts[] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}};
    const json_t *object = cpa_json_get(json, "quantization_config");
    const cpa_json inner = {json->path, "quantization_config.", object};
    if (!object) return CPA_OK;
    if (!json_is_object(object)) return cpa_json_refuse(json, "quantization_config", "an object", err);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char *found = i == 0 ? "none" : texts[i].supported;
        CPA_TRY(cpa_json_text(&inner, texts[i].key, CPA_JSON_OPTIONAL, &found, err));
        if (strcmp(found, texts[i].supported) == 0) continue;
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: quantization_config.%s: found %.40s, supported is %s", json->path,
                        texts[i].key, found, texts[i].supported);
    }
    const json_t *block = cpa_json_get(&inner, "weight_block_size");
    for (size_t i = 0; i < 2; i++)
        if (json_array_size(block) != 2 || json_integer_value(json_array_get(block, i)) != CPA_STORED_WEIGHT_BLOCK)
            return cpa_json_refuse(&inner, "weight_block_size", "[128, 128]", err);
    return CPA_OK;
}

/* What no family here has. */
static cpa_status check_unsupported(const cpa_json *json, cpa_error *err) {
    const char *activation = "silu";
    CPA_TRY(cpa_json_text(json, "hidden_act", CPA_JSON_OPTIONAL, &activation, err));
    if (strcmp(activation, "silu") != 0 && strcmp(activation, "swish") != 0) {
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: hidden_act: found %.40s, supported is silu", json->path, activation);
    }
    CPA_TRY(check_quantization(json, err));
    if (cpa_json_get(json, "per_layer_config")) {
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: per_layer_config: layers of different shapes are not supported",
                        json->path);
    }
    return CPA_OK;
}

enum { MOST_HEADS = 1024 };

/* Heads of ordinary attention. */
static cpa_status read_heads(const cpa_json *json, const family_traits *family, cpa_model_config *config,
                             cpa_error *err) {
    const int says_kv = strcmp(family->name, "llama") != 0; /* Llama 1 and early files of 2 have no such key */
    config->kv_heads = config->q_heads;
    CPA_TRY(cpa_json_int32(json, "num_key_value_heads", says_kv ? CPA_JSON_REQUIRED : CPA_JSON_OPTIONAL, 1, MOST_HEADS,
                           &config->kv_heads, err));
    if (config->q_heads % config->kv_heads != 0)
        return cpa_json_refuse(json, "num_attention_heads", "a multiple of num_key_value_heads", err);
    config->head_dim = family->default_head_dim;
    if (!config->head_dim && !cpa_json_get(json, "head_dim")) {
        if (config->hidden % config->q_heads != 0)
            return cpa_json_refuse(json, "hidden_size", "a multiple of num_attention_heads, or head_dim", err);
        config->head_dim = config->hidden / config->q_heads;
    }
    CPA_TRY(cpa_json_int32(json, "head_dim", CPA_JSON_OPTIONAL, 2, CPA_MAX_HEAD_DIM, &config->head_dim, err));
    if (config->head_dim > CPA_MAX_HEAD_DIM || config->head_dim % 2 != 0) {
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: head_dim: found %d, supported are even ones up to %d", json->path,
                        config->head_dim, CPA_MAX_HEAD_DIM);
    }
    return CPA_OK;
}

static cpa_status read_sizes(const cpa_json *json, const family_traits *family, cpa_model_config *config,
                             cpa_error *err) {
    const int32_t most = 1 << 20;
    double eps = family->default_eps > 0 ? family->default_eps : 1e-6;
    CPA_TRY(
        cpa_json_int32(json, "num_hidden_layers", CPA_JSON_REQUIRED, 1, CPA_CONFIG_MAX_LAYERS, &config->layers, err));
    CPA_TRY(cpa_json_int32(json, "hidden_size", CPA_JSON_REQUIRED, 1, most, &config->hidden, err));
    CPA_TRY(cpa_json_int32(json, "intermediate_size", CPA_JSON_REQUIRED, 1, most, &config->intermediate, err));
    CPA_TRY(cpa_json_int32(json, "vocab_size", CPA_JSON_REQUIRED, 1, 1 << 22, &config->vocabulary, err));
    CPA_TRY(cpa_json_int32(json, "num_attention_heads", CPA_JSON_REQUIRED, 1, MOST_HEADS, &config->q_heads, err));
    CPA_TRY(family->latent ? cpa_latent_config_read(json, &config->latent, err)
                           : read_heads(json, family, config, err));
    if (family->indexed) CPA_TRY(cpa_index_config_read(json, &config->latent, &config->index, err));
    if (family->experts == CPA_MOE_DEEPSEEK_V2) config->latent.interleaved = 1; /* V2 has no rope_interleave */
    CPA_TRY(cpa_json_int(json, "max_position_embeddings", CPA_JSON_REQUIRED, 1, (int64_t)1 << 24, &config->max_position,
                         err));
    CPA_TRY(cpa_json_number(json, "rms_norm_eps", CPA_JSON_OPTIONAL, 0, 1, &eps, err));
    config->norm_eps = (float)eps;
    return CPA_OK;
}

static cpa_status read_parts(const cpa_json *json, const family_traits *family, cpa_model_config *config,
                             cpa_error *err) {
    int attention_bias = 0;
    if (family->reads_biases) CPA_TRY(cpa_json_flag(json, "attention_bias", &attention_bias, err));
    if (family->reads_mlp_bias) CPA_TRY(cpa_json_flag(json, "mlp_bias", &config->mlp_bias, err));
    config->qkv_bias = family->qkv_bias || attention_bias;
    config->o_bias = attention_bias;
    config->qk_norm = family->qk_norm;
    return cpa_json_flag(json, "tie_word_embeddings", &config->tied, err);
}

static cpa_status read_dtype(const cpa_json *json, cpa_model_config *config, cpa_error *err) {
    cpa_error ignored;
    const char *key = cpa_json_get(json, "dtype") ? "dtype" : "torch_dtype", *name = NULL;
    CPA_TRY(cpa_json_text(json, key, CPA_JSON_OPTIONAL, &name, err));
    if (!name) return CPA_OK;
    if (cpa_dtype_of_name(name, &config->dtype, &ignored) != CPA_OK || !cpa_dtype_is_plain(config->dtype))
        return cpa_json_refuse(json, key, "float32, bfloat16 or float16", err);
    config->has_dtype = 1;
    return CPA_OK;
}

/* A window goes to the layers that layer_types calls sliding; 0: there is none. */
static cpa_status read_layer_types(const cpa_json *json, int64_t window, cpa_model_config *config, cpa_error *err) {
    const json_t *types = cpa_json_get(json, "layer_types");
    if (json_array_size(types) != (size_t)config->layers)
        return cpa_json_refuse(json, "layer_types", "one for each layer", err);
    for (int32_t layer = 0; layer < config->layers; layer++) {
        const char *type = json_string_value(json_array_get(types, (size_t)layer));
        if (type && strcmp(type, "full_attention") == 0) continue;
        if (!type || strcmp(type, "sliding_attention") != 0) {
            return cpa_fail(err, CPA_UNSUPPORTED,
                            "%s: layer_types: layer %d is %.40s, supported are full_attention and sliding_attention",
                            json->path, layer, type ? type : "no text");
        }
        if (window == 0) {
            return cpa_fail(err, CPA_INVALID, "%s: layer_types: layer %d is sliding_attention, and no window is in use",
                            json->path, layer);
        }
        config->windows[layer] = window;
    }
    return CPA_OK;
}

/* Qwen's have the window where it is in use, the dense ones from max_window_layers on, Mistral's in all layers;
 * layer_types, where it is there, says which layers of the dense ones. Llama has none. What is missing is as in
 * transformers. */
static cpa_status read_windows(const cpa_json *json, const family_traits *family, cpa_model_config *config,
                               cpa_error *err) {
    const int is_null = json_is_null(json_object_get(json->object, "sliding_window"));
    int used = family->has_windows;
    int64_t window = is_null ? 0 : family->default_window, first = family->layered_windows ? 28 : 0;
    if (family->switched_windows) CPA_TRY(cpa_json_flag(json, "use_sliding_window", &used, err));
    if (used) {
        CPA_TRY(cpa_json_int(json, "sliding_window", CPA_JSON_OPTIONAL, 1, (int64_t)1 << 40, &window, err));
    } else {
        window = 0;
    }
    if (cpa_json_get(json, "layer_types") && !family->window_of_all) return read_layer_types(json, window, config, err);
    if (family->layered_windows)
        CPA_TRY(cpa_json_int(json, "max_window_layers", CPA_JSON_OPTIONAL, 0, INT32_MAX, &first, err));
    for (int64_t layer = first; layer < config->layers; layer++) config->windows[layer] = window;
    return CPA_OK;
}

/* eos_token_id: a number or a list of them; missing: none. */
static cpa_status read_end_ids(const cpa_json *json, cpa_model_config *config, cpa_error *err) {
    const json_t *value = cpa_json_get(json, "eos_token_id");
    size_t n = json_is_array(value) ? json_array_size(value) : value ? 1 : 0;
    if (n > CPA_CONFIG_MAX_END_IDS) return cpa_json_refuse(json, "eos_token_id", "at most 32 ids", err);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
            return cpa_json_refuse(json, "eos_token_id", "an id or a list of ids", err);
        config->end_ids[i] = (uint32_t)json_integer_value(id);
    }
    config->n_end_ids = (int32_t)n;
    return CPA_OK;
}

static cpa_status read_config(const cpa_json *json, cpa_model_config *config, cpa_error *err) {
    const family_traits *family = NULL;
    CPA_TRY(find_family(json, &family, err));
    snprintf(config->family, sizeof config->family, "%s", family->name);
    CPA_TRY(check_unsupported(json, err));
    CPA_TRY(cpa_config_keys_check(json, family->name, err));
    CPA_TRY(read_sizes(json, family, config, err));
    CPA_TRY(read_parts(json, family, config, err));
    CPA_TRY(read_dtype(json, config, err));
    CPA_TRY(read_windows(json, family, config, err));
    const int32_t rotated = family->latent ? config->latent.rope : config->head_dim;
    const double theta = family->default_theta > 0 ? family->default_theta : 10000;
    CPA_TRY(cpa_rope_config_read(json, rotated, config->max_position, theta, &config->rope, err));
    if (family->experts == CPA_MOE_DEEPSEEK_V3) {
        const int32_t most = CPA_CONFIG_MAX_LAYERS - config->layers;
        CPA_TRY(
            cpa_json_int32(json, "num_nextn_predict_layers", CPA_JSON_OPTIONAL, 0, most, &config->next_modules, err));
    }
    if (family->experts) {
        const int32_t layers = config->layers + config->next_modules;
        CPA_TRY(cpa_moe_config_read(json, family->experts, layers, config->intermediate, &config->moe, err));
    }
    return read_end_ids(json, config, err);
}

/* Reads one file of the folder with `read`. */
static cpa_status read_file(const char *folder, const char *name, int optional,
                            cpa_status (*read)(const cpa_json *, cpa_model_config *, cpa_error *),
                            cpa_model_config *config, cpa_error *err) {
    char path[4096];
    json_t *object = NULL;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return cpa_fail(err, CPA_INVALID, "%.200s: the name is too long", folder);
    if (optional && access(path, F_OK) != 0 && errno == ENOENT) return CPA_OK;
    CPA_TRY(cpa_json_load(path, &object, err));
    const cpa_json json = {path, "", object};
    cpa_status status = read(&json, config, err);
    json_decref(object);
    return status;
}

/* The ids of generation_config.json count, where it names any. */
static cpa_status read_generation(const cpa_json *json, cpa_model_config *config, cpa_error *err) {
    return cpa_json_get(json, "eos_token_id") ? read_end_ids(json, config, err) : CPA_OK;
}

cpa_status cpa_model_config_load(const char *folder, cpa_model_config *out, cpa_error *err) {
    cpa_model_config config;
    memset(&config, 0, sizeof config);
    CPA_TRY(read_file(folder, "config.json", 0, read_config, &config, err));
    CPA_TRY(read_file(folder, "generation_config.json", 1, read_generation, &config, err));
    *out = config;
    return CPA_OK;
}

cpa_model_shape cpa_model_config_shape(const cpa_model_config *config, cpa_dtype dtype, cpa_mask *layer_masks) {
    cpa_model_shape shape = {
        .layers = cpa_config_all_layers(config),
        .draft_layers = config->draft_layers,
        .attention = {.q_heads = config->q_heads,
                      .kv_heads = config->kv_heads,
                      .k_dim = config->head_dim,
                      .v_dim = config->head_dim,
                      .dtype = dtype,
                      .kv_dtype = dtype},
        .mask = {.causal = 1, .window = config->windows[0]},
        .index = config->index.heads ? &config->index : NULL,
    };
    if (config->latent.latent) {
        shape.attention.kv_heads = shape.attention.v_in_k = 1;
        shape.attention.k_dim = config->latent.latent + config->latent.rope;
        shape.attention.v_dim = config->latent.latent;
    }
    for (int32_t layer = 0; layer < shape.layers; layer++) {
        layer_masks[layer] = (cpa_mask){.causal = 1, .window = config->windows[layer]};
        if (config->windows[layer] != config->windows[0]) shape.layer_masks = layer_masks;
    }
    return shape;
}
