/* Rotary positions: every argument is checked here and strides are filled in, then the table of the back end runs. */
#include "src/ops/nn_rope.h"

#include <math.h>

#include "base/struct_size.h"
#include "kernels/nn.h"
#include "src/ops/nn_check.h"

static int has_sections(const cpa_rope *rope) {
    return rope->sections[0] || rope->sections[1] || rope->sections[2];
}

static cpa_status check_sections(const char *where, const cpa_rope *rope, cpa_error *err) {
    const int32_t *s = rope->sections;
    const int64_t sum = (int64_t)s[0] + s[1] + s[2];
    CPA_TRY(cpa_nn_check_flag(where, "rope.sections_interleaved", rope->sections_interleaved, err));
    REQUIRE(err, has_sections(rope) || !rope->sections_interleaved,
            "%s: rope.sections_interleaved is 1, but there are no sections", where);
    REQUIRE(err, !has_sections(rope) || (s[0] >= 0 && s[1] >= 0 && s[2] >= 0 && sum == rope->dim / 2),
            "%s: rope.sections are %d, %d and %d, expected three counts that sum to half of rope.dim, %d", where, s[0],
            s[1], s[2], rope->dim / 2);
    return CPA_OK;
}

cpa_status cpa_nn_check_rope(const char *where, const cpa_rope *rope, const char *name, int32_t width, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*rope), "%s: the reserved bytes of rope are not zero", where);
    if (!rope->table) return CPA_OK;
    CPA_TRY(cpa_nn_check_count(where, "rope.max_position", rope->max_position, 1, CPA_MOST_TOKENS, err));
    REQUIRE(err, rope->dim >= 2 && rope->dim % 2 == 0 && rope->first >= 0 && rope->first <= width - rope->dim,
            "%s: rope.dim is %d and rope.first is %d, expected an even number of elements within %s, %d", where,
            rope->dim, rope->first, name, width);
    CPA_TRY(cpa_nn_check_flag(where, "rope.interleaved", rope->interleaved, err));
    CPA_TRY(cpa_nn_check_flag(where, "rope.inverse", rope->inverse, err));
    CPA_TRY(check_sections(where, rope, err));
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"rope.table", NULL, rope->table, NULL, rope->max_position, rope->dim, 4, 0}, err);
}

cpa_status cpa_nn_check_positions(const char *where, const cpa_rope *rope, const int64_t *positions, int64_t rows,
                                  cpa_error *err) {
    const int64_t streams = has_sections(rope) ? 3 : 1;
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"positions", NULL, positions, NULL, streams, rows, 8, !rope->table}, err);
}

/* ---- rotate ---- */

/* Heads of rows, whose strides are filled in. */
typedef struct heads {
    const char *name, *stride_name, *head_stride_name;
    const void *memory;
    int64_t *stride, *head_stride;
} heads;

static cpa_status check_heads(const char *where, const cpa_rotate_args *a, heads h, cpa_error *err) {
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    CPA_TRY(cpa_check_rows(where, h.head_stride_name, a->heads, *h.head_stride, a->dim, bytes, err));
    if (*h.head_stride == 0) *h.head_stride = a->dim;
    const int64_t width = (a->heads - 1) * *h.head_stride + a->dim;
    if (*h.stride == 0) *h.stride = a->heads * *h.head_stride;
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){h.name, h.stride_name, h.memory, h.stride, a->rows, width, bytes, 0}, err);
}

/* What is read and written, under the names that the caller gives them. */
static cpa_status check_both_heads(const char *where, const cpa_rotate_args *a, heads x, heads out, cpa_error *err) {
    CPA_TRY(check_heads(where, a, x, err));
    CPA_TRY(check_heads(where, a, out, err));
    if (a->rows == 0) return CPA_OK;
    REQUIRE(err, out.memory != x.memory || *out.head_stride == *x.head_stride,
            "%s: %s is %s, but its heads are %lld elements apart and those of %s %lld", where, out.name, x.name,
            (long long)*out.head_stride, x.name, (long long)*x.head_stride);
    return cpa_nn_check_in_place(where, x.memory, *x.stride, out.memory, *out.stride, err);
}

