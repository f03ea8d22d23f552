/* Activations, embeddings and products: every argument is checked here and strides are filled in, then the table of the
 * back end runs. */
#include "kernels/nn.h"
#include "base/struct_size.h"
#include "src/ops/nn_check.h"

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

/* Products of a batch may interleave, as heads of rows do, so that any stride is one. */
static cpa_status check_batch(const cpa_linear_args *a, cpa_error *err) {
    enum { MOST_BATCH = 65535 }; /* blocks of a grid's last dimension */
    CPA_TRY(cpa_nn_check_count("linear", "batch", a->batch, 0, MOST_BATCH, err));
    REQUIRE(err, a->batch <= 1 || !a->weight_scale, "linear: weight_scale is %p with a batch of %d, expected NULL",
            (const void *)a->weight_scale, a->batch);
    REQUIRE(err, a->batch <= 1 || !a->bias, "linear: bias is %p with a batch of %d, expected NULL", a->bias, a->batch);
    REQUIRE(err, a->x_batch_stride >= 0 && a->weight_batch_stride >= 0 && a->out_batch_stride >= (a->batch > 1),
            "linear: batch strides are %lld, %lld and %lld, expected none below 0, and above 0 that of out",
            (long long)a->x_batch_stride, (long long)a->weight_batch_stride, (long long)a->out_batch_stride);
    return CPA_OK;
}

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
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"out", "out_stride", a->out, &a->out_stride, rows, out, out_bytes, 0}, err));
    return check_batch(a, err);
}

cpa_status cpa_linear(const cpa_linear_args *given, cpa_stream *stream) {
    cpa_linear_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("linear", given, cpa_linear_args, out, &args, &stream->error));
    CPA_TRY(check_linear(&args, &stream->error));
    return args.rows ? stream->device->nn->linear(&args, stream) : CPA_OK;
}
