/* The operators beside attention: every argument is checked here and strides are filled in, then the table of the back
 * end runs. */
#include <math.h>

#include "base/struct_size.h"
#include "kernels/draw.h"
#include "kernels/nn.h"
#include "src/ops/check_args.h"

/* Elements of a row. */
enum { MOST_WIDTH = 1 << 24 };

static cpa_status check_count(const char *where, const char *name, int64_t count, int64_t least, int64_t most,
                              cpa_error *err) {
    REQUIRE(err, count >= least && count <= most, "%s: %s is %lld, expected %lld to %lld", where, name,
            (long long)count, (long long)least, (long long)most);
    return CPA_OK;
}

/* A tensor of rows, which may be NULL where it is optional or has no elements. */
typedef struct tensor {
    const char *name, *stride_name;
    const void *memory;
    int64_t *stride; /* NULL: contiguous; 0 becomes the width */
    int64_t rows, width, element_bytes;
    int optional;
} tensor;

static cpa_status check_tensor(const char *where, tensor t, cpa_error *err) {
    REQUIRE(err, t.memory || t.optional || t.rows * t.width == 0, "%s: %s is NULL", where, t.name);
    CPA_TRY(cpa_check_aligned(where, t.name, t.memory, t.element_bytes, err));
    const int64_t stride = t.stride ? *t.stride : 0;
    CPA_TRY(cpa_check_rows(where, t.stride ? t.stride_name : t.name, t.rows, stride, t.width, t.element_bytes, err));
    if (t.stride && stride == 0) *t.stride = t.width;
    return CPA_OK;
}

static cpa_status check_finite(const char *where, const char *name, float number, float least, cpa_error *err) {
    REQUIRE(err, number >= least && isfinite(number), "%s: %s is %g, expected a number of at least %g", where, name,
            (double)number, (double)least);
    return CPA_OK;
}

/* ---- rmsnorm ---- */