static cpa_status check_rotate(cpa_rotate_args *a, cpa_error *err) {
    const char *where = "rotate";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "heads", a->heads, 1, CPA_MOST_HEADS, err));
    CPA_TRY(cpa_check_dim(where, "dim", a->dim, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    REQUIRE(err, a->rope.table, "%s: rope.table is NULL", where);
    CPA_TRY(cpa_nn_check_rope(where, &a->rope, "dim", a->dim, err));
    CPA_TRY(cpa_nn_check_positions(where, &a->rope, a->positions, a->rows, err));
    return check_both_heads(
        where, a, (heads){"x", "x_stride", "x_head_stride", a->x, &a->x_stride, &a->x_head_stride},
        (heads){"out", "out_stride", "out_head_stride", a->out, &a->out_stride, &a->out_head_stride}, err);
}

cpa_status cpa_rotate(const cpa_rotate_args *given, cpa_stream *stream) {
    cpa_rotate_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("rotate", given, cpa_rotate_args, out, &args, &stream->error));
    CPA_TRY(check_rotate(&args, &stream->error));
    return args.rows ? stream->device->nn->rotate(&args, stream) : CPA_OK;
}

/* ---- qk_norm_rope ---- */

/* The cache of that shape that rows go to. */
static cpa_status check_pages(const char *where, const cpa_attention_shape *shape, const int64_t *slot_mapping,
                              const cpa_kv_view *kv, cpa_error *err) {
    const cpa_cache_form cache = cpa_cache_form_of("the cache", kv), rows = {"the shape", *shape, kv->block_size};
    if (!slot_mapping) return CPA_OK;
    CPA_TRY(cpa_check_aligned(where, "slot_mapping", slot_mapping, sizeof *slot_mapping, err));
    CPA_TRY(cpa_check_view(where, kv, err));
    REQUIRE(err, !cpa_dtype_is_turboquant(kv->dtype),
            "%s: the cache is of %s, expected another dtype: its rows are written by kv_write", where,
            cpa_dtype_name(kv->dtype));
    return cpa_check_same_cache(where, &cache, &rows, 1, err);
}

static cpa_status check_qk_norm_rope(cpa_qk_norm_rope_args *a, cpa_error *err) {
    const char *where = "qk_norm_rope";
    const cpa_attention_shape *s = &a->shape;
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "q_heads", s->q_heads, 0, CPA_MOST_HEADS, err));
    CPA_TRY(cpa_nn_check_count(where, "kv_heads", s->kv_heads, 0, CPA_MOST_HEADS, err));
    CPA_TRY(cpa_check_dim(where, "k_dim", s->k_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", s->v_dim, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", s->dtype, err));
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s) && s->v_in_k == 0,
            "%s: v_in_k or reserved bytes of the shape are set, expected zero", where);
    const int64_t bytes = cpa_dtype_bytes(s->dtype), rows = a->rows;
    const int64_t q = (int64_t)s->q_heads * s->k_dim, k = (int64_t)s->kv_heads * s->k_dim,
                  v = (int64_t)s->kv_heads * s->v_dim;
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"qkv", "qkv_stride", a->qkv, &a->qkv_stride, rows, q + k + v, bytes, 0}, err));
    CPA_TRY(
        cpa_nn_check_tensor(where, (cpa_nn_tensor){"q_weight", NULL, a->q_weight, NULL, 1, s->k_dim, bytes, 1}, err));
    CPA_TRY(
        cpa_nn_check_tensor(where, (cpa_nn_tensor){"k_weight", NULL, a->k_weight, NULL, 1, s->k_dim, bytes, 1}, err));
    CPA_TRY(cpa_nn_check_finite(where, "weight_offset", a->weight_offset, -INFINITY, err));
    CPA_TRY(cpa_nn_check_finite(where, "eps", a->eps, 0, err));
    CPA_TRY(cpa_nn_check_rope(where, &a->rope, "k_dim", s->k_dim, err));
    CPA_TRY(cpa_nn_check_positions(where, &a->rope, a->positions, rows, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"q", "q_stride", a->q, &a->q_stride, rows, q, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"k", "k_stride", a->k, &a->k_stride, rows, k, bytes, 1}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"v", "v_stride", a->v, &a->v_stride, rows, v, bytes, 1}, err));
    return s->kv_heads ? check_pages(where, s, a->slot_mapping, &a->kv, err) : CPA_OK;
}

