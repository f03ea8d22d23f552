/* How boxes of the bulk tensor copy engine fill the ring of index_logits_hopper.cu, where a block of a cache has
 * BLOCK_KEYS keys or more: one warp asks for the keys of a stage, and its lanes for their scales, which may lie
 * anywhere. */
#ifndef CPA_CUDA_INDEX_BOXES_CUH
#define CPA_CUDA_INDEX_BOXES_CUH

#include "kernels/cuda/indexer/index_ring.cuh"

namespace {

/* A launch: `boxes` says whether `keys` is a map, of (element, token, 1, block), and who fills the ring. */
struct index_launch {
    cpa_cuda_index_work work;
    CUtensorMap keys;
    int32_t boxes;
};

/* Page entries of the keys [first, end) in the lanes of a warp: those of 32 blocks of BLOCK_KEYS keys, and of the next
 * 32, which are on their way long before they are needed. */
struct page_window {
    const cpa_cuda_index_work &w;
    const int32_t *const table;
    const int32_t end;
    int32_t pages, next;

    __device__ page_window(const cpa_cuda_index_work &w, const cpa_attend_item *item, int32_t first, int32_t end)
        : w(w), table(w.tables + item->table), end(end), pages(0), next(ask(first)) {}

    /* Behind the last key it is that key's page, whose entry is there. */
    __device__ int32_t ask(int32_t at) const {
        const int64_t key = at + (int64_t)(threadIdx.x % WARP_LANES) * BLOCK_KEYS;
        return __ldg(table + (min(key, (int64_t)end - 1) >> w.block_shift));
    }
    /* Takes the window that begins at key `at`. */
    __device__ void move(int32_t at) {
        pages = next;
        next = ask(min(at + WARP_LANES * BLOCK_KEYS, end - 1));
    }
    __device__ int64_t block(int32_t place) const {
        return index_block(w, __shfl_sync(0xffffffff, pages, place));
    }
};

/* The scales of a block of keys by a warp, zeros behind the last key. */
__device__ inline void copy_scales(const cpa_cuda_index_work &w, int64_t block, int32_t at, int32_t end, float *to) {
#pragma unroll
    for (int i = threadIdx.x % WARP_LANES; i < BLOCK_KEYS; i += WARP_LANES)
        copy_async_4(shared_address(to + i), index_scale(w, block, at + i), at + i < end);
}

/* The keys [first, end) of an item by one warp. Boxes have whole blocks of keys: those behind the last one are read
 * where their page has them, and no result comes of them. */
template <typename Element, class Ring>
__device__ void fill_ring_by_boxes(const index_launch &launch, Ring &ring, uint32_t stages_at,
                                   const cpa_attend_item *item, int32_t first, int32_t end) {
    using lines = typename Ring::lines;
    const cpa_cuda_index_work &w = launch.work;
    const int32_t stages = (end - first + KEYS - 1) / KEYS;
    page_window window(w, item, first, end);
    typename Ring::place to;
    for (int32_t n = 0; n < stages; n++, to.advance()) {
        const int32_t at = first + n * KEYS, place = n * BLOCKS % WARP_LANES;
        const uint32_t full = shared_address(&ring.full[to.stage]);
        if (place == 0) window.move(at);
        ring.wait_empty(to);
        if (threadIdx.x % WARP_LANES == 0) barrier_expect(full, Ring::KEY_BYTES);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const int64_t block = window.block(place + b);
            const int32_t key = at + b * BLOCK_KEYS, token = key & ((1 << w.block_shift) - 1);
            const uint32_t tile = stages_at + to.stage * Ring::KEY_BYTES + b * BLOCK_KEYS * lines::LINE;
#pragma unroll
            for (int panel = 0; panel < lines::PANELS; panel++) {
                if (threadIdx.x % WARP_LANES == 0)
                    copy_box(tile + panel * KEYS * lines::LINE, &launch.keys, full,
                             panel * (lines::LINE / (int)sizeof(Element)), token, 0, (int)block);
            }
            if (w.keys.scales) copy_scales(w, block, key, end, ring.scales[to.stage] + b * BLOCK_KEYS);
        }
        copy_async_arrive(full);
    }
}

/* Whether boxes of BLOCK_KEYS keys lie in the blocks of a cache. */
inline bool index_has_boxes(const cpa_cuda_index_work &w) {
    return 1 << w.block_shift >= BLOCK_KEYS && w.keys.num_blocks > 0 && w.keys.num_blocks <= INT32_MAX;
}

template <typename Element, int DIM>
cpa_status encode_index_keys(const cpa_cuda_index_work &w, CUtensorMap *out, cpa_stream *stream) {
    constexpr int LINE = index_lines<Element, DIM>::LINE;
    const cuuint64_t dims[] = {DIM, (cuuint64_t)1 << w.block_shift, 1, (cuuint64_t)w.keys.num_blocks};
    const cuuint64_t token = (cuuint64_t)w.keys.token_stride, block = (cuuint64_t)w.keys.block_stride;
    const cuuint64_t strides[] = {token, block, block};
    const cuuint32_t box[] = {LINE / sizeof(Element), BLOCK_KEYS, 1, 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = LINE == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : LINE == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                    : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUresult result = cpa_cuda_device_of(stream)->encode(
        out, sizeof(Element) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
        (void *)(uintptr_t)w.keys.rows, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return cpa_cuda_unsupported(stream, "index_logits: cuTensorMapEncodeTiled failed with error", (int64_t)result);
    return CPA_OK;
}

} // namespace

#endif
