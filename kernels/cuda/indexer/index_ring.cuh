/* The ring of stages through which keys come to the warpgroups of index_logits_hopper.cu, and the warps that fill it. A
 * stage is KEYS keys in lines of up to 128 bytes, swizzled as wgmma reads them, panel behind panel where keys are
 * longer, and their scales. Where pages are small copies go by cp.async, since a stage may be rows of any pages; else
 * by boxes, in index_boxes.cuh. */
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

    /* `fillers` arrivals make a stage full. */
    __device__ void start(int fillers) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared_address(&full[s]), fillers);
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

/* Arrives at a barrier that counts this thread once this thread's copies so far are there. */
__device__ inline void copy_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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

/* What a thread copies of each stage: with LANES - 1 others, a line at a time, every ROWS-th row from `row` on, and the
 * scale of one key. */
template <class Ring>
struct key_copier {
    using lines = typename Ring::lines;
    static constexpr int LANES = lines::VECTORS < 8 ? lines::VECTORS : 8;
    static constexpr int ROWS = WARPGROUP / LANES, COPIES = KEYS / ROWS, OF_BLOCK = COPIES / BLOCKS;
    static_assert(BLOCK_KEYS % ROWS == 0, "the rows of a block of keys are whole copies");
    const cpa_cuda_index_work &w;
    const int32_t *const table;
    const int32_t end;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % LANES, row = thread / LANES;
    const bool in_pages; /* a block of keys lies in one page: its rows are one step apart */
    int32_t pages[COPIES], scale_page;

    __device__ key_copier(const cpa_cuda_index_work &w, const cpa_attend_item *item, int32_t end)
        : w(w), table(w.tables + item->table), end(end), in_pages(1 << w.block_shift >= BLOCK_KEYS) {}

    __device__ int32_t page_of(int32_t key) const { return __ldg(table + (min(key, end - 1) >> w.block_shift)); }

    /* Asks for the pages of a stage that begins at key `at`. */
    __device__ void ask(int32_t at) {
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (!in_pages || i % OF_BLOCK == 0) pages[i] = page_of(at + row + i * ROWS);
        scale_page = page_of(at + thread);
    }

    __device__ void copy_row(uint32_t stage, int i, const char *from, bool valid) const {
#pragma unroll
        for (int vector = 0; vector < lines::VECTORS; vector += LANES)
            copy_async_16(stage + lines::place(KEYS, row + i * ROWS, vector + lane), from + (vector + lane) * 16,
                          valid);
    }

    /* Copies the stage whose pages have been asked for; zeros for keys behind the last. */
    __device__ void copy(int32_t at, uint32_t stage, float *scales) const {
        const int64_t step = ROWS * w.keys.token_stride;
        const char *from = w.keys.rows;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int32_t key = at + row + i * ROWS;
            if (!in_pages || i % OF_BLOCK == 0) {
                from = index_row(w, index_block(w, pages[i]), key);
            } else {
                from += step;
            }
            copy_row(stage, i, from, key < end);
        }
        if (w.keys.scales)
            copy_async_4(shared_address(scales + thread), index_scale(w, index_block(w, scale_page), at + thread),
                         at + thread < end);
    }
};

/* The keys [first, end) of an item by one warpgroup. The pages of a stage are asked for together, before the one in
 * front is waited for. */
template <class Ring>
__device__ void fill_ring(const cpa_cuda_index_work &w, Ring &ring, uint32_t stages_at, const cpa_attend_item *item,
                          int32_t first, int32_t end) {
    const int32_t stages = (end - first + KEYS - 1) / KEYS;
    key_copier<Ring> copier(w, item, end);
    typename Ring::place to, told;
    copier.ask(first);
    for (int32_t n = 0; n < stages; n++, to.advance()) {
        const int32_t at = first + n * KEYS;
        ring.wait_empty(to);
        copier.copy(at, stages_at + to.stage * Ring::KEY_BYTES, ring.scales[to.stage]);
        copy_async_commit();
        if (n + 1 < stages) copier.ask(at + KEYS);
        if (n >= Ring::LAG) tell_full<Ring::LAG>(ring, told);
    }
    for (int32_t n = max(0, stages - Ring::LAG); n < stages; n++) tell_full<0>(ring, told);
}

} // namespace

#endif
