/* index_q: queries of an indexer, and the weights that their scales go into. */
#include "kernels/host/device/host.h"
#include "kernels/host/indexer/index_row.h"
#include "kernels/host/nn/nn.h"

static void make_token(void *ctx, int64_t token, int32_t thread) {
    const cpa_index_q_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), out_bytes = cpa_dtype_bytes(a->out_dtype);
    (void)thread;
    for (int32_t head = 0; head < a->heads; head++) {
        const int64_t at = token * a->heads + head;
        char *out = (char *)a->out + at * a->dim * out_bytes;
        float x[CPA_INDEX_MOST_DIM], scale = 1, weight;
        cpa_widen(x, (const char *)a->q + (token * a->q_row_stride + head * a->dim) * bytes, a->dtype, a->dim);
        cpa_index_finish(x, a->dim, &a->rope, a->positions, a->tokens, token, a->hadamard, a->out_dtype);
        if (a->out_dtype != CPA_FP8_E4M3)
            cpa_narrow(out, x, a->out_dtype, a->dim);
        else
            scale = cpa_index_codes((uint8_t *)out, x, a->dim, a->floor, 1);
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
