/* Norms of rows: every argument is checked here and strides are filled in, then the table of the back end runs. */
#include <math.h>

#include "base/struct_size.h"
#include "kernels/nn.h"
#include "src/ops/nn_check.h"

/* The numbers that norms have in common, and the bytes of a weight. */
static cpa_status check_numbers(const char *where, float offset, float eps, int32_t weight_is_f32, cpa_dtype dtype,
                                int64_t *weight_bytes, cpa_error *err) {
    CPA_TRY(cpa_nn_check_finite(where, "weight_offset", offset, -INFINITY, err));
    CPA_TRY(cpa_nn_check_finite(where, "eps", eps, 0, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", dtype, err));
    CPA_TRY(cpa_nn_check_flag(where, "weight_is_f32", weight_is_f32, err));
    *weight_bytes = cpa_dtype_bytes(weight_is_f32 ? CPA_F32 : dtype);
    return CPA_OK;
}

/* ---- rmsnorm ---- */

/* A pointer to fp32 that some codes need, and others have no use for. */
typedef struct numbers {
    const char *name;
    const float *memory;
    int64_t count;
    int needed, known; /* whether it must be there, and whether it may be */
} numbers;

static cpa_status check_numbers_of_codes(const char *where, numbers n, cpa_error *err) {
    REQUIRE(err, n.known || !n.memory, "%s: %s is given, but the codes have none", where, n.name);
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){n.name, NULL, n.memory, NULL, 1, n.count, sizeof(float), !n.needed}, err);
}

static cpa_status check_codes(const char *where, const cpa_rmsnorm_args *a, cpa_error *err) {
    REQUIRE(err, (uint32_t)a->codes < CPA_NORM_CODES_COUNT, "%s: codes is %d, expected 0..%d", where, (int)a->codes,
            CPA_NORM_CODES_COUNT - 1);
    const int by_group = a->codes == CPA_NORM_FP8_GROUP, is_static = a->codes == CPA_NORM_FP8_STATIC;
    const int of_tokens = a->codes == CPA_NORM_FP8_TOKEN || a->codes == CPA_NORM_INT8_TOKEN;
    REQUIRE(err, by_group ? a->group == 64 || a->group == 128 : a->group == 0, "%s: group is %d, expected %s", where,
            a->group, by_group ? "64 or 128" : "0 for codes that have no groups");
    CPA_TRY(cpa_nn_check_flag(where, "scales_pow2", a->scales_pow2, err));
    CPA_TRY(cpa_nn_check_flag(where, "scales_by_column", a->scales_by_column, err));
    REQUIRE(err, by_group || (!a->scales_pow2 && !a->scales_by_column),
            "%s: scales_pow2 or scales_by_column is set for codes that have no groups", where);
    const int64_t groups = by_group ? (a->width + a->group - 1) / a->group : 1;
    CPA_TRY(check_numbers_of_codes(where, (numbers){"static_scale", a->static_scale, 1, is_static, is_static}, err));
    CPA_TRY(check_numbers_of_codes(
        where, (numbers){"scale_bound", a->scale_bound, 1, 0, a->codes == CPA_NORM_FP8_TOKEN}, err));
    const int has_scales = by_group || of_tokens;
    CPA_TRY(check_numbers_of_codes(
        where, (numbers){"scales", a->scales, has_scales ? a->rows * groups : 1, has_scales, has_scales}, err));
    REQUIRE(err, a->codes != CPA_NORM_PLAIN || !a->nonfinite, "%s: nonfinite is given, but out has no codes", where);
    return CPA_OK;
}

static cpa_status check_rmsnorm(cpa_rmsnorm_args *a, cpa_error *err) {
    const char *where = "rmsnorm";
    int64_t weight_bytes = 0;
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_NN_MOST_WIDTH, err));
    CPA_TRY(check_numbers(where, a->weight_offset, a->eps, a->weight_is_f32, a->dtype, &weight_bytes, err));
    CPA_TRY(check_codes(where, a, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), rows = a->rows, width = a->width;
    const int64_t out_bytes = a->codes == CPA_NORM_PLAIN ? bytes : 1;
    CPA_TRY(
        cpa_nn_check_tensor(where, (cpa_nn_tensor){"x", "x_stride", a->x, &a->x_stride, rows, width, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"residual", "residual_stride", a->residual, &a->residual_stride, rows, width, bytes, 1},
        err));
    CPA_TRY(
        cpa_nn_check_tensor(where, (cpa_nn_tensor){"weight", NULL, a->weight, NULL, 1, width, weight_bytes, 0}, err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"out", "out_stride", a->out, &a->out_stride, rows, width, out_bytes, 0}, err));
    if (rows == 0) return CPA_OK;
    REQUIRE(err, a->out != a->residual, "rmsnorm: out is the residual");
    REQUIRE(err, a->out != a->x || a->codes == CPA_NORM_PLAIN, "rmsnorm: out is x, where codes cannot be written");
    return cpa_nn_check_in_place(where, a->x, a->x_stride, a->out, a->out_stride, err);
}

cpa_status cpa_rmsnorm(const cpa_rmsnorm_args *given, cpa_stream *stream) {
    cpa_rmsnorm_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("rmsnorm", given, cpa_rmsnorm_args, out, &args, &stream->error));
    CPA_TRY(check_rmsnorm(&args, &stream->error));
    return args.rows ? stream->device->nn->rmsnorm(&args, stream) : CPA_OK;
}

/* ---- rmsnorm2 ---- */

static cpa_status check_rmsnorm2(cpa_rmsnorm2_args *a, cpa_error *err) {
    const char *where = "rmsnorm2";
    int64_t weight_bytes = 0;
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_numbers(where, a->weight_offset, a->eps, a->weight_is_f32, a->dtype, &weight_bytes, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), rows = a->rows;
    for (int i = 0; i < 2; i++) {
        cpa_norm_rows *p = &a->parts[i];
        REQUIRE(err, CPA_RESERVED_IS_ZERO(*p), "%s: the reserved bytes of parts[%d] are not zero", where, i);
        CPA_TRY(
            cpa_nn_check_count(where, i ? "parts[1].width" : "parts[0].width", p->width, 1, CPA_NN_MOST_WIDTH, err));
        CPA_TRY(cpa_nn_check_tensor(
            where,
            (cpa_nn_tensor){i ? "parts[1].x" : "parts[0].x", i ? "parts[1].x_stride" : "parts[0].x_stride", p->x,
                            &p->x_stride, rows, p->width, bytes, 0},
            err));
        CPA_TRY(cpa_nn_check_tensor(where,
                                    (cpa_nn_tensor){i ? "parts[1].weight" : "parts[0].weight", NULL, p->weight, NULL, 1,
                                                    p->width, weight_bytes, 0},
                                    err));
        CPA_TRY(cpa_nn_check_tensor(
            where,
            (cpa_nn_tensor){i ? "parts[1].out" : "parts[0].out", i ? "parts[1].out_stride" : "parts[0].out_stride",
                            p->out, &p->out_stride, rows, p->width, bytes, 0},
            err));
        if (rows) CPA_TRY(cpa_nn_check_in_place(where, p->x, p->x_stride, p->out, p->out_stride, err));
    }
    return CPA_OK;
}

cpa_status cpa_rmsnorm2(const cpa_rmsnorm2_args *given, cpa_stream *stream) {
    cpa_rmsnorm2_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("rmsnorm2", given, cpa_rmsnorm2_args, parts, &args, &stream->error));
    CPA_TRY(check_rmsnorm2(&args, &stream->error));
    return args.rows ? stream->device->nn->rmsnorm2(&args, stream) : CPA_OK;
}
