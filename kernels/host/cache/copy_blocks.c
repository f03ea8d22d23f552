/* copy_blocks: whole blocks as bytes, in all layers. */
#include <string.h>

#include "kernels/host/device/host.h"

static void copy_block(void *ctx, int64_t item, int32_t thread) {
    const cpa_copy_blocks_args *a = ctx;
    const int64_t layer = item / a->n_pairs, *pair = a->pairs[item % a->n_pairs];
    (void)thread;
    memcpy(a->dst.first + layer * a->dst.layer_stride + pair[1] * a->dst.stride,
           a->src.first + layer * a->src.layer_stride + pair[0] * a->src.stride, (size_t)a->bytes);
}

cpa_status cpa_host_copy_blocks(const cpa_copy_blocks_args *args, cpa_stream *stream) {
    cpa_copy_blocks_args copy = *args;
    cpa_host_run(stream, copy.layers * copy.n_pairs, copy_block, &copy);
    return CPA_OK;
}
