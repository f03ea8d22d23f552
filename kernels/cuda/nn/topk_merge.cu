/* topk_merge: a CTA takes a row. The search of topk over the candidates of all lists; what is chosen lies in shared
 * memory, list after list, and its place in the result is the number of chosen ones with a smaller index, which lists
 * that ascend tell by halving. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/cuda/nn/topk_search.cuh"

#include <cpattn/ops.h>

namespace {

struct shared_memory {
    search_memory search;
    int32_t chosen[CPA_MOST_TOPK];
    int32_t begins[CPA_MERGE_MAX_STATES + 1]; /* first of each list in `chosen`; before: how many lists have */
};

struct list_source {
    using unit = uint4; /* orders */
    const cpa_topk_merge_args &a;
    int64_t row;
    int32_t size;

    __device__ int64_t place(int32_t at) const {
        return at / a.width * a.list_stride + row * a.row_stride + at % a.width;
    }
    __device__ uint32_t order(int32_t at) const {
        if (at >= size) return CPA_TOPK_NEVER;
        const int64_t from = place(at);
        return cpa_topk_candidate_order(&a, row, a.indices[from], a.scores[from]);
    }
    template <int N>
    __device__ void load(int32_t at, unit (&to)[N]) const {
#pragma unroll
        for (int u = 0; u < N; u++, at += WARP_UNIT) to[u] = {order(at), order(at + 1), order(at + 2), order(at + 3)};
    }
    __device__ void orders(const unit &of, int32_t, uint32_t (&out)[UNIT_ENTRIES]) const {
        out[0] = of.x, out[1] = of.y, out[2] = of.z, out[3] = of.w;
    }
    __device__ int32_t column(int32_t at) const { return a.indices[place(at)]; }
};

/* How many of the numbers in [begin, end), which ascend, are smaller. */
__device__ int32_t count_smaller(const int32_t *numbers, int32_t begin, int32_t end, int32_t than) {
    const int32_t first = begin;
    while (begin < end) {
        const int32_t middle = (begin + end) / 2;
        if (numbers[middle] < than) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin - first;
}

__global__ void __launch_bounds__(THREADS, 2) topk_merge(const __grid_constant__ cpa_topk_merge_args a) {
    __shared__ shared_memory shared;
    const int64_t row = blockIdx.x;
    const list_source source = {a, row, a.n * a.width};
    const int64_t to = cpa_topk_out_row(a.out_rows, row);
    if (to < 0) return;
    int32_t *out = a.out + to * a.out_stride;
    const int32_t tail = cpa_topk_tail(a.tails, row);
    const chosen_rule rule = find_rule(lone_cta(), source, (uint32_t)a.k, shared.search);
    for (int i = threadIdx.x; i <= a.n; i += THREADS) shared.begins[i] = 0;
    __syncthreads();
    const int32_t count = (int32_t)for_chosen(source, rule, 0, shared.search, [&](int32_t entry, uint32_t place) {
        shared.chosen[place] = source.column(entry);
        atomicAdd(&shared.begins[entry / a.width], 1);
    });
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t begin = 0;
        for (int i = 0; i <= a.n; i++) {
            const int32_t of_list = shared.begins[i];
            shared.begins[i] = begin;
            begin += of_list;
        }
        if (a.counts) a.counts[to] = count + (tail >= 0);
        if (tail >= 0) out[count] = tail;
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < count; i += THREADS) {
        const int32_t index = shared.chosen[i];
        int32_t place = 0;
        for (int list = 0; list < a.n; list++)
            place += count_smaller(shared.chosen, shared.begins[list], shared.begins[list + 1], index);
        out[place] = index;
    }
    const int32_t width = cpa_topk_list_width(a.k, a.tails);
    for (int32_t i = count + (tail >= 0) + (int32_t)threadIdx.x; i < width; i += THREADS) out[i] = -1;
}

} // namespace

extern "C" cpa_status cpa_cuda_topk_merge(const cpa_topk_merge_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "topk_merge: more rows than a grid has CTAs", args->rows);
    topk_merge<<<(unsigned)args->rows, THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "topk_merge");
}
