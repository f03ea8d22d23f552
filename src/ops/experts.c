/* Operators of mixtures of experts: every argument is checked here and strides are filled in, then the table of the back
 * end runs. */
#include <math.h>

#include "base/struct_size.h"
#include "kernels/nn.h"
#include "src/ops/nn_check.h"

/* ---- expert_route ---- */

static cpa_status check_groups(cpa_expert_route_args *a, cpa_error *err) {
    REQUIRE(err, (int)a->group_scores >= 0 && a->group_scores < CPA_GROUP_SCORES_COUNT,
            "expert_route: group_scores is %d, expected 0 to %d", (int)a->group_scores, CPA_GROUP_SCORES_COUNT - 1);
    if (a->n_group == 0 && a->topk_group == 0) a->n_group = a->topk_group = 1;
    REQUIRE(err, a->n_group >= 1 && a->experts % a->n_group == 0,
            "expert_route: n_group is %d, expected a number that divides experts, %d", a->n_group, a->experts);
    REQUIRE(err, a->topk_group >= 1 && a->topk_group <= a->n_group,
            "expert_route: topk_group is %d, expected 1 to n_group, %d", a->topk_group, a->n_group);
    const int32_t taking_part = a->experts / a->n_group * a->topk_group;
    REQUIRE(err, a->top_k <= taking_part, "expert_route: top_k is %d, expected at most the %d experts of %d groups",
            a->top_k, taking_part, a->topk_group);
    return CPA_OK;
}

static cpa_status check_route(cpa_expert_route_args *a, cpa_error *err) {
    const char *where = "expert_route";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "experts", a->experts, 1, CPA_MOST_EXPERTS, err));
    CPA_TRY(cpa_nn_check_count(where, "top_k", a->top_k, 1, CPA_MOST_TOP_K, err));
    REQUIRE(err, a->top_k <= a->experts, "expert_route: top_k is %d, expected at most experts, %d", a->top_k,
            a->experts);
    REQUIRE(err, (int)a->scores >= 0 && a->scores < CPA_EXPERT_SCORES_COUNT,
            "expert_route: scores is %d, expected 0 to %d", (int)a->scores, CPA_EXPERT_SCORES_COUNT - 1);
    CPA_TRY(check_groups(a, err));
    REQUIRE(err, a->normalise == 0 || a->normalise == 1, "expert_route: normalise is %d, expected 0 or 1",
            a->normalise);
    REQUIRE(err, a->scale > 0 && isfinite(a->scale), "expert_route: scale is %g, expected a number above 0",
            (double)a->scale);
    const cpa_nn_tensor tensors[] = {
        {"logits", "logits_stride", a->logits, &a->logits_stride, a->rows, a->experts, 4, 0},
        {"bias", NULL, a->bias, NULL, 1, a->experts, 4, 1},
        {"ids", NULL, a->ids, NULL, a->rows, a->top_k, 4, 0},
        {"weights", NULL, a->weights, NULL, a->rows, a->top_k, 4, 0},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_expert_route(const cpa_expert_route_args *given, cpa_stream *stream) {
    cpa_expert_route_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("expert_route", given, cpa_expert_route_args, weights, &args, &stream->error));
    CPA_TRY(check_route(&args, &stream->error));
    return args.rows ? stream->device->nn->expert_route(&args, stream) : CPA_OK;
}

/* ---- expert_permute ---- */

static cpa_status check_permute(const cpa_expert_permute_args *a, cpa_error *err) {
    const char *where = "expert_permute";
    CPA_TRY(cpa_nn_check_count(where, "top_k", a->top_k, 1, CPA_MOST_TOP_K, err));
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, INT32_MAX / a->top_k, err));
    CPA_TRY(cpa_nn_check_count(where, "experts", a->experts, 1, CPA_MOST_EXPERTS, err));
    CPA_TRY(cpa_nn_check_count(where, "first_expert", a->first_expert, 0, CPA_MOST_EXPERTS, err));
    const cpa_nn_tensor tensors[] = {
        {"ids", NULL, a->ids, NULL, a->rows, a->top_k, 4, 0},
        {"offsets", NULL, a->offsets, NULL, 1, a->experts + 1, 4, 0},
        {"tokens", NULL, a->tokens, NULL, a->rows, a->top_k, 4, 0},
        {"places", NULL, a->places, NULL, a->rows, a->top_k, 4, 0},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_expert_permute(const cpa_expert_permute_args *given, cpa_stream *stream) {
    cpa_expert_permute_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("expert_permute", given, cpa_expert_permute_args, places, &args, &stream->error));
    CPA_TRY(check_permute(&args, &stream->error));
    return stream->device->nn->expert_permute(&args, stream);
}

