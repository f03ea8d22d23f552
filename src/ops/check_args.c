#include "src/ops/check_args.h"

#include <math.h>
#include <stdlib.h>

#include "base/struct_size.h"
#include "kernels/codebook.h"
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

cpa_status cpa_check_skip_tiles(const char *where, float skip_tiles, cpa_error *err) {
    REQUIRE(err, skip_tiles >= 0 && skip_tiles - skip_tiles == 0, "%s: skip_tiles is %g, expected 0 (none) or more",
            where, (double)skip_tiles);
    return CPA_OK;
}

cpa_status cpa_check_out_scale(const char *where, cpa_dtype out_dtype, const float *out_scale, cpa_error *err) {
    REQUIRE(err, (out_dtype == CPA_FP8_E4M3) == (out_scale != NULL),
            "%s: out_dtype is %s and out_scale is %s, expected one for %s", where, cpa_dtype_name(out_dtype),
            out_scale ? "set" : "NULL", cpa_dtype_name(CPA_FP8_E4M3));
    return cpa_check_aligned(where, "out_scale", out_scale, sizeof *out_scale, err);
}

cpa_status cpa_check_rows(const char *where, const char *name, int64_t rows, int64_t stride, int64_t least,
                          int64_t bytes, cpa_error *err) {
    int64_t elements = least;
    CPA_TRY(check_stride(where, name, stride, least, err));
    REQUIRE(err, add_extent(&elements, rows, stride ? stride : least) && elements <= CPA_MOST_BYTES / bytes,
            "%s: %lld rows with %s %lld reach beyond 2^60 bytes", where, (long long)rows, name, (long long)stride);
    return CPA_OK;
}

cpa_status cpa_check_heads_of_rows(const char *where, const cpa_checked_heads *of, cpa_error *err) {
    const int64_t dense = (int64_t)of->heads * of->dim, row_stride = of->row_stride ? of->row_stride : dense;
    int64_t elements = of->dim;
    if (of->head_stride == 0)
        return cpa_check_rows(where, of->row_name, of->rows, of->row_stride, dense, of->bytes, err);
    CPA_TRY(check_stride(where, of->row_name, of->row_stride, of->dim, err));
    CPA_TRY(check_stride(where, of->head_name, of->head_stride, of->dim, err));
    REQUIRE(err,
            add_extent(&elements, of->rows, row_stride) && add_extent(&elements, of->heads, of->head_stride) &&
                elements <= CPA_MOST_BYTES / of->bytes,
            "%s: %lld rows with %s %lld and %s %lld reach beyond 2^60 bytes", where, (long long)of->rows, of->row_name,
            (long long)of->row_stride, of->head_name, (long long)of->head_stride);
    return CPA_OK;
}

cpa_status cpa_check_written_heads(const char *where, const cpa_checked_heads *of, int follow, cpa_error *err) {
    const int64_t dense = (int64_t)of->heads * of->dim, row_stride = of->row_stride ? of->row_stride : dense;
    CPA_TRY(cpa_check_heads_of_rows(where, of, err));
    REQUIRE(err,
            !follow || of->head_stride == 0 || of->heads <= 1 || of->head_stride - of->dim >= row_stride ||
                row_stride >= (of->heads - 1) * of->head_stride + of->dim,
            "%s: %s is %lld and %s is %lld; expected heads of %d that do not overlap", where, of->row_name,
            (long long)of->row_stride, of->head_name, (long long)of->head_stride, of->dim);
    return CPA_OK;
}

cpa_status cpa_check_lse_strides(const char *where, int64_t rows, int32_t heads, int64_t row_stride,
                                 int64_t head_stride, cpa_error *err) {
    const int64_t bytes = sizeof(float);
    if (head_stride == 0) return cpa_check_rows(where, "lse_row_stride", rows, row_stride, heads, bytes, err);
    REQUIRE(err, row_stride == 0 || row_stride == 1,
            "%s: lse_row_stride is %lld and lse_head_stride is %lld; expected 0 or 1 for the first", where,
            (long long)row_stride, (long long)head_stride);
    const cpa_checked_heads of = {"lse_row_stride", "lse_head_stride", rows, 1, head_stride, bytes, heads, 1};
    return cpa_check_heads_of_rows(where, &of, err);
}

