/* expert_combine: a token is an item of work. */
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"

/* Elements of a row that are summed at a time. */
enum { CHUNK = 512 };

static void combine_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_expert_combine_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), y_bytes = cpa_dtype_bytes(a->y_dtype);
    const int64_t start = row * a->width;
    float sum[CHUNK], wide[CHUNK];
    (void)thread;
    for (int64_t at = 0; at < a->width; at += CHUNK) {
        const int64_t n = cpa_min64(CHUNK, a->width - at);
        memset(sum, 0, sizeof sum);
        for (int32_t k = 0; k < a->top_k; k++) {
            const int64_t place = a->places[row * a->top_k + k];
            const float weight = a->weights[row * a->top_k + k];
            if (place < 0 || place >= a->y_rows) continue;
            cpa_widen(wide, (const char *)a->y + (place * a->y_stride + at) * y_bytes, a->y_dtype, n);
            for (int64_t i = 0; i < n; i++) sum[i] += weight * wide[i];
        }
        if (a->shared) {
            cpa_widen(wide, (const char *)a->shared + (start + at) * bytes, a->dtype, n);
            for (int64_t i = 0; i < n; i++) sum[i] += wide[i];
        }
        cpa_narrow((char *)a->out + (start + at) * bytes, sum, a->dtype, n);
    }
}

cpa_status cpa_host_expert_combine(const cpa_expert_combine_args *args, cpa_stream *stream) {
    cpa_expert_combine_args copy = *args;
    cpa_host_run(stream, args->rows, combine_row, &copy);
    return CPA_OK;
}