/* ---- expert_linear ---- */

static cpa_status check_expert_linear(cpa_expert_linear_args *a, cpa_error *err) {
    const char *where = "expert_linear";
    CPA_TRY(cpa_nn_check_count(where, "experts", a->experts, 1, CPA_MOST_EXPERTS, err));
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "x_rows", a->x_rows, 0, UINT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "inputs", a->inputs, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_nn_check_count(where, "outputs", a->outputs, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    REQUIRE(err, a->out_dtype == a->dtype || a->out_dtype == CPA_F32,
            "expert_linear: out_dtype is %d, expected %s or fp32", (int)a->out_dtype, cpa_dtype_name(a->dtype));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), out_bytes = cpa_dtype_bytes(a->out_dtype);
    const int64_t weight_bytes = a->weight_scale ? 1 : bytes, in = a->inputs, out = a->outputs;
    const cpa_nn_tensor weight = {"weight", "weight_stride", a->weight, &a->weight_stride, out, in, weight_bytes, 0};
    CPA_TRY(cpa_nn_check_tensor(where, weight, err));
    const int64_t matrix = (out - 1) * a->weight_stride + in;
    if (a->expert_stride == 0) a->expert_stride = out * a->weight_stride;
    const cpa_nn_tensor tensors[] = {
        {"offsets", NULL, a->offsets, NULL, 1, a->experts + 1, 4, 0},
        {"x", "x_stride", a->x, &a->x_stride, a->x_rows, in, bytes, 0},
        {"weight", "expert_stride", a->weight, &a->expert_stride, a->experts, matrix, weight_bytes, 0},
        {"out", "out_stride", a->out, &a->out_stride, a->rows, out, out_bytes, 0},
        {"tokens", NULL, a->tokens, NULL, a->rows, 1, 4, 1},
        {"weight_scale", NULL, a->weight_scale, NULL, a->experts, 1, 4, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    if (!a->weight_scale) return CPA_OK;
    return cpa_nn_check_weight_scale(where, out, in, a->weight_scale_rows, a->weight_scale_columns, err);
}

cpa_status cpa_expert_linear(const cpa_expert_linear_args *given, cpa_stream *stream) {
    cpa_expert_linear_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("expert_linear", given, cpa_expert_linear_args, out, &args, &stream->error));
    CPA_TRY(check_expert_linear(&args, &stream->error));
    return args.rows ? stream->device->nn->expert_linear(&args, stream) : CPA_OK;
}

/* ---- expert_combine ---- */

static cpa_status check_combine(cpa_expert_combine_args *a, cpa_error *err) {
    const char *where = "expert_combine";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "top_k", a->top_k, 1, CPA_MOST_TOP_K, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(cpa_nn_check_count(where, "y_rows", a->y_rows, 0, INT32_MAX, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    CPA_TRY(cpa_check_dtype(where, "y_dtype", a->y_dtype, err));
    REQUIRE(err, a->y_dtype == a->dtype || a->y_dtype == CPA_F32 || a->dtype == CPA_F32,
            "expert_combine: y_dtype is %d, expected %s or fp32", (int)a->y_dtype, cpa_dtype_name(a->dtype));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), y_bytes = cpa_dtype_bytes(a->y_dtype);
    const cpa_nn_tensor tensors[] = {
        {"y", "y_stride", a->y, &a->y_stride, a->y_rows, a->width, y_bytes, 0},
        {"places", NULL, a->places, NULL, a->rows, a->top_k, 4, 0},
        {"weights", NULL, a->weights, NULL, a->rows, a->top_k, 4, 0},
        {"out", NULL, a->out, NULL, a->rows, a->width, bytes, 0},
        {"shared", NULL, a->shared, NULL, a->rows, a->width, bytes, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_expert_combine(const cpa_expert_combine_args *given, cpa_stream *stream) {
    cpa_expert_combine_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("expert_combine", given, cpa_expert_combine_args, out, &args, &stream->error));
    CPA_TRY(check_combine(&args, &stream->error));
    return args.rows ? stream->device->nn->expert_combine(&args, stream) : CPA_OK;
}
