/* The scales of weights in FP8, where they are loaded. */
#include <math.h>

#include <cpattn/experts.h>

#include "src/ops/nn_check.h"

cpa_status cpa_weight_scale_check(const char *name, int32_t outputs, int32_t inputs, const float *scales, int64_t rows,
                                  int64_t columns, cpa_error *err) {
    REQUIRE(err, name, "weight_scale_check: name is NULL");
    REQUIRE(err, outputs >= 1 && inputs >= 1, "%s: weights are [%d, %d], expected at least [1, 1]", name, outputs,
            inputs);
    CPA_TRY(cpa_nn_check_weight_scale(name, outputs, inputs, rows, columns, err));
    REQUIRE(err, scales, "%s: scales are NULL", name);
    for (int64_t i = 0; i < rows * columns; i++)
        REQUIRE(err, scales[i] > 0 && isfinite(scales[i]), "%s: scale [%lld, %lld] is %g, expected a number above 0",
                name, (long long)(i / columns), (long long)(i % columns), (double)scales[i]);
    return CPA_OK;
}
