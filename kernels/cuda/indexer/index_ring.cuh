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
    /* From the first step of a tile of so many rows to another one. */
    static __host__ __device__ constexpr uint32_t step(int rows, int step) {
        return step * STEP / LINE * rows * LINE + step * STEP % LINE;
    }
};

/* A stage, and the parity of the phase in which it is filled, or emptied, the next time. */
template <int STAGES>
struct ring_place {
    int32_t stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
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
    using place = ring_place<STAGES>;
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
    __device__ void wait_full(place at) { barrier_wait(shared_address(&full[at.stage]), at.parity); }
    __device__ void wait_empty(place at) { barrier_wait(shared_address(&empty[at.stage]), at.parity ^ 1); }
    /* Of a warp that needs nothing of a stage any more. */
    __device__ void give_back(place at) {
        __syncwarp();
        if (threadIdx.x % WARP_LANES == 0) barrier_arrive(shared_address(&empty[at.stage]));
    }
};

/* Copies 4 bytes to shared memory, or zeros where `valid` is false. */
__device__ inline void copy_async_4(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0));
}

/* Says that this warp's copies of a stage are there, all but those of the LEFT stages behind it. */
template <int LEFT, class Ring>
__device__ void tell_full(Ring &ring, typename Ring::place &at) {
    copy_async_wait<LEFT>();
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % WARP_LANES == 0) barrier_arrive(shared_address(&ring.full[at.stage]));
    at.advance();
}

/* The keys [first, end) of an item by one warpgroup, zeros behind the last. The blocks of all keys of a stage are asked
 * for together, those of the next one before this one is waited for. */
template <class Ring>
__device__ void fill_ring(const cpa_cuda_index_work &w, Ring &ring, uint32_t stages_at, const cpa_attend_item *item,
                          int32_t first, int32_t end) {
    using lines = typename Ring::lines;
    constexpr int LANES = lines::VECTORS < 8 ? lines::VECTORS : 8; /* that copy a row, a line of it at a time */
    constexpr int ROWS = WARPGROUP / LANES, COPIES = KEYS / ROWS;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % LANES, row = thread / LANES;
    const int32_t *const table = w.tables + item->table;
    const int32_t stages = (end - first + KEYS - 1) / KEYS;
    int32_t blocks[COPIES], scale_block;
    const auto ask = [&](int32_t at) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) blocks[i] = __ldg(table + (min(at + row + i * ROWS, end - 1) >> w.block_shift));
        scale_block = __ldg(table + (min(at + thread, end - 1) >> w.block_shift));
    };
    typename Ring::place to, told;
    ask(first);
    for (int32_t n = 0; n < stages; n++, to.advance()) {
        const uint32_t stage = stages_at + to.stage * Ring::KEY_BYTES;
        const int32_t at = first + n * KEYS;
        ring.wait_empty(to);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int32_t key = at + row + i * ROWS;
            const char *from = index_row(w, index_block(w, blocks[i]), min(key, end - 1));
#pragma unroll
            for (int vector = 0; vector < lines::VECTORS; vector += LANES)
                copy_async_16(stage + lines::place(KEYS, row + i * ROWS, vector + lane), from + (vector + lane) * 16,
                              key < end);
        }
        if (w.keys.scales) {
            const int32_t key = at + thread;
            copy_async_4(shared_address(&ring.scales[to.stage][thread]),
                         index_scale(w, index_block(w, scale_block), min(key, end - 1)), key < end);
        }
        copy_async_commit();
        if (n + 1 < stages) ask(at + KEYS);
        if (n >= Ring::LAG) tell_full<Ring::LAG>(ring, told);
    }
    for (int32_t n = max(0, stages - Ring::LAG); n < stages; n++) tell_full<0>(ring, told);
}

} // namespace

#endif