static cpa_status check_rmsnorm(cpa_rmsnorm_args *a, cpa_error *err) {
    const char *where = "rmsnorm";
    CPA_TRY(check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_count(where, "width", a->width, 1, MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), rows = a->rows, width = a->width;
    CPA_TRY(check_tensor(where, (tensor){"x", "x_stride", a->x, &a->x_stride, rows, width, bytes, 0}, err));
    CPA_TRY(check_tensor(where, (tensor){"residual", NULL, a->residual, NULL, rows, width, bytes, 1}, err));
    CPA_TRY(check_tensor(where, (tensor){"weight", NULL, a->weight, NULL, 1, width, bytes, 0}, err));
    CPA_TRY(check_tensor(where, (tensor){"out", NULL, a->out, NULL, rows, width, bytes, 0}, err));
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
    CPA_TRY(check_count(where, "rope.max_position", rope->max_position, 1, CPA_MOST_TOKENS, err));
    REQUIRE(err, rope->dim >= 2 && rope->dim % 2 == 0 && rope->first >= 0 && rope->first <= k_dim - rope->dim,
            "%s: rope.dim is %d and rope.first is %d, expected an even number of elements within k_dim, %d", where,
            rope->dim, rope->first, k_dim);
    REQUIRE(err, rope->interleaved == 0 || rope->interleaved == 1, "%s: rope.interleaved is %d, expected 0 or 1", where,
            rope->interleaved);
    return check_tensor(where, (tensor){"rope.table", NULL, rope->table, NULL, rope->max_position, rope->dim, 4, 0},
                        err);
}

/* The cache that keys and values go to. */
static cpa_status check_pages(const char *where, const cpa_qk_norm_rope_args *a, cpa_error *err) {
    const cpa_attention_shape *s = &a->shape;
    const cpa_kv_view *kv = &a->kv;
    if (!a->slot_mapping || s->kv_heads == 0) return CPA_OK;
    CPA_TRY(cpa_check_aligned(where, "slot_mapping", a->slot_mapping, sizeof *a->slot_mapping, err));
    CPA_TRY(cpa_check_view(where, kv, err));
    REQUIRE(err, kv->kv_heads == s->kv_heads && kv->k_dim == s->k_dim && kv->v_dim == s->v_dim,
            "%s: the cache has kv_heads %d, k_dim %d, v_dim %d, but the shape has %d, %d, %d", where, kv->kv_heads,
            kv->k_dim, kv->v_dim, s->kv_heads, s->k_dim, s->v_dim);
    return CPA_OK;
}

static cpa_status check_qk_norm_rope(cpa_qk_norm_rope_args *a, cpa_error *err) {
    const char *where = "qk_norm_rope";
    const cpa_attention_shape *s = &a->shape;
    CPA_TRY(check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_count(where, "q_heads", s->q_heads, 0, CPA_MOST_HEADS, err));
    CPA_TRY(check_count(where, "kv_heads", s->kv_heads, 0, CPA_MOST_HEADS, err));
    CPA_TRY(cpa_check_dim(where, "k_dim", s->k_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", s->v_dim, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", s->dtype, err));
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s) && s->v_in_k == 0,
            "%s: v_in_k or reserved bytes of the shape are set, expected zero", where);
    const int64_t bytes = cpa_dtype_bytes(s->dtype), rows = a->rows;
    const int64_t q = (int64_t)s->q_heads * s->k_dim, k = (int64_t)s->kv_heads * s->k_dim,
                  v = (int64_t)s->kv_heads * s->v_dim;
    CPA_TRY(check_tensor(where, (tensor){"qkv", "qkv_stride", a->qkv, &a->qkv_stride, rows, q + k + v, bytes, 0}, err));
    CPA_TRY(check_tensor(where, (tensor){"q_weight", NULL, a->q_weight, NULL, 1, s->k_dim, bytes, 1}, err));
    CPA_TRY(check_tensor(where, (tensor){"k_weight", NULL, a->k_weight, NULL, 1, s->k_dim, bytes, 1}, err));
    CPA_TRY(check_finite(where, "weight_offset", a->weight_offset, -INFINITY, err));
    CPA_TRY(check_finite(where, "eps", a->eps, 0, err));
    CPA_TRY(check_rope(where, &a->rope, s->k_dim, err));
    CPA_TRY(check_tensor(where, (tensor){"positions", NULL, a->positions, NULL, rows, 1, 8, !a->rope.table}, err));
    CPA_TRY(check_tensor(where, (tensor){"q", "q_stride", a->q, &a->q_stride, rows, q, bytes, 0}, err));
    CPA_TRY(check_tensor(where, (tensor){"k", "k_stride", a->k, &a->k_stride, rows, k, bytes, 1}, err));
    CPA_TRY(check_tensor(where, (tensor){"v", "v_stride", a->v, &a->v_stride, rows, v, bytes, 1}, err));
    return check_pages(where, a, err);
}

cpa_status cpa_qk_norm_rope(const cpa_qk_norm_rope_args *given, cpa_stream *stream) {
    cpa_qk_norm_rope_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("qk_norm_rope", given, cpa_qk_norm_rope_args, q, &args, &stream->error));
    CPA_TRY(check_qk_norm_rope(&args, &stream->error));
    return args.rows ? stream->device->nn->qk_norm_rope(&args, stream) : CPA_OK;
}

/* ---- swiglu, embed ---- */

