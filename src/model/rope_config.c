#include "src/model/rope_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "src/model/config_keys.h"

/* Whether a key may be missing, but not null: transformers would compute with that. */
static cpa_json_presence missing_or(const cpa_json *json, const char *key) {
    return json_object_get(json->object, key) ? CPA_JSON_REQUIRED : CPA_JSON_OPTIONAL;
}

static cpa_status read_theta(const cpa_json *json, double *out, cpa_error *err) {
    return cpa_json_number(json, "rope_theta", missing_or(json, "rope_theta"), 1 + 1e-9, 1e15, out, err);
}

static cpa_status read_original_max(const cpa_json *json, int64_t *out, cpa_error *err) {
    static const char *const key = "original_max_position_embeddings";
    return cpa_json_int(json, key, missing_or(json, key), 1, (int64_t)1 << 40, out, err);
}

static cpa_status find_scaling(const cpa_json *json, cpa_rope_scaling *out, cpa_error *err) {
    static const char *const names[CPA_ROPE_SCALING_COUNT] = {"default", "linear", "llama3", "yarn"};
    const char *name = names[CPA_ROPE_PLAIN];
    const char *key = json_object_get(json->object, "rope_type") ? "rope_type" : "type"; /* before version 4.43 */
    CPA_TRY(cpa_json_text(json, key, missing_or(json, key), &name, err));
    for (int scaling = 0; scaling < CPA_ROPE_SCALING_COUNT; scaling++) {
        if (strcmp(name, names[scaling]) != 0) continue;
        *out = (cpa_rope_scaling)scaling;
        return CPA_OK;
    }
    return cpa_fail(err, CPA_UNSUPPORTED,
                    "%s: %srope_type: found %.40s, supported are default, linear, llama3 and yarn", json->path,
                    json->prefix, name);
}

static double yarn_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* beta_fast, beta_slow and the factor of cosines and sines; mscale is its form in files of DeepSeek's making. */
static cpa_status read_yarn(const cpa_json *json, cpa_rope_config *rope, cpa_error *err) {
    double mscale = 0, mscale_all_dim = 0;
    const json_t *truncate = json_object_get(json->object, "truncate");
    CPA_TRY(cpa_json_number(json, "beta_fast", CPA_JSON_OPTIONAL, 0, 1e9, &rope->beta_fast, err));
    CPA_TRY(cpa_json_number(json, "beta_slow", CPA_JSON_OPTIONAL, 0, 1e9, &rope->beta_slow, err));
    CPA_TRY(cpa_json_number(json, "mscale", CPA_JSON_OPTIONAL, 0, 1e9, &mscale, err));
    CPA_TRY(cpa_json_number(json, "mscale_all_dim", CPA_JSON_OPTIONAL, 0, 1e9, &mscale_all_dim, err));
    if (truncate && !json_is_true(truncate))
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: %struncate: supported is true", json->path, json->prefix);
    rope->attention_factor = mscale > 0 && mscale_all_dim > 0
                                 ? yarn_mscale(rope->factor, mscale) / yarn_mscale(rope->factor, mscale_all_dim)
                                 : yarn_mscale(rope->factor, 1);
    return cpa_json_number(json, "attention_factor", CPA_JSON_OPTIONAL, 1e-9, 1e9, &rope->attention_factor, err);
}

/* Plain rotary positions pass the factor over in these families, and turn whole heads; with a scaling transformers has
 * tables of fewer elements than heads, and fails. */
static cpa_status check_partial(const cpa_json *json, int32_t dim, cpa_error *err) {
    double partial = 1;
    CPA_TRY(cpa_json_number(json, "partial_rotary_factor", CPA_JSON_OPTIONAL, 1e-9, 1, &partial, err));
    if ((int32_t)(dim * partial) == dim) return CPA_OK;
    return cpa_json_refuse(json, "partial_rotary_factor", "1 beside a scaling of rotary positions", err);
}

