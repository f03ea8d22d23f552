/* rmsnorm, with the sum of a residual. Squares are summed in fp64, and what a row is multiplied by is one fp64 number:
 * the result is the float64 one, rounded. */
#include <math.h>

#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"

/* Elements that are widened at a time. */
enum { CHUNK = 512 };

/* residual[0..n) += x[0..n), rounded. */
static void add_rounded(void *residual, const void *x, cpa_dtype dtype, int64_t n) {
    float sum[CHUNK], wide[CHUNK];
    cpa_widen(sum, residual, dtype, n);
    cpa_widen(wide, x, dtype, n);
    for (int64_t i = 0; i < n; i++) sum[i] += wide[i];
    cpa_narrow(residual, sum, dtype, n);
}

static void norm_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_rmsnorm_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), width = a->width;
    const char *x = (const char *)a->x + row * a->x_stride * bytes, *weight = a->weight;
    char *residual = a->residual ? (char *)a->residual + row * width * bytes : NULL;
    char *out = (char *)a->out + row * width * bytes;
    float wide[CHUNK], weights[CHUNK];
    double squares = 0;
    (void)thread;
    for (int64_t at = 0; at < width; at += CHUNK) {
        const int64_t n = cpa_min64(CHUNK, width - at);
        if (residual) add_rounded(residual + at * bytes, x + at * bytes, a->dtype, n);
        cpa_widen(wide, (residual ? residual : x) + at * bytes, a->dtype, n);
        for (int64_t i = 0; i < n; i++) squares += (double)wide[i] * (double)wide[i];
    }
    const double scale = 1 / sqrt(squares / (double)width + (double)a->eps), offset = (double)a->weight_offset;
    for (int64_t at = 0; at < width; at += CHUNK) {
        const int64_t n = cpa_min64(CHUNK, width - at);
        cpa_widen(wide, (residual ? residual : x) + at * bytes, a->dtype, n);
        cpa_widen(weights, weight + at * bytes, a->dtype, n);
        for (int64_t i = 0; i < n; i++) wide[i] = (float)((double)wide[i] * scale * ((double)weights[i] + offset));
        cpa_narrow(out + at * bytes, wide, a->dtype, n);
    }
}

cpa_status cpa_host_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream) {
    cpa_rmsnorm_args copy = *args;
    cpa_host_run(stream, args->rows, norm_row, &copy);
    return CPA_OK;
}
