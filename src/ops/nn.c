/* Norms, rotary positions, activations, embeddings and products: every argument is checked here and strides are filled
 * in, then the table of the back end runs. */
#include <math.h>

#include "base/struct_size.h"
#include "kernels/nn.h"
#include "src/ops/nn_check.h"

static cpa_status check_finite(const char *where, const char *name, float number, float least, cpa_error *err) {
    REQUIRE(err, number >= least && isfinite(number), "%s: %s is %g, expected a number of at least %g", where, name,
            (double)number, (double)least);
    return CPA_OK;
}

/* ---- rmsnorm ---- */

static cpa_status check_rmsnorm(cpa_rmsnorm_args *a, cpa_error *err) {
    const char *where = "rmsnorm";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), rows = a->rows, width = a->width;
    CPA_TRY(
        cpa_nn_check_tensor(where, (cpa_nn_tensor){"x", "x_stride", a->x, &a->x_stride, rows, width, bytes, 0}, err));
    CPA_TRY(
        cpa_nn_check_tensor(where, (cpa_nn_tensor){"residual", NULL, a->residual, NULL, rows, width, bytes, 1}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"weight", NULL, a->weight, NULL, 1, width, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"out", NULL, a->out, NULL, rows, width, bytes, 0}, err));
    REQUIRE(err, a->out != a->x || a->x_stride == width || rows == 0,
            "rmsnorm: out is x, whose x_stride is %lld; expected its width, %lld", (long long)a->x_stride,
            (long long)width);
    REQUIRE(err, a->out != a->residual || rows == 0, "rmsnorm: out is the residual");
    CPA_TRY(check_finite(where, "weight_offset", a->weight_offset, -INFINITY, err));
    return check_finite(where, "eps", a->eps, 0, err);
}

cpa_status cpa_rmsnorm(const cpa_rmsnorm_args *given, cpa_stream *stream) {
    cpa_rmsnorm_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("rmsnorm", given, cpa_rmsnorm_args, out, &args, &stream->error));
    CPA_TRY(check_rmsnorm(&args, &stream->error));
    return args.rows ? stream->device->nn->rmsnorm(&args, stream) : CPA_OK;
}

/* ---- qk_norm_rope ---- */

static cpa_status check_rope(const char *where, const cpa_rope *rope, int32_t k_dim, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*rope), "%s: the reserved bytes of rope are not zero", where);
    if (!rope->table) return CPA_OK;
    CPA_TRY(cpa_nn_check_count(where, "rope.max_position", rope->max_position, 1, CPA_MOST_TOKENS, err));
    REQUIRE(err, rope->dim >= 2 && rope->dim % 2 == 0 && rope->first >= 0 && rope->first <= k_dim - rope->dim,
            "%s: rope.dim is %d and rope.first is %d, expected an even number of elements within k_dim, %d", where,
            rope->dim, rope->first, k_dim);
    REQUIRE(err, rope->interleaved == 0 || rope->interleaved == 1, "%s: rope.interleaved is %d, expected 0 or 1", where,
            rope->interleaved);
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"rope.table", NULL, rope->table, NULL, rope->max_position, rope->dim, 4, 0}, err);
}

/* The cache that keys and values go to. */
static cpa_status check_pages(const char *where, const cpa_qk_norm_rope_args *a, cpa_error *err) {
    const cpa_kv_view *kv = &a->kv;
    const cpa_cache_form cache = cpa_cache_form_of("the cache", kv), rows = {"the shape", a->shape, kv->block_size};
    if (!a->slot_mapping || a->shape.kv_heads == 0) return CPA_OK;
    CPA_TRY(cpa_check_aligned(where, "slot_mapping", a->slot_mapping, sizeof *a->slot_mapping, err));
    CPA_TRY(cpa_check_view(where, kv, err));
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
    CPA_TRY(check_finite(where, "weight_offset", a->weight_offset, -INFINITY, err));
    CPA_TRY(check_finite(where, "eps", a->eps, 0, err));
    CPA_TRY(check_rope(where, &a->rope, s->k_dim, err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"positions", NULL, a->positions, NULL, rows, 1, 8, !a->rope.table}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"q", "q_stride", a->q, &a->q_stride, rows, q, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"k", "k_stride", a->k, &a->k_stride, rows, k, bytes, 1}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"v", "v_stride", a->v, &a->v_stride, rows, v, bytes, 1}, err));
    return check_pages(where, a, err);
}

