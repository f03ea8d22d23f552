/* latent_expand: two products a head, straight to where its keys and values lie, and the rotated part to all heads. */
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"

enum { TOKENS_PER_ITEM = 64 };

static void copy_rope(void *ctx, int64_t item, int32_t thread) {
    const cpa_latent_expand_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), key_bytes = (a->nope_dim + a->rope_dim) * bytes;
    const int64_t end = cpa_min64((item + 1) * TOKENS_PER_ITEM, a->tokens);
    (void)thread;
    for (int64_t token = item * TOKENS_PER_ITEM; token < end; token++) {
        const char *rope = (const char *)a->latents + (token * a->latent_row_stride + a->latent_dim) * bytes;
        char *key = (char *)a->k + token * a->k_row_stride * bytes + a->nope_dim * bytes;
        for (int32_t head = 0; head < a->heads; head++, key += key_bytes)
            memcpy(key, rope, (size_t)(a->rope_dim * bytes));
    }
}

/* The product of the latents and rows [row, row + outputs) of a head's weights. */
static cpa_status multiply(const cpa_latent_expand_args *a, int64_t head, int32_t row, int32_t outputs, void *out,
                           int64_t out_stride, cpa_stream *stream) {
    const int64_t bytes = cpa_dtype_bytes(a->dtype), first = head * (a->nope_dim + a->v_dim) + row;
    const cpa_linear_args product = {.size = sizeof product,
                                     .rows = a->tokens,
                                     .inputs = a->latent_dim,
                                     .outputs = outputs,
                                     .dtype = a->dtype,
                                     .out_dtype = a->dtype,
                                     .x = a->latents,
                                     .x_stride = a->latent_row_stride,
                                     .weight = (const char *)a->w_kv_b + first * a->latent_dim * bytes,
                                     .weight_stride = a->latent_dim,
                                     .out = out,
                                     .out_stride = out_stride};
    return cpa_host_linear(&product, stream);
}

cpa_status cpa_host_latent_expand(const cpa_latent_expand_args *args, cpa_stream *stream) {
    const int64_t bytes = cpa_dtype_bytes(args->dtype);
    const int64_t key_bytes = (args->nope_dim + args->rope_dim) * bytes, value_bytes = args->v_dim * bytes;
    cpa_latent_expand_args copy = *args;
    for (int64_t head = 0; head < args->heads; head++) {
        CPA_TRY(
            multiply(args, head, 0, args->nope_dim, (char *)args->k + head * key_bytes, args->k_row_stride, stream));
        CPA_TRY(multiply(args, head, args->nope_dim, args->v_dim, (char *)args->v + head * value_bytes,
                         args->v_row_stride, stream));
    }
    cpa_host_run(stream, (args->tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, copy_rope, &copy);
    return CPA_OK;
}
