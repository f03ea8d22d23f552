#include "src/ops/check_args.h"

#include <math.h>
#include <stdlib.h>

#include "base/struct_size.h"
#include "kernels/kv_view.h"

cpa_status cpa_check_heads(const char *where, int32_t q_heads, int32_t kv_heads, cpa_error *err) {
    REQUIRE(err, kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0 && q_heads <= CPA_MOST_HEADS,
            "%s: q_heads is %d, expected a positive multiple of kv_heads, %d, of at most %d", where, q_heads, kv_heads,
            CPA_MOST_HEADS);
    return CPA_OK;
}

cpa_status cpa_check_dim(const char *where, const char *name, int32_t dim, cpa_error *err) {
    REQUIRE(err, dim >= 1 && dim <= CPA_MAX_HEAD_DIM, "%s: %s is %d, expected 1..%d", where, name, dim,
            CPA_MAX_HEAD_DIM);
    return CPA_OK;
}

cpa_status cpa_check_dtype(const char *where, const char *name, cpa_dtype dtype, cpa_error *err) {
    REQUIRE(err, cpa_dtype_is_plain(dtype), "%s: %s is %d, expected fp32, bf16 or fp16", where, name, (int)dtype);
    return CPA_OK;
}

cpa_status cpa_check_block_size(const char *where, int32_t block_size, cpa_error *err) {
    REQUIRE(err, block_size > 0 && (block_size & (block_size - 1)) == 0 && block_size <= CPA_MOST_BLOCK_TOKENS,
            "%s: block_size is %d, expected a power of two up to %d", where, block_size, CPA_MOST_BLOCK_TOKENS);
    return CPA_OK;
}

cpa_status cpa_check_map(const char *where, cpa_owner_map map, cpa_error *err) {
    REQUIRE(err, map.cp_size >= 1 && map.cp_size <= CPA_MOST_RANKS && map.interleave >= 1,
            "%s: the map has cp_size %d and interleave %d, expected at least 1, and at most %d ranks", where,
            map.cp_size, map.interleave, CPA_MOST_RANKS);
    return CPA_OK;
}

cpa_status cpa_check_mask(const char *where, const cpa_mask *mask, cpa_error *err) {
    REQUIRE(err, mask->causal == 0 || mask->causal == 1, "%s: causal is %d, expected 0 or 1", where, mask->causal);
    REQUIRE(err, mask->window >= 0 && mask->sinks >= 0, "%s: window is %lld and sinks is %d, expected 0 or more", where,
            (long long)mask->window, mask->sinks);
    REQUIRE(err, mask->right >= 0 && mask->right <= CPA_MOST_TOKENS,
            "%s: right is %lld, expected 0, or up to 2^44 keys ahead", where, (long long)mask->right);
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*mask), "%s: the reserved bytes of the mask are not zero", where);
    return CPA_OK;
}

cpa_status cpa_check_layer_mask(const char *where, const cpa_mask *mask, cpa_error *err) {
    CPA_TRY(cpa_check_mask(where, mask, err));
    REQUIRE(err, mask->right == 0, "%s: right is %lld, expected 0: windows that look ahead are for operators alone",
            where, (long long)mask->right);
    return CPA_OK;
}

cpa_status cpa_check_aligned(const char *where, const char *name, const void *pointer, int64_t bytes, cpa_error *err) {
    REQUIRE(err, (uintptr_t)pointer % (uintptr_t)bytes == 0,
            "%s: %s at %p is not aligned to its elements of %lld bytes", where, name, pointer, (long long)bytes);
    return CPA_OK;
}

cpa_status cpa_check_scales(const char *where, cpa_dtype kv_dtype, float k_scale, float v_scale, cpa_error *err) {
    const int none = k_scale == 0 && v_scale == 0;
    const int both = k_scale > 0 && v_scale > 0 && isfinite(k_scale) && isfinite(v_scale);
    REQUIRE(err, none || (both && cpa_dtype_traits_of(kv_dtype)->tensor_scale),
            "%s: k_scale is %g and v_scale is %g for a cache of %s, expected none, or both above 0 for fp8_e4m3", where,
            (double)k_scale, (double)v_scale, cpa_dtype_name(kv_dtype));
    return CPA_OK;
}