static cpa_status check_swiglu(const cpa_swiglu_args *a, cpa_error *err) {
    const char *where = "swiglu";
    CPA_TRY(check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_count(where, "width", a->width, 1, MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), width = a->width;
    CPA_TRY(check_tensor(where, (tensor){"gate_up", NULL, a->gate_up, NULL, a->rows, 2 * width, bytes, 0}, err));
    return check_tensor(where, (tensor){"out", NULL, a->out, NULL, a->rows, width, bytes, 0}, err);
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
    CPA_TRY(check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_count(where, "width", a->width, 1, MOST_WIDTH, err));
    CPA_TRY(check_count(where, "vocabulary", a->vocabulary, 1, UINT32_MAX, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), width = a->width;
    CPA_TRY(check_tensor(where, (tensor){"table", NULL, a->table, NULL, a->vocabulary, width, bytes, 0}, err));
    CPA_TRY(check_tensor(where, (tensor){"tokens", NULL, a->tokens, NULL, a->rows, 1, sizeof *a->tokens, 0}, err));
    return check_tensor(where, (tensor){"out", NULL, a->out, NULL, a->rows, width, bytes, 0}, err);
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
    CPA_TRY(check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_count(where, "inputs", a->inputs, 1, MOST_WIDTH, err));
    CPA_TRY(check_count(where, "outputs", a->outputs, 1, MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    REQUIRE(err, a->out_dtype == a->dtype || a->out_dtype == CPA_F32, "linear: out_dtype is %d, expected %s or fp32",
            (int)a->out_dtype, cpa_dtype_name(a->dtype));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), out_bytes = cpa_dtype_bytes(a->out_dtype), rows = a->rows;
    const int64_t in = a->inputs, out = a->outputs;
    CPA_TRY(check_tensor(where, (tensor){"x", "x_stride", a->x, &a->x_stride, rows, in, bytes, 0}, err));
    CPA_TRY(
        check_tensor(where, (tensor){"weight", "weight_stride", a->weight, &a->weight_stride, out, in, bytes, 0}, err));
    CPA_TRY(check_tensor(where, (tensor){"bias", NULL, a->bias, NULL, 1, out, bytes, 1}, err));
    return check_tensor(where, (tensor){"out", "out_stride", a->out, &a->out_stride, rows, out, out_bytes, 0}, err);
}

cpa_status cpa_linear(const cpa_linear_args *given, cpa_stream *stream) {
    cpa_linear_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("linear", given, cpa_linear_args, out, &args, &stream->error));
    CPA_TRY(check_linear(&args, &stream->error));
    return args.rows ? stream->device->nn->linear(&args, stream) : CPA_OK;
}

/* ---- sample ---- */

static cpa_status check_sample(cpa_sample_args *a, cpa_error *err) {
    const char *where = "sample";
    CPA_TRY(check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_count(where, "vocabulary", a->vocabulary, 1, CPA_DRAW_MOST_TOKENS, err));
    const int64_t rows = a->rows, words = (a->vocabulary + 31) / 32;
    const int penalties = a->in_prompt || a->in_output;
    const tensor tensors[] = {
        {"logits", "logits_stride", a->logits, &a->logits_stride, rows, a->vocabulary, 4, 0},
        {"temperature", NULL, a->temperature, NULL, rows, 1, 4, 1},
        {"top_k", NULL, a->top_k, NULL, rows, 1, 4, 1},
        {"top_p", NULL, a->top_p, NULL, rows, 1, 4, 1},
        {"min_p", NULL, a->min_p, NULL, rows, 1, 4, 1},
        {"repetition", NULL, a->repetition, NULL, rows, 1, 4, 1},
        {"presence", NULL, a->presence, NULL, rows, 1, 4, 1},
        {"seed", NULL, a->seed, NULL, rows, 1, 8, 1},
        {"position", NULL, a->position, NULL, rows, 1, 8, 1},
        {"given", NULL, a->given, NULL, rows, 1, 8, 1},
        {"in_prompt", NULL, a->in_prompt, NULL, a->sequences, words, 4, 1},
        {"in_output", NULL, a->in_output, NULL, a->sequences, words, 4, 1},
        {"sequence", NULL, a->sequence, NULL, rows, 1, 4, !penalties},
        {"tokens", NULL, a->tokens, NULL, rows, 1, 4, 0},
        {"logprobs", NULL, a->logprobs, NULL, rows, 1, 4, 1},
    };
    CPA_TRY(check_count(where, "sequences", a->sequences, 0, CPA_MOST_TOKENS, err));
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_sample(const cpa_sample_args *given, cpa_stream *stream) {
    cpa_sample_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("sample", given, cpa_sample_args, tokens, &args, &stream->error));
    CPA_TRY(check_sample(&args, &stream->error));
    return args.rows ? stream->device->nn->sample(&args, stream) : CPA_OK;
}
