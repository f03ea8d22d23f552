/* rotate: the heads of rows. */
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/turn.h"

static void rotate_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_rotate_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    (void)thread;
    for (int32_t head = 0; head < a->heads; head++) {
        const char *x = (const char *)a->x + (row * a->x_stride + head * a->x_head_stride) * bytes;
        char *out = (char *)a->out + (row * a->out_stride + head * a->out_head_stride) * bytes;
        const int is_outside = cpa_turn_row(&a->rope, a->positions, a->rows, row, x, out, a->dtype, a->dim);
        if (is_outside && a->outside) a->outside[row] = 1;
    }
}

cpa_status cpa_host_rotate(const cpa_rotate_args *args, cpa_stream *stream) {
    cpa_rotate_args copy = *args;
    cpa_host_run(stream, args->rows, rotate_row, &copy);
    return CPA_OK;
}
