#include "src/model/index_config.h"

#include <string.h>

#include "base/check.h"

/* transformers writes what a file of the model's makers does not have: a type for each layer, all of them the same. */
static cpa_status check_layer_types(const cpa_json *json, cpa_error *err) {
    const json_t *types = cpa_json_get(json, "layer_types");
    for (size_t layer = 0; layer < json_array_size(types); layer++) {
        const char *type = json_string_value(json_array_get(types, layer));
        if (type && strcmp(type, "indexed_attention") == 0) continue;
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: layer_types: layer %zu is %.40s, supported is indexed_attention",
                        json->path, layer, type ? type : "no text");
    }
    return CPA_OK;
}

cpa_status cpa_index_config_read(const cpa_json *json, const cpa_latent_config *latent, cpa_index_form *out,
                                 cpa_error *err) {
    cpa_index_form c = {.dtype = CPA_BF16, .has_weights = 1};
    CPA_TRY(cpa_json_int32(json, "index_n_heads", CPA_JSON_REQUIRED, 1, CPA_INDEX_MOST_HEADS, &c.heads, err));
    CPA_TRY(cpa_json_int32(json, "index_head_dim", CPA_JSON_REQUIRED, 1, CPA_INDEX_MOST_DIM, &c.dim, err));
    CPA_TRY(cpa_json_int32(json, "index_topk", CPA_JSON_REQUIRED, 1, CPA_MOST_TOPK, &c.k, err));
    if ((c.dim & (c.dim - 1)) != 0 || c.dim < 8)
        return cpa_json_refuse(json, "index_head_dim", "a power of two from 8 on", err);
    if (c.dim < latent->rope) return cpa_json_refuse(json, "index_head_dim", "at least qk_rope_head_dim", err);
    if (!latent->q_latent) return cpa_json_refuse(json, "q_lora_rank", "a number, beside an indexer", err);
    CPA_TRY(check_layer_types(json, err));
    *out = c;
    return CPA_OK;
}

cpa_dtype cpa_index_dtype_beside(cpa_dtype dtype, cpa_dtype kv_dtype) {
    if (cpa_dtype_is_quantised(kv_dtype)) return CPA_FP8_E4M3;
    return dtype == CPA_F32 ? CPA_F32 : CPA_BF16;
}