cpa_status cpa_check_head_scales(const char *where, cpa_dtype kv_dtype, int32_t kv_heads, float k_scale,
                                 const float *k_scales, const float *v_scales, int32_t n_scales, cpa_error *err) {
    if (!k_scales && !v_scales && n_scales == 0) return CPA_OK;
    REQUIRE(err, k_scales && v_scales, "%s: %s is NULL and %s is not, expected both or none", where,
            k_scales ? "v_scales" : "k_scales",
            k_scales   ? "k_scales"
            : v_scales ? "v_scales"
                       : "n_scales");
    REQUIRE(err, n_scales == 1 || n_scales == kv_heads, "%s: n_scales is %d, expected 1 or the %d KV heads", where,
            n_scales, kv_heads);
    REQUIRE(err, cpa_dtype_traits_of(kv_dtype)->tensor_scale && k_scale == 0,
            "%s: k_scales and v_scales are given for a cache of %s whose k_scale is %g, expected fp8_e4m3 and 0", where,
            cpa_dtype_name(kv_dtype), (double)k_scale);
    CPA_TRY(cpa_check_aligned(where, "k_scales", k_scales, sizeof *k_scales, err));
    return cpa_check_aligned(where, "v_scales", v_scales, sizeof *v_scales, err);
}

cpa_status cpa_check_layout(const char *where, cpa_kv_layout layout, cpa_dtype dtype, int32_t k_dim, cpa_error *err) {
    REQUIRE(err, layout == CPA_TOKEN_MAJOR || layout == CPA_HEAD_MAJOR || layout == CPA_VLLM_X,
            "%s: layout is %d, expected 0, 1 or 2", where, (int)layout);
    const int32_t x = (int32_t)(16 / cpa_dtype_bytes(dtype));
    REQUIRE(err, layout != CPA_VLLM_X || k_dim % x == 0,
            "%s: k_dim is %d, expected a multiple of %d in the layout of runs of 16 bytes", where, k_dim, x);
    return CPA_OK;
}

/* Adds what lies between the first and the last of `count` things that are `stride` apart. */
static int add_extent(int64_t *elements, int64_t count, int64_t stride) {
    int64_t between;
    return count == 0 || (!__builtin_mul_overflow(count - 1, stride, &between) &&
                          !__builtin_add_overflow(*elements, between, elements));
}

static cpa_status check_stride(const char *where, const char *name, int64_t stride, int64_t least, cpa_error *err) {
    REQUIRE(err, stride == 0 || stride >= least, "%s: %s is %lld, expected 0 or at least %lld", where, name,
            (long long)stride, (long long)least);
    return CPA_OK;
}

cpa_status cpa_check_rows(const char *where, const char *name, int64_t rows, int64_t stride, int64_t least,
                          int64_t bytes, cpa_error *err) {
    int64_t elements = least;
    CPA_TRY(check_stride(where, name, stride, least, err));
    REQUIRE(err, add_extent(&elements, rows, stride ? stride : least) && elements <= CPA_MOST_BYTES / bytes,
            "%s: %lld rows with %s %lld reach beyond 2^60 bytes", where, (long long)rows, name, (long long)stride);
    return CPA_OK;
}

cpa_status cpa_check_state(const char *where, const cpa_partial *state, int64_t rows, int32_t heads, int32_t v_dim,
                           cpa_error *err) {
    const int64_t bytes = sizeof(float);
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*state), "%s: the reserved bytes of a partial state are not zero", where);
    CPA_TRY(cpa_check_aligned(where, "o", state->o, bytes, err));
    CPA_TRY(cpa_check_aligned(where, "lse", state->lse, bytes, err));
    CPA_TRY(cpa_check_rows(where, "o_row_stride", rows, state->o_row_stride, (int64_t)heads * v_dim, bytes, err));
    return cpa_check_rows(where, "lse_row_stride", rows, state->lse_row_stride, heads, bytes, err);
}

/* ---- views ---- */

/* The keys or the values of a view. */
typedef struct view_side {
    cpa_kv_part part;
    const char *name, *block, *token, *head; /* of the pool and its strides */
    const void *pool;
    int32_t dim;
    int64_t block_stride, token_stride, head_stride;
    float scale;
} view_side;

static cpa_status check_row_scales(const char *where, const cpa_kv_view *kv, const view_side *side, cpa_error *err) {
    if (!cpa_kv_scale_bytes(kv->dtype, side->part, side->scale)) return CPA_OK;
    int64_t least = cpa_kv_block_bytes(kv->dtype, side->part, side->scale, kv->block_size, kv->kv_heads, side->dim);
    REQUIRE(err, side->block_stride == 0 || (side->block_stride >= least && side->block_stride % 4 == 0),
            "%s: a block stride is %lld, expected a multiple of 4 and at least %lld, scales included", where,
            (long long)side->block_stride, (long long)least);
    REQUIRE(err, (uintptr_t)side->pool % 4 == 0, "%s: the pool at %p is not a multiple of 4", where, side->pool);
    return CPA_OK;
}

