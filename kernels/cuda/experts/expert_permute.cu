/* expert_permute: a CTA has an expert. It counts the choices of the experts in front of its own, which is where its
 * places begin, and goes over all choices once more for its own: no CTA waits for another, and what each writes depends
 * on the choices alone. Every warp has a range of choices. */
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int WARPS = 16, THREADS = WARPS * WARP_LANES;

struct counts {
    int32_t before, own; /* choices of the experts in front, and of this one */
};

/* Those of the choices [begin, end), for all lanes. */
__device__ counts count(const cpa_expert_permute_args &a, int32_t expert, int64_t begin, int64_t end) {
    counts n = {0, 0};
    for (int64_t i = begin + threadIdx.x % WARP_LANES; i < end; i += WARP_LANES) {
        const int64_t e = (int64_t)a.ids[i] - a.first_expert;
        n.before += e >= 0 && e < expert;
        n.own += e == expert;
    }
    n.before = warp_sum(n.before);
    n.own = warp_sum(n.own);
    return n;
}

/* Writes the choices [begin, end) of the expert to the places from `place` on, and those of the last expert's CTA that
 * have none. */
__device__ void place_choices(const cpa_expert_permute_args &a, int32_t expert, int64_t begin, int64_t end,
                              int32_t place) {
    const int lane = threadIdx.x % WARP_LANES;
    for (int64_t first = begin; first < end; first += WARP_LANES) {
        const int64_t i = first + lane;
        const int64_t e = i < end ? (int64_t)a.ids[i] - a.first_expert : -2;
        const bool own = e == expert, elsewhere = i < end && (e < 0 || e >= a.experts);
        const uint32_t mates = __ballot_sync(0xffffffff, own);
        if (own) {
            const int32_t at = place + __popc(mates & ((1u << lane) - 1));
            a.places[i] = at;
            a.tokens[at] = (uint32_t)(i / a.top_k);
        }
        if (elsewhere && expert == a.experts - 1) a.places[i] = -1;
        place += __popc(mates);
    }
}

__global__ void __launch_bounds__(THREADS, ctas_before_9(2))
    expert_permute(const __grid_constant__ cpa_expert_permute_args a) {
    __shared__ counts of_warp[WARPS];
    const int warp = threadIdx.x / WARP_LANES;
    const int32_t expert = blockIdx.x;
    const int64_t choices = a.rows * a.top_k, range = (choices + WARPS - 1) / WARPS;
    const int64_t begin = min(choices, warp * range), end = min(choices, begin + range);
    int32_t start = 0, own = 0, place = 0;
    dependent_allow();
    dependent_wait();
    const counts n = count(a, expert, begin, end);
    if (threadIdx.x % WARP_LANES == 0) of_warp[warp] = n;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        start += of_warp[w].before;
        place += w < warp ? of_warp[w].own : 0;
        own += of_warp[w].own;
    }
    place_choices(a, expert, begin, end, start + place);
    if (threadIdx.x == 0) a.offsets[expert] = start;
    if (expert != a.experts - 1) return;
    if (threadIdx.x == 0) a.offsets[a.experts] = start + own;
    for (int64_t i = (int64_t)start + own + threadIdx.x; i < choices; i += THREADS) a.tokens[i] = UINT32_MAX;
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_permute(const cpa_expert_permute_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    return launch_early(expert_permute, dim3((unsigned)args->experts), THREADS, *args, stream, "expert_permute");
}
