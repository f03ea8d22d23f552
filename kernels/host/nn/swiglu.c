/* swiglu: out = gate / (1 + exp(-gate)) * up. */
#include <math.h>

#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"

/* Elements that are widened at a time. */
enum { CHUNK = 512 };

static void activate_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_swiglu_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), width = a->width;
    const char *gates = (const char *)a->gate_up + row * 2 * width * bytes, *ups = gates + width * bytes;
    char *out = (char *)a->out + row * width * bytes;
    float gate[CHUNK], up[CHUNK];
    (void)thread;
    for (int64_t at = 0; at < width; at += CHUNK) {
        const int64_t n = cpa_min64(CHUNK, width - at);
        cpa_widen(gate, gates + at * bytes, a->dtype, n);
        cpa_widen(up, ups + at * bytes, a->dtype, n);
        for (int64_t i = 0; i < n; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
        cpa_narrow(out + at * bytes, gate, a->dtype, n);
    }
}

cpa_status cpa_host_swiglu(const cpa_swiglu_args *args, cpa_stream *stream) {
    cpa_swiglu_args copy = *args;
    cpa_host_run(stream, args->rows, activate_row, &copy);
    return CPA_OK;
}