static cpa_status check_side(const char *where, const cpa_kv_view *kv, const view_side *given,
                             const view_side *resolved, cpa_error *err) {
    const int64_t least_token = kv->layout == CPA_VLLM_X ? 1 : given->dim; /* check_runs knows which it has to be */
    CPA_TRY(check_stride(where, given->block, given->block_stride, given->dim, err));
    CPA_TRY(check_stride(where, given->token, given->token_stride, least_token, err));
    CPA_TRY(check_stride(where, given->head, given->head_stride, given->dim, err));
    CPA_TRY(check_row_scales(where, kv, given, err));
    CPA_TRY(cpa_check_aligned(where, given->name, given->pool, cpa_dtype_bytes(kv->dtype), err));
    int64_t elements = given->dim;
    REQUIRE(err,
            add_extent(&elements, kv->num_blocks, resolved->block_stride) &&
                add_extent(&elements, kv->block_size, resolved->token_stride) &&
                add_extent(&elements, kv->kv_heads, resolved->head_stride) &&
                elements <= CPA_MOST_BYTES / cpa_dtype_bytes(kv->dtype),
            "%s: %lld blocks with the strides %lld, %lld and %lld reach beyond 2^60 bytes", where,
            (long long)kv->num_blocks, (long long)resolved->block_stride, (long long)resolved->token_stride,
            (long long)resolved->head_stride);
    return CPA_OK;
}

/* The strides of CPA_VLLM_X are its own; it is read and written 16 bytes at a time. */
static cpa_status check_runs(const char *where, const cpa_kv_view *kv, const cpa_kv_view *order, cpa_error *err) {
    if (kv->layout != CPA_VLLM_X) return CPA_OK;
    const cpa_kv_view own = cpa_kv_view_resolve((cpa_kv_view){.dtype = kv->dtype,
                                                              .block_size = kv->block_size,
                                                              .kv_heads = kv->kv_heads,
                                                              .k_dim = kv->k_dim,
                                                              .v_dim = kv->v_dim,
                                                              .layout = CPA_VLLM_X});
    REQUIRE(
        err,
        (!kv->k_token_stride || kv->k_token_stride == own.k_token_stride) &&
            (!kv->v_token_stride || kv->v_token_stride == own.v_token_stride) &&
            order->k_head_stride == own.k_head_stride && order->v_head_stride == own.v_head_stride,
        "%s: strides of tokens %lld and %lld and of heads %lld and %lld, expected 0 or %lld, %lld, %lld and %lld in "
        "the layout of runs of 16 bytes",
        where, (long long)kv->k_token_stride, (long long)kv->v_token_stride, (long long)order->k_head_stride,
        (long long)order->v_head_stride, (long long)own.k_token_stride, (long long)own.v_token_stride,
        (long long)own.k_head_stride, (long long)own.v_head_stride);
    REQUIRE(err,
            (uintptr_t)kv->k % 16 == 0 && (uintptr_t)kv->v % 16 == 0 &&
                order->k_block_stride % cpa_kv_key_run(kv->dtype) == 0,
            "%s: pools at %p and %p and a k_block_stride of %lld, expected multiples of 16 bytes in the layout of runs "
            "of 16 bytes",
            where, kv->k, kv->v, (long long)order->k_block_stride);
    return CPA_OK;
}

static view_side keys_of(const cpa_kv_view *kv) {
    const float scale = cpa_kv_tensor_scale(kv, CPA_KEYS);
    return (view_side){CPA_KEYS, "the key pool", "k_block_stride",   "k_token_stride",   "k_head_stride",
                       kv->k,    kv->k_dim,      kv->k_block_stride, kv->k_token_stride, kv->k_head_stride,
                       scale};
}

static view_side values_of(const cpa_kv_view *kv) {
    const float scale = cpa_kv_tensor_scale(kv, CPA_VALUES);
    return (view_side){CPA_VALUES, "the value pool", "v_block_stride",   "v_token_stride",   "v_head_stride",
                       kv->v,      kv->v_dim,        kv->v_block_stride, kv->v_token_stride, kv->v_head_stride,
                       scale};
}

