/* rotate: the heads of rows. */
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/turn.h"

static void rotate_row(void *ctx, int64_t row, int32_t thread) {
    (void)thread;
    cpa_turn_heads(ctx, row);
}

cpa_status cpa_host_rotate(const cpa_rotate_args *args, cpa_stream *stream) {
    cpa_rotate_args copy = *args;
    cpa_host_run(stream, args->rows, rotate_row, &copy);
    return CPA_OK;
}
