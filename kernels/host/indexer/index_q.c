/* index_q: queries of an indexer, and the weights that their scales go into. */
#include "kernels/host/device/host.h"
#include "kernels/host/indexer/index_row.h"
#include "kernels/host/nn/nn.h"

static void make_token(void *ctx, int64_t token, int32_t thread) {
    const cpa_index_q_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    const int64_t row_bytes = a->format == CPA_INDEX_MXFP4  ? a->dim / 2
                              : a->format == CPA_INDEX_BF16 ? 2 * a->dim
                                                            : a->dim;
    (void)thread;
    for (int32_t head = 0; head < a->heads; head++) {
        const int64_t at = token * a->heads + head;
        uint8_t *out = (uint8_t *)a->out + at * row_bytes;
        float x[CPA_INDEX_MOST_DIM], scale = 1, weight;
        cpa_widen(x, (const char *)a->q + (token * a->q_row_stride + head * a->dim) * bytes, a->dtype, a->dim);
        cpa_index_finish(x, a->dim, &a->rope, a->positions, a->tokens, token, a->hadamard);
        if (a->format == CPA_INDEX_BF16)
            cpa_narrow(out, x, CPA_BF16, a->dim);
        else if (a->format == CPA_INDEX_MXFP4)
            cpa_index_mxfp4(out, a->scales + at * (a->dim / CPA_INDEX_MXFP4_BLOCK), x, a->dim);
        else
            scale = cpa_index_codes(out, x, a->dim, a->floor, 1);
        if (!a->weights) continue;
        cpa_widen(&weight,
                  (const char *)a->weights + (token * a->weight_row_stride + head) * cpa_dtype_bytes(a->weight_dtype),
                  a->weight_dtype, 1);
        a->weights_out[at] = weight * scale * a->softmax_scale * a->head_scale;
    }
}

cpa_status cpa_host_index_q(const cpa_index_q_args *args, cpa_stream *stream) {
    cpa_index_q_args copy = *args;
    cpa_host_run(stream, args->tokens, make_token, &copy);
    return CPA_OK;
}