cpa_status cpa_check_view(const char *where, const cpa_kv_view *kv, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*kv), "%s: the reserved bytes of the view are not zero", where);
    REQUIRE(err, kv->num_blocks >= 0, "%s: num_blocks is %lld, expected at least 0", where, (long long)kv->num_blocks);
    REQUIRE(err, kv->num_blocks == 0 || (kv->k && kv->v), "%s: the %s pool is NULL", where, kv->k ? "value" : "key");
    REQUIRE(err, cpa_dtype_traits_of(kv->dtype), "%s: the dtype of the cache is %d, which is none", where,
            (int)kv->dtype);
    CPA_TRY(cpa_check_block_size(where, kv->block_size, err));
    REQUIRE(err, kv->kv_heads > 0 && kv->kv_heads <= CPA_MOST_HEADS, "%s: kv_heads is %d, expected 1..%d", where,
            kv->kv_heads, CPA_MOST_HEADS);
    CPA_TRY(cpa_check_dim(where, "k_dim", kv->k_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", kv->v_dim, err));
    CPA_TRY(cpa_check_scales(where, kv->dtype, kv->k_scale, kv->v_scale, err));
    CPA_TRY(cpa_check_head_scales(where, kv->dtype, kv->kv_heads, kv->k_scale, kv->k_scales, kv->v_scales, kv->n_scales,
                                  err));
    CPA_TRY(cpa_check_layout(where, kv->layout, kv->dtype, kv->k_dim, err));
    const cpa_kv_view resolved = cpa_kv_view_resolve(*kv);
    const view_side given[] = {keys_of(kv), values_of(kv)}, full[] = {keys_of(&resolved), values_of(&resolved)};
    CPA_TRY(check_side(where, kv, &given[0], &full[0], err));
    CPA_TRY(check_runs(where, kv, &resolved, err));
    return check_side(where, kv, &given[1], &full[1], err);
}

cpa_status cpa_check_same_shape(const char *where, const cpa_kv_view *a, const cpa_kv_view *b, cpa_error *err) {
    REQUIRE(err,
            a->dtype == b->dtype && a->block_size == b->block_size && a->kv_heads == b->kv_heads &&
                a->k_dim == b->k_dim && a->v_dim == b->v_dim,
            "%s: src has dtype %d, block_size %d, kv_heads %d, k_dim %d, v_dim %d, but dst has %d, %d, %d, %d, %d",
            where, (int)a->dtype, a->block_size, a->kv_heads, a->k_dim, a->v_dim, (int)b->dtype, b->block_size,
            b->kv_heads, b->k_dim, b->v_dim);
    REQUIRE(err, a->k_scale == b->k_scale && a->v_scale == b->v_scale,
            "%s: src has the scales %g and %g, but dst has %g and %g", where, (double)a->k_scale, (double)a->v_scale,
            (double)b->k_scale, (double)b->v_scale);
    REQUIRE(err, !a->k_scales == !b->k_scales && a->n_scales == b->n_scales,
            "%s: src has %d scales of heads, but dst has %d", where, a->n_scales, b->n_scales);
    REQUIRE(err, (a->layout == CPA_VLLM_X) == (b->layout == CPA_VLLM_X),
            "%s: src has layout %d, but dst has %d; cpa_kv_convert brings blocks from one to the other", where,
            (int)a->layout, (int)b->layout);
    return CPA_OK;
}

/* ---- ranges ---- */

static int by_begin(const void *a, const void *b) {
    int64_t left = ((const cpa_checked_range *)a)->begin, right = ((const cpa_checked_range *)b)->begin;
    return (left > right) - (left < right);
}

cpa_status cpa_check_disjoint(const char *where, const char *what, const char *units, cpa_checked_range *ranges,
                              int64_t n, cpa_error *err) {
    int ascending = 1;
    for (int64_t i = 1; i < n && ascending; i++) ascending = ranges[i - 1].begin <= ranges[i].begin;
    if (!ascending) qsort(ranges, (size_t)n, sizeof *ranges, by_begin);
    for (int64_t i = 1; i < n; i++) {
        const cpa_checked_range *a = &ranges[i - 1], *b = &ranges[i];
        REQUIRE(err, a->end <= b->begin, "%s: %s[%lld] and %s[%lld] both have %s %lld", where, what,
                (long long)a->index, what, (long long)b->index, units, (long long)b->begin);
    }
    return CPA_OK;
}