cpa_status cpa_qk_norm_rope(const cpa_qk_norm_rope_args *given, cpa_stream *stream) {
    cpa_qk_norm_rope_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("qk_norm_rope", given, cpa_qk_norm_rope_args, kv, &args, &stream->error));
    CPA_TRY(check_qk_norm_rope(&args, &stream->error));
    return args.rows ? stream->device->nn->qk_norm_rope(&args, stream) : CPA_OK;
}

/* ---- swiglu, embed ---- */

static cpa_status check_swiglu(const cpa_swiglu_args *a, cpa_error *err) {
    const char *where = "swiglu";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), width = a->width;
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"gate_up", NULL, a->gate_up, NULL, a->rows, 2 * width, bytes, 0},
                                err));
    return cpa_nn_check_tensor(where, (cpa_nn_tensor){"out", NULL, a->out, NULL, a->rows, width, bytes, 0}, err);
}

cpa_status cpa_swiglu(const cpa_swiglu_args *given, cpa_stream *stream) {
    cpa_swiglu_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("swiglu", given, cpa_swiglu_args, out, &args, &stream->error));
    CPA_TRY(check_swiglu(&args, &stream->error));
    return args.rows ? stream->device->nn->swiglu(&args, stream) : CPA_OK;
}

static cpa_status check_embed(const cpa_embed_args *a, cpa_error *err) {
    const char *where = "embed";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_nn_check_count(where, "vocabulary", a->vocabulary, 1, UINT32_MAX, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), width = a->width;
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"table", NULL, a->table, NULL, a->vocabulary, width, bytes, 0},
                                err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"tokens", NULL, a->tokens, NULL, a->rows, 1, sizeof *a->tokens, 0}, err));
    return cpa_nn_check_tensor(where, (cpa_nn_tensor){"out", NULL, a->out, NULL, a->rows, width, bytes, 0}, err);
}

cpa_status cpa_embed(const cpa_embed_args *given, cpa_stream *stream) {
    cpa_embed_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("embed", given, cpa_embed_args, out, &args, &stream->error));
    CPA_TRY(check_embed(&args, &stream->error));
    return args.rows ? stream->device->nn->embed(&args, stream) : CPA_OK;
}

/* ---- linear ---- */

static cpa_status check_linear(cpa_linear_args *a, cpa_error *err) {
    const char *where = "linear";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "inputs", a->inputs, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_nn_check_count(where, "outputs", a->outputs, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    REQUIRE(err, a->out_dtype == a->dtype || a->out_dtype == CPA_F32, "linear: out_dtype is %d, expected %s or fp32",
            (int)a->out_dtype, cpa_dtype_name(a->dtype));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), out_bytes = cpa_dtype_bytes(a->out_dtype), rows = a->rows;
    const int64_t weight_bytes = a->weight_scale ? 1 : bytes, in = a->inputs, out = a->outputs;
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"x", "x_stride", a->x, &a->x_stride, rows, in, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"weight", "weight_stride", a->weight, &a->weight_stride, out, in, weight_bytes, 0},
        err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"bias", NULL, a->bias, NULL, 1, out, bytes, 1}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"weight_scale", NULL, a->weight_scale, NULL, 1, 1, 4, 1}, err));
    if (a->weight_scale)
        CPA_TRY(cpa_nn_check_weight_scale(where, out, in, a->weight_scale_rows, a->weight_scale_columns, err));
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"out", "out_stride", a->out, &a->out_stride, rows, out, out_bytes, 0}, err);
}

cpa_status cpa_linear(const cpa_linear_args *given, cpa_stream *stream) {
    cpa_linear_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("linear", given, cpa_linear_args, out, &args, &stream->error));
    CPA_TRY(check_linear(&args, &stream->error));
    return args.rows ? stream->device->nn->linear(&args, stream) : CPA_OK;
}
