#include "src/ops/nn_check.h"

#include <math.h>

cpa_status cpa_nn_check_count(const char *where, const char *name, int64_t count, int64_t least, int64_t most,
                              cpa_error *err) {
    REQUIRE(err, count >= least && count <= most, "%s: %s is %lld, expected %lld to %lld", where, name,
            (long long)count, (long long)least, (long long)most);
    return CPA_OK;
}

cpa_status cpa_nn_check_finite(const char *where, const char *name, float number, float least, cpa_error *err) {
    REQUIRE(err, number >= least && isfinite(number), "%s: %s is %g, expected a number of at least %g", where, name,
            (double)number, (double)least);
    return CPA_OK;
}

cpa_status cpa_nn_check_flag(const char *where, const char *name, int32_t flag, cpa_error *err) {
    REQUIRE(err, flag == 0 || flag == 1, "%s: %s is %d, expected 0 or 1", where, name, flag);
    return CPA_OK;
}

cpa_status cpa_nn_check_tensor(const char *where, cpa_nn_tensor t, cpa_error *err) {
    REQUIRE(err, t.memory || t.optional || t.rows * t.width == 0, "%s: %s is NULL", where, t.name);
    CPA_TRY(cpa_check_aligned(where, t.name, t.memory, t.element_bytes, err));
    const int64_t stride = t.stride ? *t.stride : 0;
    CPA_TRY(cpa_check_rows(where, t.stride ? t.stride_name : t.name, t.rows, stride, t.width, t.element_bytes, err));
    if (t.stride && stride == 0) *t.stride = t.width;
    return CPA_OK;
}

cpa_status cpa_nn_check_weight_scale(const char *where, int64_t outputs, int64_t inputs, int64_t rows, int64_t columns,
                                     cpa_error *err) {
    const int64_t block = 128, block_rows = (outputs + block - 1) / block, block_columns = (inputs + block - 1) / block;
    REQUIRE(err, (rows == outputs && columns == 1) || (rows == block_rows && columns == block_columns),
            "%s: scales are [%lld, %lld], expected [%lld, %lld] or [%lld, 1] for weights [%lld, %lld]", where,
            (long long)rows, (long long)columns, (long long)block_rows, (long long)block_columns, (long long)outputs,
            (long long)outputs, (long long)inputs);
    return CPA_OK;
}

cpa_status cpa_nn_check_in_place(const char *where, const void *x, int64_t x_stride, const void *out,
                                 int64_t out_stride, cpa_error *err) {
    REQUIRE(err, !out || out != x || out_stride == x_stride,
            "%s: out is x, but its rows are %lld elements apart and those of x %lld", where, (long long)out_stride,
            (long long)x_stride);
    return CPA_OK;
}