cpa_status cpa_check_state(const char *where, const cpa_partial *state, int64_t rows, int32_t heads, int32_t v_dim,
                           int64_t lse_head_stride, cpa_error *err) {
    const int64_t bytes = sizeof(float);
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*state), "%s: the reserved bytes of a partial state are not zero", where);
    CPA_TRY(cpa_check_aligned(where, "o", state->o, bytes, err));
    CPA_TRY(cpa_check_aligned(where, "lse", state->lse, bytes, err));
    CPA_TRY(cpa_check_rows(where, "o_row_stride", rows, state->o_row_stride, (int64_t)heads * v_dim, bytes, err));
    return cpa_check_lse_strides(where, rows, heads, state->lse_row_stride, lse_head_stride, err);
}

/* ---- shapes of caches ---- */

static cpa_status check_widths(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, s->v_in_k == 0 || s->v_in_k == 1, "%s: v_in_k is %d, expected 0 or 1", where, s->v_in_k);
    CPA_TRY(cpa_check_dim(where, "k_dim", s->k_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", s->v_dim, err));
    REQUIRE(err, !s->v_in_k || s->v_dim <= s->k_dim,
            "%s: v_in_k is 1, v_dim is %d and k_dim is %d; expected values within their keys", where, s->v_dim,
            s->k_dim);
    return CPA_OK;
}

/* Rows with tiles and a tail are those of latents. */
static cpa_status check_tiles(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    const cpa_row_traits *row = &cpa_dtype_traits_of(s->kv_dtype)->rows[CPA_KEYS];
    REQUIRE(err, !row->tile || s->v_in_k, "%s: kv_dtype is %s and v_in_k is 0, expected 1: it is one of latents", where,
            cpa_dtype_name(s->kv_dtype));
    REQUIRE(err, !row->tile || (s->k_dim > row->tail && (s->k_dim - row->tail) % row->tile == 0),
            "%s: k_dim is %d for a cache of %s, expected a multiple of %d and %d more", where, s->k_dim,
            cpa_dtype_name(s->kv_dtype), row->tile, row->tail);
    REQUIRE(err, !row->width || (s->k_dim == row->width && s->kv_heads == 1),
            "%s: k_dim is %d with %d KV heads for a cache of %s, expected %d and 1", where, s->k_dim, s->kv_heads,
            cpa_dtype_name(s->kv_dtype), row->width);
    return CPA_OK;
}

static cpa_status check_layout(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, s->layout == CPA_TOKEN_MAJOR || s->layout == CPA_HEAD_MAJOR || s->layout == CPA_VLLM_X,
            "%s: layout is %d, expected 0, 1 or 2", where, (int)s->layout);
    REQUIRE(err, s->layout != CPA_VLLM_X || !s->v_in_k,
            "%s: layout is %d with v_in_k, expected 0 or 1: values lie in rows of one piece", where, (int)s->layout);
    const int32_t x = cpa_kv_key_run(s->kv_dtype);
    REQUIRE(err, s->layout != CPA_VLLM_X || s->k_dim % x == 0,
            "%s: k_dim is %d, expected a multiple of %d in the layout of runs of 16 bytes", where, s->k_dim, x);
    return CPA_OK;
}

/* Scales of keys and of values go together and with the dtype of the cache, and values in keys have theirs: those of
 * heads, */
static cpa_status check_head_scales(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    const float *k_scales = s->k_scales, *v_scales = s->v_in_k && !s->v_scales ? k_scales : s->v_scales;
    if (!k_scales && !v_scales && s->n_scales == 0) return CPA_OK;
    REQUIRE(err, k_scales && v_scales, "%s: %s is NULL and %s is not, expected both or none", where,
            k_scales ? "v_scales" : "k_scales",
            k_scales   ? "k_scales"
            : v_scales ? "v_scales"
                       : "n_scales");
    REQUIRE(err, s->n_scales == 1 || s->n_scales == s->kv_heads, "%s: n_scales is %d, expected 1 or the %d KV heads",
            where, s->n_scales, s->kv_heads);
    REQUIRE(err, cpa_dtype_traits_of(s->kv_dtype)->tensor_scale && s->k_scale == 0,
            "%s: k_scales and v_scales are given for a cache of %s whose k_scale is %g, expected fp8_e4m3 or fp8_e5m2, "
            "and 0",
            where, cpa_dtype_name(s->kv_dtype), (double)s->k_scale);
    REQUIRE(err, !s->v_in_k || v_scales == k_scales, "%s: v_in_k is 1 and v_scales are other scales than k_scales",
            where);
    CPA_TRY(cpa_check_aligned(where, "k_scales", k_scales, sizeof *k_scales, err));
    return cpa_check_aligned(where, "v_scales", v_scales, sizeof *v_scales, err);
}

