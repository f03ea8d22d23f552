/* latent_expand: the products of all heads at once, keys and values apart, straight to where they lie; and the rotated
 * part to all heads. */
#include "base/check.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/nn/latent_rope.h"
#include "kernels/cuda/nn/nn.h"

enum { MOST_HEADS = 65535 };

/* The products of the latents and rows [row, row + outputs) of each head's weights, `out_apart` elements from head to
 * head. */
static cpa_status multiply(const cpa_latent_expand_args *a, int32_t row, int32_t outputs, void *out, int64_t out_stride,
                           int64_t out_apart, cpa_stream *stream) {
    const cpa_linear_args product = {
        .size = sizeof product,
        .rows = a->tokens,
        .inputs = a->latent_dim,
        .outputs = outputs,
        .dtype = a->dtype,
        .out_dtype = a->dtype,
        .x = a->latents,
        .x_stride = a->latent_row_stride,
        .weight = (const char *)a->w_kv_b + (int64_t)row * a->latent_dim * cpa_dtype_bytes(a->dtype),
        .weight_stride = a->latent_dim,
        .out = out,
        .out_stride = out_stride,
        .batch = a->heads,
        .weight_batch_stride = (int64_t)(a->nope_dim + a->v_dim) * a->latent_dim,
        .out_batch_stride = out_apart};
    return cpa_cuda_linear(&product, stream);
}

cpa_status cpa_cuda_latent_expand(const cpa_latent_expand_args *args, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    if (args->tokens > INT32_MAX)
        return cpa_cuda_unsupported(stream, "latent_expand: more tokens than a grid has CTAs", args->tokens);
    if (args->heads > MOST_HEADS)
        return cpa_cuda_unsupported(stream, "latent_expand: more heads than cuBLASLt has in a batch", args->heads);
    CPA_TRY(multiply(args, 0, args->nope_dim, args->k, args->k_row_stride, args->nope_dim + args->rope_dim, stream));
    CPA_TRY(multiply(args, args->nope_dim, args->v_dim, args->v, args->v_row_stride, args->v_dim, stream));
    return cpa_cuda_latent_rope(args, stream);
}
