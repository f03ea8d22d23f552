/* sparse_attend over entries of DeepSeek-V4 (CPA_FP8_T64, latents of 512 columns which are keys and values alike) on
 * compute capability 9.0.
 *
 * A CTA takes a row and 64 of its heads. One warpgroup widens tiles of 64 keys, one multiplies the scores and makes
 * probabilities of them, which it leaves in shared memory, and two add the values, half of the columns of O each: the
 * sums of 512 columns are more than a warpgroup has registers for. Where there are few rows, the CTAs of a cluster
 * share the keys of one; in the end each joins the states of all for some of the heads, through the shared memory of
 * the others. Where there are many, the CTAs of a row are a cluster, in which each widens half of the keys for both (as
 * FlashMLA, DeepSeek-AI, does). */
#include "base/check.h"
#include "kernels/cuda/attend/entry_loads.cuh"
#include "kernels/cuda/attend/entry_scores.cuh"
#include "kernels/cuda/attend/entry_values.cuh"

namespace {

/* All warps of a warpgroup give registers back, or take them, by what a CTA of so many threads is launched with. */
template <typename C, int N>
__device__ void registers_become() {
    if constexpr (N < (64 << 10) / C::THREADS)
        registers_shrink<N>();
    else
        registers_grow<N>();
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) sparse_entries(const __grid_constant__ cpa_cuda_sparse_args args) {
    extern __shared__ char memory[];
    __shared__ entry_shared<C> shared;
    static_assert(sizeof shared + C::SHARED_BYTES <= 227 << 10, "of a CTA");
    const uint32_t tiles = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        shared.wants_top = args.max_logits != nullptr;
        shared.start();
    }
    __syncthreads();
    if (C::PAIRED) join_cluster(); /* both have their barriers */
    if (warpgroup == 0) {
        registers_become<C, C::LOADER_REGISTERS>();
        load_units<C>(args, shared, tiles, thread);
        if (C::SPLIT) join_cluster(); /* as those who add values do, before they store */
    } else if (warpgroup == 1) {
        registers_become<C, C::SCORES_REGISTERS>();
        score_units<C>(args, shared, tiles, thread);
        if (C::SPLIT) join_cluster();
    } else {
        registers_become<C, C::VALUES_REGISTERS>();
        add_units<C>(args, shared, tiles, warpgroup - 2, thread);
        if constexpr (C::SPLIT) {
            join_cluster(); /* all have left what they have */
            store_joined<C>(args, shared, shared.works[ADDING].row, tiles, threadIdx.x - (C::THREADS - VALUES_THREADS));
        }
    }
    if (C::SPLIT || C::PAIRED) join_cluster(); /* nobody needs what is this CTA's any more */
}

template <typename C>
cpa_status launch(const cpa_cuda_sparse_args &args, int64_t units, int cluster, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_units<C>(sparse_entries<C>, &prepared, args, units, cluster, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_sparse_entries(const cpa_cuda_sparse_args *args, cpa_stream *stream) {
    const int64_t units_of_row = (args->a[0].group + GROUP_ROWS - 1) / GROUP_ROWS, units = args->rows * units_of_row;
    const int shares = shares_of(*args, units, cpa_cuda_device_of(stream)->multiprocessors);
    if (shares > 1) return launch<entry_config<true, false>>(*args, units, shares, stream);
    if (units_of_row % 2 == 0) return launch<entry_config<false, true>>(*args, units, 2, stream);
    return launch<entry_config<false, false>>(*args, units, 1, stream);
}
