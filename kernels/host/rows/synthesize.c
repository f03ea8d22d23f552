/* synthesize: the generator of kernels/synthesize.c, some rows of all heads an item of work. */
#include "kernels/synthesize.h"

#include "base/min_max.h"
#include "kernels/host/device/host.h"

enum { ROWS_PER_ITEM = 16 };

static void fill_rows(void *ctx, int64_t item, int32_t thread) {
    const cpa_synth_args *args = ctx;
    const int64_t begin = item * ROWS_PER_ITEM, end = cpa_min64(begin + ROWS_PER_ITEM, args->rows);
    const int64_t stride = (int64_t)args->heads * args->dim, bytes = cpa_dtype_bytes(args->dtype);
    (void)thread;
    for (int32_t head = 0; head < args->heads; head++) {
        char *out = (char *)args->out + (begin * stride + (int64_t)head * args->dim) * bytes;
        cpa_synthesize_rows(args, head, begin, end, out, stride);
    }
}

cpa_status cpa_host_synthesize(const cpa_synth_args *args, cpa_stream *stream) {
    cpa_synth_args copy = *args;
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, fill_rows, &copy);
    return CPA_OK;
}
