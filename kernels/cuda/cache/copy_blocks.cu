/* copy_blocks: whole blocks as bytes, in all layers of a call at once. A CTA copies a piece of a block in one layer, 16
 * bytes a thread at a time. Either side may be page-locked host memory. The list of blocks travels in the parameters of
 * the kernel, so that the caller's may go as soon as the call returns. The launches of a call copy different blocks: on
 * compute capability 9.0 each may be placed while the one before it ends, and ends behind it. */
#include "base/dependent.cuh"
#include "kernels/cuda/device/cuda.h"

namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4; /* loads of a thread that are under way together */
constexpr int64_t PIECE_BYTES = 64 << 10;
constexpr int BLOCKS_A_LAUNCH = 1024; /* 8 KB of the 32 KB that parameters may take */

struct block_pair {
    int32_t src, dst;
};

struct copy_args {
    cpa_block_place src, dst;
    int64_t bytes;
    block_pair pairs[BLOCKS_A_LAUNCH];
};

__global__ void __launch_bounds__(THREADS) copy_pieces(const __grid_constant__ copy_args a) {
    constexpr int64_t STEP = THREADS * sizeof(uint4);
    dependent_allow();
    const block_pair pair = a.pairs[blockIdx.x];
    const char *src = a.src.first + blockIdx.z * a.src.layer_stride + pair.src * a.src.stride;
    char *dst = a.dst.first + blockIdx.z * a.dst.layer_stride + pair.dst * a.dst.stride;
    const int64_t begin = blockIdx.y * PIECE_BYTES, end = min(begin + PIECE_BYTES, a.bytes);
    for (int64_t first = begin + threadIdx.x * sizeof(uint4); first < end; first += AT_ONCE * STEP) {
        uint4 value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * STEP < end) value[i] = __ldg((const uint4 *)(src + first + i * STEP));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * STEP < end) *(uint4 *)(dst + first + i * STEP) = value[i];
    }
    dependent_wait();
}

} // namespace

extern "C" cpa_status cpa_cuda_copy_blocks(const cpa_copy_blocks_args *args, cpa_stream *stream) {
    const unsigned pieces = (unsigned)((args->bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    const bool overlaps = cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    copy_args a = {args->src, args->dst, args->bytes, {}};
    for (int64_t done = 0; done < args->n_pairs && status == CPA_OK; done += BLOCKS_A_LAUNCH) {
        const int64_t left = args->n_pairs - done, count = left < BLOCKS_A_LAUNCH ? left : BLOCKS_A_LAUNCH;
        for (int64_t i = 0; i < count; i++)
            a.pairs[i] = {(int32_t)args->pairs[done + i][0], (int32_t)args->pairs[done + i][1]};
        const dim3 grid((unsigned)count, pieces, (unsigned)args->layers);
        const bool early = done > 0 && overlaps;
        status = cpa_cuda_check(&stream->error,
                                launch_dependent(copy_pieces, grid, THREADS, a, early, cpa_cuda_handle(stream)),
                                "copy_blocks");
    }
    return status;
}
