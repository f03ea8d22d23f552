/* The ring of stages through which keys come to the warpgroups of index_logits_hopper.cu, and the warps that fill it. A
 * stage is KEYS keys in lines of up to 128 bytes, swizzled as wgmma reads them, panel behind panel where keys are
 * longer, and their scales. Copies go by cp.async, since a stage may be rows of any pages. */
#ifndef CPA_CUDA_INDEX_RING_CUH
#define CPA_CUDA_INDEX_RING_CUH

#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/indexer/index_tile.cuh"

namespace {

constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int KEYS = 128, BLOCK_KEYS = 64, BLOCKS = KEYS / BLOCK_KEYS; /* keys of a stage, and of a product */
constexpr int STEP = 32;                                               /* bytes of a row in a product's step */
constexpr int TILE_ALIGNMENT = 1024, SHARED_BYTES = 200 * 1024, MOST_STAGES = 10;

/* Bytes of tiles whose rows are DIM elements. */
template <typename Element, int DIM>
struct index_lines {
    static constexpr int ROW = DIM * (int)sizeof(Element), LINE = ROW < 128 ? ROW : 128, PANELS = ROW / LINE;
    static constexpr int VECTORS = ROW / 16;

    /* The place of a vector of 16 bytes of a row in a tile of so many rows. */
    static __device__ uint32_t place(int rows, int row, int vector) {
        const uint32_t at = (uint32_t)(row * LINE + vector % (LINE / 16) * 16);
        return vector / (LINE / 16) * rows * LINE + (at ^ ((at >> 7) & (LINE / 16 - 1)) << 4);
    }
    /* Of a step of all rows from `row` on, a multiple of 8. */
    static __device__ uint32_t step(int rows, int row, int step) {
        return step * STEP / LINE * rows * LINE + row * LINE + step * STEP % LINE;
    }
};

template <typename Element, int DIM, int N>
struct index_ring {
    using lines = index_lines<Element, DIM>;
    static constexpr int Q_BYTES = N * lines::ROW, KEY_BYTES = KEYS * lines::ROW;
    static constexpr int FIT = (SHARED_BYTES - CONSUMERS * Q_BYTES) / (KEY_BYTES + KEYS * 4);
    static constexpr int STAGES = FIT < MOST_STAGES ? FIT : MOST_STAGES;
    /* Stages that are on their way: consumers begin with one before they give back the one before. */
    static constexpr int LAG = STAGES - 2;
    static_assert(LAG > 0 && Q_BYTES % TILE_ALIGNMENT == 0 && KEY_BYTES % TILE_ALIGNMENT == 0, "tiles");

    float scales[STAGES][KEYS];
    uint64_t full[STAGES], empty[STAGES];

    static constexpr int TILES_BYTES = CONSUMERS * Q_BYTES + STAGES * KEY_BYTES;
    static constexpr int bytes() { return TILE_ALIGNMENT + TILES_BYTES + (int)sizeof(index_ring); }

    __device__ void start() {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared_address(&full[s]), WARPGROUP / WARP_LANES);
            barrier_init(shared_address(&empty[s]), CONSUMERS * WARPGROUP / WARP_LANES);
        }
        barrier_init_fence();
    }
    __device__ void wait_full(int32_t n) { barrier_wait(shared_address(&full[n % STAGES]), n / STAGES % 2); }
    __device__ void wait_empty(int32_t n) { barrier_wait(shared_address(&empty[n % STAGES]), (n / STAGES + 1) % 2); }
    /* Of a warp that needs nothing of a stage any more. */
    __device__ void give_back(int32_t n) {
        __syncwarp();
        if (threadIdx.x % WARP_LANES == 0) barrier_arrive(shared_address(&empty[n % STAGES]));
    }
};

/* Copies 4 bytes to shared memory, or zeros where `valid` is false. */
__device__ inline void copy_async_4(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0));
}

/* Says of stages [begin, end) that this warp's copies are there, all but those of the last LEFT. */
template <int LEFT, class Ring>
__device__ void tell_full(Ring &ring, int32_t begin, int32_t end) {
    copy_async_wait<LEFT>();
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % WARP_LANES != 0) return;
    for (int32_t n = begin; n < end; n++) barrier_arrive(shared_address(&ring.full[n % Ring::STAGES]));
}

/* The keys [first, end) of an item by one warpgroup, zeros behind the last. */
template <class Ring>
__device__ void fill_ring(const cpa_cuda_index_work &w, Ring &ring, uint32_t stages_at, const cpa_attend_item *item,
                          int32_t first, int32_t end) {
    using lines = typename Ring::lines;
    constexpr int ROWS = WARPGROUP / lines::VECTORS, COPIES = KEYS / ROWS;
    const int thread = threadIdx.x % WARPGROUP, vector = thread % lines::VECTORS;
    const int32_t stages = (end - first + KEYS - 1) / KEYS;
    for (int32_t n = 0; n < stages; n++) {
        const uint32_t stage = stages_at + n % Ring::STAGES * Ring::KEY_BYTES;
        ring.wait_empty(n);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int row = i * ROWS + thread / lines::VECTORS;
            const int32_t key = first + n * KEYS + row;
            const bool valid = key < end;
            const char *from = valid ? index_row(w, index_block(w, item, key), key) + vector * 16 : w.keys.rows;
            copy_async_16(stage + lines::place(KEYS, row, vector), from, valid);
        }
        if (w.keys.scales) {
            const int32_t key = first + n * KEYS + thread;
            const float *from = key < end ? index_scale(w, index_block(w, item, key), key) : w.keys.scales;
            copy_async_4(shared_address(&ring.scales[n % Ring::STAGES][thread]), from, key < end);
        }
        copy_async_commit();
        if (n >= Ring::LAG) tell_full<Ring::LAG>(ring, n - Ring::LAG, n - Ring::LAG + 1);
    }
    tell_full<0>(ring, max(0, stages - Ring::LAG), stages);
}

} // namespace

#endif