static cpa_status read_scaling(const cpa_json *json, const cpa_json *file, cpa_rope_config *rope, cpa_error *err) {
    if (cpa_json_get(json, "full_attention") || cpa_json_get(json, "sliding_attention"))
        return cpa_fail(
            err, CPA_UNSUPPORTED,
            "%s: %sfull_attention: found rotary positions of one type of layer, supported are those of all layers",
            json->path, json->prefix);
    CPA_TRY(cpa_config_keys_check_scaling(json, err));
    CPA_TRY(read_theta(json, &rope->theta, err));
    CPA_TRY(find_scaling(json, &rope->scaling, err));
    if (rope->scaling == CPA_ROPE_PLAIN) return CPA_OK;
    CPA_TRY(check_partial(cpa_json_get(json, "partial_rotary_factor") ? json : file, rope->dim, err));
    CPA_TRY(cpa_json_number(json, "factor", CPA_JSON_REQUIRED, 1, 1e9, &rope->factor, err));
    if (rope->scaling == CPA_ROPE_LINEAR) return CPA_OK;
    CPA_TRY(read_original_max(json, &rope->original_max_position, err));
    CPA_TRY(read_original_max(file, &rope->original_max_position, err)); /* it wins */
    if (rope->scaling == CPA_ROPE_YARN) return read_yarn(json, rope, err);
    CPA_TRY(cpa_json_number(json, "low_freq_factor", CPA_JSON_REQUIRED, 1e-9, 1e9, &rope->low_freq_factor, err));
    CPA_TRY(cpa_json_number(json, "high_freq_factor", CPA_JSON_REQUIRED, 1e-9, 1e9, &rope->high_freq_factor, err));
    if (rope->high_freq_factor <= rope->low_freq_factor)
        return cpa_json_refuse(json, "high_freq_factor", "more than low_freq_factor", err);
    return CPA_OK;
}

/* The object of the scaling: rope_scaling (version 4 of transformers) wins over rope_parameters (5), unless it is
 * empty. */
static const char *scaling_key(const cpa_json *json) {
    const json_t *old = cpa_json_get(json, "rope_scaling");
    const int is_empty = !old || (json_is_object(old) && json_object_size(old) == 0);
    return is_empty && cpa_json_get(json, "rope_parameters") ? "rope_parameters" : "rope_scaling";
}

/* The object of the scaling as one of the file, with a prefix of its own; without one inner->object is NULL. */
enum { PREFIX_BYTES = 32 };
static cpa_status open_scaling(const cpa_json *json, char prefix[PREFIX_BYTES], cpa_json *inner, cpa_error *err) {
    const char *key = scaling_key(json);
    const json_t *object = cpa_json_get(json, key);
    if (object && !json_is_object(object)) return cpa_json_refuse(json, key, "an object", err);
    snprintf(prefix, PREFIX_BYTES, "%s.", key);
    *inner = (cpa_json){json->path, prefix, object};
    return CPA_OK;
}

cpa_status cpa_rope_config_score_factor(const cpa_json *json, double *out, cpa_error *err) {
    char prefix[PREFIX_BYTES];
    cpa_json inner;
    cpa_rope_scaling scaling = CPA_ROPE_PLAIN;
    double factor = 1, mscale_all_dim = 0;
    CPA_TRY(open_scaling(json, prefix, &inner, err));
    if (inner.object) CPA_TRY(find_scaling(&inner, &scaling, err));
    if (scaling != CPA_ROPE_PLAIN) {
        CPA_TRY(cpa_json_number(&inner, "factor", CPA_JSON_REQUIRED, 1, 1e9, &factor, err));
        CPA_TRY(cpa_json_number(&inner, "mscale_all_dim", CPA_JSON_OPTIONAL, 0, 1e9, &mscale_all_dim, err));
    }
    *out = yarn_mscale(factor, mscale_all_dim);
    return CPA_OK;
}

cpa_status cpa_rope_config_read(const cpa_json *json, int32_t head_dim, int64_t max_position, double default_theta,
                                cpa_rope_config *out, cpa_error *err) {
    char prefix[PREFIX_BYTES];
    cpa_json inner;
    cpa_rope_config rope = {.size = sizeof rope,
                            .dim = head_dim,
                            .theta = default_theta,
                            .max_position = max_position,
                            .original_max_position = max_position};
    CPA_TRY(read_theta(json, &rope.theta, err));
    CPA_TRY(open_scaling(json, prefix, &inner, err));
    if (inner.object) CPA_TRY(read_scaling(&inner, json, &rope, err));
    *out = rope;
    return CPA_OK;
}
