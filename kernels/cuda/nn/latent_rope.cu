/* The rotated part of rows of latents to the keys of all heads, for latent_expand.c. */
#include "kernels/cuda/nn/latent_rope.h"

#include "kernels/cuda/device/cuda.h"

namespace {

constexpr int THREADS = 256;

struct rope_args {
    const char *latents;
    char *k;
    int64_t latent_row, k_row, head; /* bytes from row to row, and from head to head */
    int32_t heads, units;            /* units of a rotated part */
};

/* A CTA a token. */
template <typename Unit>
__global__ void __launch_bounds__(THREADS) latent_rope(const __grid_constant__ rope_args a) {
    const Unit *from = (const Unit *)(a.latents + (int64_t)blockIdx.x * a.latent_row);
    char *to = a.k + (int64_t)blockIdx.x * a.k_row;
    for (int64_t i = threadIdx.x; i < (int64_t)a.heads * a.units; i += THREADS) {
        const int64_t head = i / a.units, unit = i - head * a.units;
        ((Unit *)(to + head * a.head))[unit] = from[unit];
    }
}

template <typename Unit>
void launch(rope_args a, int64_t bytes, int64_t tokens, cpa_stream *stream) {
    a.units = (int32_t)(bytes / (int64_t)sizeof(Unit));
    latent_rope<Unit><<<(unsigned)tokens, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
}

} // namespace

extern "C" cpa_status cpa_cuda_latent_rope(const cpa_latent_expand_args *args, cpa_stream *stream) {
    const int64_t bytes = cpa_dtype_bytes(args->dtype), rope = args->rope_dim * bytes;
    const rope_args a = {(const char *)args->latents + args->latent_dim * bytes,
                         (char *)args->k + args->nope_dim * bytes,
                         args->latent_row_stride * bytes,
                         args->k_row_stride * bytes,
                         (args->nope_dim + args->rope_dim) * bytes,
                         args->heads,
                         0};
    const int64_t pointers = (int64_t)((uintptr_t)a.latents | (uintptr_t)a.k);
    const int64_t places = pointers | a.latent_row | a.k_row | a.head | rope;
    if (rope == 0) return CPA_OK;
    if (places % 16 == 0) {
        launch<uint4>(a, rope, args->tokens, stream);
    } else if (places % 4 == 0) {
        launch<uint32_t>(a, rope, args->tokens, stream);
    } else {
        launch<uint16_t>(a, rope, args->tokens, stream);
    }
    return cpa_cuda_launched(stream, "latent_expand");
}
