#include "src/model/latent_config.h"

#include <math.h>

#include <cpattn/shape.h>

#include "base/check.h"
#include "src/model/rope_config.h"

/* Of norms inside of attention, whatever rms_norm_eps says, as transformers has it. */
#define LATENT_NORM_EPS 1e-6f

/* null: queries are one product. A missing key is 1536 for transformers, which no file means. */
static cpa_status read_q_latent(const cpa_json *json, int32_t *out, cpa_error *err) {
    int64_t value = 0;
    const int is_null = json_is_null(json_object_get(json->object, "q_lora_rank"));
    CPA_TRY(
        cpa_json_int(json, "q_lora_rank", is_null ? CPA_JSON_OPTIONAL : CPA_JSON_REQUIRED, 1, 1 << 20, &value, err));
    *out = (int32_t)value;
    return CPA_OK;
}

/* What other keys say of the same widths. */
static cpa_status check_alike(const cpa_json *json, const cpa_latent_config *c, cpa_error *err) {
    int64_t heads = 0, kv_heads, head_dim = c->rope, qk_head_dim = c->nope + c->rope;
    CPA_TRY(cpa_json_int(json, "num_attention_heads", CPA_JSON_REQUIRED, 1, INT32_MAX, &heads, err));
    kv_heads = heads;
    CPA_TRY(cpa_json_int(json, "num_key_value_heads", CPA_JSON_OPTIONAL, 1, INT32_MAX, &kv_heads, err));
    CPA_TRY(cpa_json_int(json, "head_dim", CPA_JSON_OPTIONAL, 1, INT32_MAX, &head_dim, err));
    CPA_TRY(cpa_json_int(json, "qk_head_dim", CPA_JSON_OPTIONAL, 1, INT32_MAX, &qk_head_dim, err));
    if (kv_heads != heads) return cpa_json_refuse(json, "num_key_value_heads", "num_attention_heads", err);
    if (head_dim != c->rope) return cpa_json_refuse(json, "head_dim", "qk_rope_head_dim", err);
    if (qk_head_dim != c->nope + c->rope)
        return cpa_json_refuse(json, "qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim", err);
    return CPA_OK;
}

static cpa_status check_bias(const cpa_json *json, const char *key, cpa_error *err) {
    int bias = 0;
    CPA_TRY(cpa_json_flag(json, key, &bias, err));
    if (!bias) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "%s: %s: found true, supported is false beside latent attention", json->path,
                    key);
}

cpa_status cpa_latent_config_read(const cpa_json *json, cpa_latent_config *out, cpa_error *err) {
    cpa_latent_config c = {.interleaved = 1, .norm_eps = LATENT_NORM_EPS};
    double factor = 1;
    CPA_TRY(cpa_json_int32(json, "kv_lora_rank", CPA_JSON_REQUIRED, 1, CPA_MAX_HEAD_DIM, &c.latent, err));
    CPA_TRY(cpa_json_int32(json, "qk_rope_head_dim", CPA_JSON_REQUIRED, 1, CPA_MAX_HEAD_DIM, &c.rope, err));
    CPA_TRY(cpa_json_int32(json, "qk_nope_head_dim", CPA_JSON_REQUIRED, 1, CPA_MAX_HEAD_DIM, &c.nope, err));
    CPA_TRY(cpa_json_int32(json, "v_head_dim", CPA_JSON_REQUIRED, 1, CPA_MAX_HEAD_DIM, &c.value, err));
    CPA_TRY(read_q_latent(json, &c.q_latent, err));
    if (c.rope % 2 != 0) return cpa_json_refuse(json, "qk_rope_head_dim", "an even number", err);
    if (c.latent + c.rope > CPA_MAX_HEAD_DIM) {
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "%s: kv_lora_rank: found %d with qk_rope_head_dim %d, supported are up to %d "
                        "together",
                        json->path, c.latent, c.rope, CPA_MAX_HEAD_DIM);
    }
    CPA_TRY(check_alike(json, &c, err));
    CPA_TRY(check_bias(json, "attention_bias", err));
    CPA_TRY(check_bias(json, "mlp_bias", err));
    CPA_TRY(cpa_json_flag(json, "rope_interleave", &c.interleaved, err));
    CPA_TRY(cpa_rope_config_score_factor(json, &factor, err));
    c.scale = (float)(factor * factor / sqrt(c.nope + c.rope));
    *out = c;
    return CPA_OK;
}
