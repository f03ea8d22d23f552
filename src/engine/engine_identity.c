#include "src/engine/engine_identity.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "src/cache/layer_groups.h"
#include "src/cache/parcel.h"
#include "src/engine/model_forms.h"

uint64_t cpa_engine_hash_rules(const cpa_model_shape *model) {
    uint64_t hash = CPA_HASH_START;
    for (int32_t layer = 0; model->layer_rules && layer < model->layers; layer++) {
        const cpa_score_rules *rules = &model->layer_rules[layer];
        const float numbers[] = {rules->softcap, rules->temperature_len, (float)(rules->alibi_slopes != NULL),
                                 (float)(rules->sink_logits != NULL)};
        const size_t bytes = (size_t)model->attention.q_heads * sizeof *numbers;
        hash = cpa_hash_bytes(hash, numbers, sizeof numbers);
        if (rules->alibi_slopes) hash = cpa_hash_bytes(hash, rules->alibi_slopes, bytes);
        if (rules->sink_logits) hash = cpa_hash_bytes(hash, rules->sink_logits, bytes);
    }
    return hash;
}

uint64_t cpa_engine_hash_unquantised(const cpa_model_shape *model) {
    uint64_t hash = 0;
    for (int32_t layer = 0; model->unquantised_layers && layer < model->layers; layer++)
        hash = cpa_hash_bytes(hash, (uint8_t[]){cpa_model_leaves_layer(model, layer) != 0}, 1);
    return hash;
}

/* A hash of what each layer is to see, and of how it scores that. */
static uint64_t hash_layers(const cpa_model_shape *m) {
    uint64_t hash = CPA_HASH_START;
    for (int32_t layer = 0; layer < m->layers; layer++) {
        cpa_mask mask = cpa_model_mask(m, layer);
        const uint64_t parts[] = {(uint64_t)mask.causal, (uint64_t)mask.window, (uint64_t)mask.sinks};
        hash = cpa_hash_bytes(hash, parts, sizeof parts);
    }
    if (m->layer_rules) hash ^= cpa_engine_hash_rules(m);
    if (m->n_forms > 0) hash ^= cpa_model_forms_hash(m);
    return hash ^ cpa_engine_hash_unquantised(m);
}

uint64_t cpa_engine_hash_store_layers(const cpa_model_shape *m) {
    const cpa_index_rows index = cpa_layer_groups_index(m);
    const int64_t counts[] = {m->layers, m->draft_layers, index.dim, index.dtype};
    return cpa_hash_bytes(hash_layers(m), counts, sizeof counts);
}

void cpa_engine_describe_cache(const cpa_engine_options *o, uint64_t scales, char out[CPA_IDENTITY_BYTES]) {
    cpa_model_shape model = o->model;
    const cpa_model_shape *m = &model;
    model.layers -= model.draft_layers;
    const cpa_attention_shape *shape = &m->attention;
    const uint64_t masks = hash_layers(m) ^ scales;
    const int n = snprintf(
        out, CPA_IDENTITY_BYTES, "%d layers, %d/%d heads of %d/%d, dtype %d in %d, scales %a %a, masks %llx, seed %llu",
        m->layers, shape->q_heads, shape->kv_heads, shape->k_dim, shape->v_dim, (int)shape->dtype, (int)shape->kv_dtype,
        (double)shape->k_scale, (double)shape->v_scale, (unsigned long long)masks, (unsigned long long)o->seed);
    if (n < CPA_IDENTITY_BYTES && (o->sparse_stride > 0 || o->skip_tiles > 0))
        snprintf(out + n, (size_t)(CPA_IDENTITY_BYTES - n), ", sparse %d %a, skip %a", o->sparse_stride,
                 (double)o->sparse_tau, (double)o->skip_tiles);
    const size_t said = strlen(out);
    if (o->precise_tokens > 0)
        snprintf(out + said, CPA_IDENTITY_BYTES - said, ", precise %lld", (long long)o->precise_tokens);
}

cpa_status cpa_engine_describe_folder(const cpa_engine_options *o, uint64_t scales, int32_t rank, int32_t cp_size,
                                      char out[CPA_FOLDER_IDENTITY_BYTES], cpa_error *err) {
    char cache[CPA_IDENTITY_BYTES];
    cpa_prefix_digest salt;
    cpa_engine_describe_cache(o, scales, cache);
    /* What tells salts apart, and no more of a secret. */
    if (!cpa_parcel_root("swap folder", NULL, o->swap_salt, 0, &salt))
        return cpa_fail(err, CPA_INTERNAL, "swap_folder: OpenSSL gives no SHA-256");
    const int n = snprintf(
        out, CPA_FOLDER_IDENTITY_BYTES,
        "model %s, %s, all layers %llx, layout %d, blocks of %d, interleave %d, back end %d, rank %d of %d, salt "
        "%02x%02x%02x%02x",
        o->swap_model && o->swap_model[0] ? o->swap_model : "without a name", cache,
        (unsigned long long)cpa_engine_hash_store_layers(&o->model), (int)o->model.attention.layout, o->block_size,
        o->interleave, (int)o->device.backend, rank, cp_size, salt.bytes[0], salt.bytes[1], salt.bytes[2],
        salt.bytes[3]);
    if (n >= CPA_FOLDER_IDENTITY_BYTES)
        return cpa_fail(err, CPA_INVALID, "swap_model: found %zu characters, expected %d fewer at least",
                        strlen(o->swap_model), n - CPA_FOLDER_IDENTITY_BYTES + 1);
    return CPA_OK;
}
