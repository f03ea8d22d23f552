/* join_columns and sum_parts: what ranks have computed parts of. */
#include "base/convert.h"
#include "kernels/host/device/host.h"

cpa_status cpa_host_join_columns(const cpa_join_columns_args *args, cpa_stream *stream) {
    const int64_t row_bytes = args->begins[args->n_parts];
    (void)stream;
    for (int32_t p = 0; p < args->n_parts; p++) {
        const int64_t begin = args->begins[p], bytes = args->begins[p + 1] - begin;
        for (int64_t row = 0; row < args->rows && bytes > 0; row++) {
            memcpy((char *)args->out + row * row_bytes + begin, (const char *)args->parts[p] + row * bytes,
                   (size_t)bytes);
        }
    }
    return CPA_OK;
}

/* A row, so many elements at a time. */
static void sum_row(void *ctx, int64_t row, int32_t thread) {
    enum { AT_ONCE = 256 };
    const cpa_sum_parts_args *args = ctx;
    const int64_t bytes = cpa_dtype_bytes(args->dtype);
    float sum[AT_ONCE], bias[AT_ONCE];
    (void)thread;
    for (int64_t first = 0; first < args->width; first += AT_ONCE) {
        const int64_t n = args->width - first < AT_ONCE ? args->width - first : AT_ONCE;
        const int64_t at = row * args->width + first;
        memcpy(sum, args->parts[0] + at, (size_t)n * sizeof *sum);
        for (int32_t p = 1; p < args->n_parts; p++)
            for (int64_t i = 0; i < n; i++) sum[i] += args->parts[p][at + i];
        if (args->bias) {
            cpa_widen(bias, (const char *)args->bias + first * bytes, args->dtype, n);
            for (int64_t i = 0; i < n; i++) sum[i] += bias[i];
        }
        cpa_narrow((char *)args->out + at * bytes, sum, args->dtype, n);
    }
}

cpa_status cpa_host_sum_parts(const cpa_sum_parts_args *args, cpa_stream *stream) {
    cpa_sum_parts_args job = *args;
    cpa_host_run(stream, args->rows, sum_row, &job);
    return CPA_OK;
}