/* and those of whole tensors. */
static cpa_status check_scales(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    const float v_scale = s->v_in_k && s->v_scale == 0 ? s->k_scale : s->v_scale;
    const int none = s->k_scale == 0 && v_scale == 0;
    const int both = s->k_scale > 0 && v_scale > 0 && isfinite(s->k_scale) && isfinite(v_scale);
    REQUIRE(err, !s->v_in_k || v_scale == s->k_scale, "%s: v_in_k is 1, k_scale is %g and v_scale is %g, expected one",
            where, (double)s->k_scale, (double)v_scale);
    REQUIRE(err, none || (both && cpa_dtype_traits_of(s->kv_dtype)->tensor_scale),
            "%s: k_scale is %g and v_scale is %g for a cache of %s, expected none, or both above 0 for fp8_e4m3 and "
            "fp8_e5m2",
            where, (double)s->k_scale, (double)s->v_scale, cpa_dtype_name(s->kv_dtype));
    return CPA_OK;
}

/* Codes of CPA_TQ_ fill bytes, and a matrix of Hadamard has a power of two of columns; 32 lanes share a row. */
static cpa_status check_turboquant(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    const char *name = cpa_dtype_name(s->kv_dtype);
    const cpa_row_traits *keys = &cpa_dtype_traits_of(s->kv_dtype)->rows[CPA_KEYS];
    if (!cpa_dtype_is_turboquant(s->kv_dtype)) return CPA_OK;
    REQUIRE(err, !s->v_in_k && s->layout != CPA_VLLM_X,
            "%s: kv_dtype is %s with v_in_k %d and layout %d, expected 0 and rows of one piece", where, name, s->v_in_k,
            (int)s->layout);
    const int rotated = keys->element_bits < 8, power = (s->k_dim & (s->k_dim - 1)) == 0;
    if (s->k_dim % CPA_TQ_MULTIPLE || s->v_dim % CPA_TQ_MULTIPLE || s->k_dim > CPA_TQ_MOST_DIM ||
        s->v_dim > CPA_TQ_MOST_DIM || (rotated && !power))
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: k_dim is %d and v_dim is %d for a cache of %s, expected %s up to %d",
                        where, s->k_dim, s->v_dim, name,
                        rotated ? "a power of two from 32, and a multiple of 32" : "multiples of 32", CPA_TQ_MOST_DIM);
    return CPA_OK;
}

cpa_status cpa_check_cache_shape(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, s->kv_heads > 0 && s->kv_heads <= CPA_MOST_HEADS, "%s: kv_heads is %d, expected 1..%d", where,
            s->kv_heads, CPA_MOST_HEADS);
    CPA_TRY(check_widths(where, s, err));
    REQUIRE(err, cpa_dtype_traits_of(s->kv_dtype), "%s: kv_dtype is %d, which is none", where, (int)s->kv_dtype);
    CPA_TRY(check_tiles(where, s, err));
    CPA_TRY(check_turboquant(where, s, err));
    CPA_TRY(check_layout(where, s, err));
    CPA_TRY(check_head_scales(where, s, err));
    return check_scales(where, s, err);
}

cpa_cache_form cpa_cache_form_of(const char *name, const cpa_kv_view *kv) {
    return (cpa_cache_form){name, cpa_kv_view_shape(kv), kv->block_size};
}

