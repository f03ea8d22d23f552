#include "src/check/verify_keys.h"

#include <string.h>

#include "base/check.h"
#include "src/check/product.h"
#include "src/check/reference_rows.h"

/* Elements of the matrix of a head. */
static int64_t expansion_size(const cpa_attention_shape *cache, const cpa_form *form) {
    const int32_t rope = cache->k_dim - cache->v_dim;
    return (int64_t)(form->shape.k_dim - rope + form->shape.v_dim) * cache->v_dim;
}

cpa_status cpa_verify_expansion_take(cpa_verify_tensor *tensor, const cpa_worker *worker, int32_t form, int32_t layer,
                                     int32_t head, cpa_error *err) {
    const cpa_model_shape *model = &worker->options.model;
    const cpa_form *of = &worker->forms.list[form];
    if (!of->is_expanded) return CPA_OK;
    const int64_t n = expansion_size(&model->attention, of), bytes = n * cpa_dtype_bytes(of->shape.dtype);
    const char *from = cpa_model_form_expansion(model, form, layer);
    return cpa_verify_tensor_take(tensor, worker, from + head * bytes, of->shape.dtype, n, err);
}

void cpa_verify_read_keys(const cpa_verify *verify, const cpa_verify_part *part, int32_t rank, int64_t first, int64_t n,
                          cpa_verify_keys *keys) {
    const cpa_attention_shape cache = cpa_verify_part_shape(verify, part), *shape = &cache;
    const cpa_verify_piece *piece = &part->pieces[rank];
    const int64_t k_row = cpa_shape_row_bytes(shape, CPA_KEYS), v_row = cpa_shape_row_bytes(shape, CPA_VALUES);
    const int64_t word = cpa_dtype_traits_of(shape->kv_dtype)->rows[CPA_KEYS].scale_bytes;
    const char *k_words = piece->k + piece->tokens * k_row, *v_words = piece->v + piece->tokens * v_row;
    cpa_reference_read_rows(piece->k + first * k_row, k_words + first * word, shape->kv_dtype, CPA_KEYS,
                            cpa_verify_scale(verify, CPA_KEYS, part->group->kv_head), n, shape->k_dim, keys->k_raw);
    if (shape->v_in_k) return;
    cpa_reference_read_rows(piece->v + first * v_row, v_words + first * word, shape->kv_dtype, CPA_VALUES,
                            cpa_verify_scale(verify, CPA_VALUES, part->group->kv_head), n, shape->v_dim, keys->v_raw);
}

/* The first `dim` columns of n rows. */
static void copy_columns(const float *rows, int64_t n, int32_t all, int32_t dim, float *out) {
    for (int64_t t = 0; t < n; t++) memcpy(out + t * dim, rows + t * all, (size_t)dim * sizeof *out);
}

/* Keys [W c | r] and values V c of n latents [c | r], which become what the dtype holds of them. */
static void expand(const cpa_attention_shape *cache, const cpa_form *form, const float *expansion, int64_t n,
                   cpa_verify_keys *keys) {
    const int32_t latent = cache->v_dim, rope = cache->k_dim - latent, nope = form->shape.k_dim - rope;
    const int32_t k_dim = form->shape.k_dim, v_dim = form->shape.v_dim;
    float *rows = keys->v_raw; /* latents have no values */
    for (int64_t i = 0; i < n * cache->k_dim; i++) rows[i] = cpa_reference_round(keys->k_raw[i], form->shape.dtype);
    cpa_reference_multiply(expansion, nope, latent, n, rows, cache->k_dim, form->shape.dtype, keys->k, k_dim);
    cpa_reference_multiply(expansion + (int64_t)nope * latent, v_dim, latent, n, rows, cache->k_dim, form->shape.dtype,
                           keys->v, v_dim);
    for (int64_t t = 0; t < n; t++)
        memcpy(keys->k + t * k_dim + nope, rows + t * cache->k_dim + latent, (size_t)rope * sizeof *rows);
}

void cpa_verify_shape_keys(const cpa_verify *verify, const cpa_form *form, const float *expansion, int64_t n,
                           cpa_verify_keys *keys) {
    const cpa_attention_shape *cache = &verify->worker->options.model.attention;
    if (form->is_expanded) {
        expand(cache, form, expansion, n, keys);
        return;
    }
    copy_columns(keys->k_raw, n, cache->k_dim, form->shape.k_dim, keys->k);
    copy_columns(cache->v_in_k ? keys->k_raw : keys->v_raw, n, cache->v_in_k ? cache->k_dim : cache->v_dim,
                 form->shape.v_dim, keys->v);
}