cpa_status cpa_qk_norm_rope(const cpa_qk_norm_rope_args *given, cpa_stream *stream) {
    cpa_qk_norm_rope_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("qk_norm_rope", given, cpa_qk_norm_rope_args, kv, &args, &stream->error));
    CPA_TRY(check_qk_norm_rope(&args, &stream->error));
    return args.rows ? stream->device->nn->qk_norm_rope(&args, stream) : CPA_OK;
}

/* ---- latent_norm_rope ---- */

static cpa_status check_latent_shape(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, s->v_in_k == 1 && s->kv_heads == 1,
            "%s: the shape has v_in_k %d and %d KV heads, expected that of latents, with 1 of each", where, s->v_in_k,
            s->kv_heads);
    CPA_TRY(cpa_check_dim(where, "k_dim", s->k_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", s->v_dim, err));
    REQUIRE(err, s->v_dim < s->k_dim, "%s: v_dim is %d, expected less than k_dim, %d", where, s->v_dim, s->k_dim);
    CPA_TRY(cpa_check_dtype(where, "dtype", s->dtype, err));
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s), "%s: reserved bytes of the shape are set, expected zero", where);
    return CPA_OK;
}

static cpa_status check_queries(const char *where, cpa_latent_norm_rope_args *a, cpa_error *err) {
    const cpa_attention_shape *s = &a->shape;
    const cpa_rotate_args q = {.rows = a->rows, .heads = s->q_heads, .dim = s->k_dim - s->v_dim, .dtype = s->dtype};
    if (!a->q) return CPA_OK;
    CPA_TRY(cpa_nn_check_count(where, "q_heads", s->q_heads, 1, CPA_MOST_HEADS, err));
    return check_both_heads(
        where, &q, (heads){"q", "q_stride", "q_head_stride", a->q, &a->q_stride, &a->q_head_stride},
        (heads){"q_out", "q_out_stride", "q_out_head_stride", a->q_out, &a->q_out_stride, &a->q_out_head_stride}, err);
}

static cpa_status check_latent_norm_rope(cpa_latent_norm_rope_args *a, cpa_error *err) {
    const char *where = "latent_norm_rope";
    const cpa_attention_shape *s = &a->shape;
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_latent_shape(where, s, err));
    const int64_t bytes = cpa_dtype_bytes(s->dtype), rows = a->rows;
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"x", "x_stride", a->x, &a->x_stride, rows, s->k_dim, bytes, 0},
                                err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"weight", NULL, a->weight, NULL, 1, s->v_dim, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_finite(where, "weight_offset", a->weight_offset, -INFINITY, err));
    CPA_TRY(cpa_nn_check_finite(where, "eps", a->eps, 0, err));
    REQUIRE(err, a->rope.table, "%s: rope.table is NULL", where);
    CPA_TRY(cpa_nn_check_rope(where, &a->rope, "k_dim - v_dim", s->k_dim - s->v_dim, err));
    CPA_TRY(cpa_nn_check_positions(where, &a->rope, a->positions, rows, err));
    CPA_TRY(check_queries(where, a, err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"out", "out_stride", a->out, &a->out_stride, rows, s->k_dim, bytes, 1}, err));
    if (rows) CPA_TRY(cpa_nn_check_in_place(where, a->x, a->x_stride, a->out, a->out_stride, err));
    return check_pages(where, s, a->slot_mapping, &a->kv, err);
}

cpa_status cpa_latent_norm_rope(const cpa_latent_norm_rope_args *given, cpa_stream *stream) {
    cpa_latent_norm_rope_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("latent_norm_rope", given, cpa_latent_norm_rope_args, kv, &args, &stream->error));
    CPA_TRY(check_latent_norm_rope(&args, &stream->error));
    return args.rows ? stream->device->nn->latent_norm_rope(&args, stream) : CPA_OK;
}