cpa_status cpa_check_same_cache(const char *where, const cpa_cache_form *a, const cpa_cache_form *b, int widths_alone,
                                cpa_error *err) {
    const cpa_attention_shape *x = &a->shape, *y = &b->shape;
    const struct {
        const char *name;
        double a, b;
        int of_widths;
    } numbers[] = {
        {"block_size", a->block_size, b->block_size, 1},
        {"kv_heads", x->kv_heads, y->kv_heads, 1},
        {"k_dim", x->k_dim, y->k_dim, 1},
        {"v_dim", x->v_dim, y->v_dim, 1},
        {"v_in_k", x->v_in_k, y->v_in_k, 1},
        {"dtype", x->kv_dtype, y->kv_dtype, 0},
        {"k_scale", (double)x->k_scale, (double)y->k_scale, 0},
        {"v_scale", (double)(x->v_in_k ? x->k_scale : x->v_scale), (double)(y->v_in_k ? y->k_scale : y->v_scale), 0},
        {"n_scales", x->n_scales, y->n_scales, 0},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        REQUIRE(err, numbers[i].a == numbers[i].b || (widths_alone && !numbers[i].of_widths),
                "%s: %s has %s %g, but %s has %g", where, a->name, numbers[i].name, numbers[i].a, b->name,
                numbers[i].b);
    return CPA_OK;
}

/* ---- views ---- */

enum { BLOCK = 0, TOKEN, HEAD, STRIDES };

/* The keys or the values of a view. */
typedef struct view_side {
    const char *name;
    const void *pool;
    int32_t dim;
    int64_t strides[STRIDES];
} view_side;

static view_side side_of(const cpa_kv_view *kv, cpa_kv_part part) {
    return part == CPA_KEYS
               ? (view_side){"key", kv->k, kv->k_dim, {kv->k_block_stride, kv->k_token_stride, kv->k_head_stride}}
               : (view_side){"value", kv->v, kv->v_dim, {kv->v_block_stride, kv->v_token_stride, kv->v_head_stride}};
}

static cpa_status check_row_scales(const char *where, const cpa_kv_view *kv, cpa_kv_part part, const view_side *side,
                                   cpa_error *err) {
    const float scale = cpa_kv_tensor_scale(kv, part);
    const int64_t stride = side->strides[BLOCK];
    if (!cpa_kv_scale_bytes(kv->dtype, part, scale)) return CPA_OK;
    int64_t least = cpa_kv_block_bytes(kv->dtype, part, scale, kv->block_size, kv->kv_heads, side->dim);
    const int64_t multiple = cpa_dtype_has_tiles(kv->dtype) ? cpa_dtype_traits_of(kv->dtype)->block_multiple : 4;
    REQUIRE(err, stride == 0 || (stride >= least && stride % multiple == 0),
            "%s: a block stride is %lld, expected a multiple of %lld and at least %lld, scales included", where,
            (long long)stride, (long long)multiple, (long long)least);
    REQUIRE(err, (uintptr_t)side->pool % 4 == 0, "%s: the pool at %p is not a multiple of 4", where, side->pool);
    return CPA_OK;
}

/* Rows with scales of tiles hold them as floats, and bf16 behind; or have them right behind the last row of a block.
 * Those of CPA_TQ_ have fp16 behind their codes. */
static cpa_status check_tiled_rows(const char *where, const cpa_kv_view *kv, const view_side *resolved,
                                   cpa_error *err) {
    const cpa_row_traits *row = &cpa_dtype_traits_of(kv->dtype)->rows[CPA_KEYS];
    const int turboquant = cpa_dtype_is_turboquant(kv->dtype);
    const int64_t *strides = resolved->strides, bytes = turboquant ? 2 : row->width ? 16 : sizeof(float);
    const int64_t places = (int64_t)(uintptr_t)resolved->pool | strides[BLOCK] | strides[TOKEN] | strides[HEAD];
    REQUIRE(err, !(turboquant || cpa_dtype_has_tiles(kv->dtype)) || places % bytes == 0,
            "%s: the pool at %p has the strides %lld, %lld and %lld, expected multiples of %lld bytes for %s", where,
            resolved->pool, (long long)strides[BLOCK], (long long)strides[TOKEN], (long long)strides[HEAD],
            (long long)bytes, cpa_dtype_name(kv->dtype));
    const int64_t row_bytes = cpa_row_bytes(row, resolved->dim);
    REQUIRE(err, !row->width || strides[TOKEN] == row_bytes, "%s: a token stride is %lld, expected %lld for %s", where,
            (long long)strides[TOKEN], (long long)row_bytes, cpa_dtype_name(kv->dtype));
    return CPA_OK;
}

/* The strides of CPA_VLLM_X are its own; it is read and written 16 bytes at a time. */
static cpa_status check_runs(const char *where, const cpa_kv_view *kv, cpa_kv_part part, const view_side *side,
                             const int64_t *resolved, cpa_error *err) {
    const int keys = part == CPA_KEYS;
    const int64_t token = keys ? cpa_kv_key_run(kv->dtype) : 1, head = (int64_t)kv->block_size * side->dim;
    REQUIRE(err, (!side->strides[TOKEN] || side->strides[TOKEN] == token) && resolved[HEAD] == head,
            "%s: strides of %s tokens %lld and of heads %lld, expected 0 or %lld and %lld in the layout of runs of 16 "
            "bytes",
            where, side->name, (long long)side->strides[TOKEN], (long long)resolved[HEAD], (long long)token,
            (long long)head);
    REQUIRE(
        err, (uintptr_t)side->pool % 16 == 0 && (!keys || resolved[BLOCK] % token == 0),
        "%s: the %s pool at %p and its block stride of %lld, expected multiples of 16 bytes in the layout of runs of "
        "16 bytes",
        where, side->name, side->pool, (long long)resolved[BLOCK]);
    return CPA_OK;
}

static cpa_status check_side(const char *where, const cpa_kv_view *kv, cpa_kv_part part, cpa_error *err) {
    static const char *const names[2][STRIDES] = {{"k_block_stride", "k_token_stride", "k_head_stride"},
                                                  {"v_block_stride", "v_token_stride", "v_head_stride"}};
    const cpa_kv_view full = cpa_kv_view_resolve(*kv);
    const view_side side = side_of(kv, part), resolved = side_of(&full, part);
    const int64_t counts[STRIDES] = {kv->num_blocks, kv->block_size, kv->kv_heads};
    const int64_t element = cpa_dtype_bytes(kv->dtype);
    const int64_t row = cpa_kv_row_bytes(kv->dtype, part, side.dim) / element;
    int64_t elements = row;
    int within = 1;
    for (int i = 0; i < STRIDES; i++) {
        const int64_t least = i == TOKEN && kv->layout == CPA_VLLM_X ? 1 : row; /* check_runs knows which it is */
        CPA_TRY(check_stride(where, names[part][i], side.strides[i], least, err));
        within = within && add_extent(&elements, counts[i], resolved.strides[i]);
    }
    CPA_TRY(check_row_scales(where, kv, part, &side, err));
    CPA_TRY(check_tiled_rows(where, kv, &resolved, err));
    CPA_TRY(cpa_check_aligned(where, part == CPA_KEYS ? "the key pool" : "the value pool", side.pool, element, err));
    REQUIRE(err, within && elements <= CPA_MOST_BYTES / element,
            "%s: %lld blocks with the strides %lld, %lld and %lld reach beyond 2^60 bytes", where,
            (long long)kv->num_blocks, (long long)resolved.strides[BLOCK], (long long)resolved.strides[TOKEN],
            (long long)resolved.strides[HEAD]);
    return kv->layout == CPA_VLLM_X ? check_runs(where, kv, part, &side, resolved.strides, err) : CPA_OK;
}

cpa_status cpa_check_view(const char *where, const cpa_kv_view *kv, cpa_error *err) {
    const cpa_attention_shape shape = cpa_kv_view_shape(kv);
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*kv), "%s: the reserved bytes of the view are not zero", where);
    REQUIRE(err, kv->num_blocks >= 0, "%s: num_blocks is %lld, expected at least 0", where, (long long)kv->num_blocks);
    REQUIRE(err, kv->num_blocks == 0 || (kv->k && (kv->v || kv->v_in_k)), "%s: the %s pool is NULL", where,
            kv->k ? "value" : "key");
    CPA_TRY(cpa_check_block_size(where, kv->block_size, err));
    CPA_TRY(cpa_check_cache_shape(where, &shape, err));
    CPA_TRY(check_side(where, kv, CPA_KEYS, err));
    return kv->v_in_k ? CPA_OK : check_side(where, kv, CPA_VALUES, err);
}

cpa_status cpa_check_same_shape(const char *where, const cpa_kv_view *a, const cpa_kv_view *b, cpa_error *err) {
    const cpa_cache_form src = cpa_cache_form_of("src", a), dst = cpa_cache_form_of("dst", b);
    CPA_TRY(cpa_check_same_cache(where, &src, &dst, 0, err));
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
