/* Tiles of latents that lists name, for the warpgroups of latent_rows.cuh: which tiles a CTA has, and the warpgroup
 * that gathers their rows where these lie as they are needed (codes: latent_codes.cuh). */
#ifndef CPA_CUDA_SPARSE_LATENT_CUH
#define CPA_CUDA_SPARSE_LATENT_CUH

#include "kernels/cuda/attend/latent_codes.cuh"
#include "kernels/cuda/attend/listed_units.cuh"

namespace {

constexpr int SHARE_ROWS = 16; /* of a tile, which a warp of the loaders brings */

/* Split: the CTAs of a cluster share a row's keys. */
template <typename Element, latent_cache Cache, bool Split>
struct listed_config : latent_config<Element, Cache> {
    using base = latent_config<Element, Cache>;
    using call = cpa_cuda_sparse_args;
    static constexpr bool LISTED = true, SPLIT = Split;
    /* Of elements each thread's copies count as they come, and a warp tells beside which of its rows there are. */
    static constexpr int LOADERS = base::CODES ? base::LOADERS : WARPGROUP, NOTERS = base::CODES ? 0 : WARPGROUP / 32;
    static constexpr int LOADER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
};

template <typename C>
struct listed_shared : latent_stages<C> {
    listed_work works[COPYING + 1]; /* of those who multiply, and of those who copy, who are ahead */
    bool wants_top;
    __align__(16) uint32_t shown[C::STAGES][C::KEYS / SHARE_ROWS]; /* a bit a row of the tile */
    uint32_t noted[2][C::KEYS / SHARE_ROWS];

    /* Where a row of a tile lies; NULL: the list names no key there. */
    __device__ const char *key_at(const cpa_cuda_sparse_args &args, int tile, int row_of_tile) const {
        const listed_work &work = works[COPYING];
        const int scope = tile >= work.of_first_scope;
        const cpa_cuda_attend_args &a = args.a[scope];
        const int32_t position = (tile - (scope ? work.of_first_scope : 0)) * C::KEYS + row_of_tile;
        const int64_t slot = slot_at(a, args.lists[scope], work.row, work.keys[scope], position);
        if (slot < 0) return nullptr;
        const int64_t token = slot & ((1 << a.block_shift) - 1);
        return a.k + ((slot >> a.block_shift) * a.k_block_stride + token * a.k_token_stride) * (C::CODES ? 1 : 2);
    }
    /* Which rows of its share of the n-th tile a loading warp has: it notes them as it looks them up, and tells of them
     * before it says that what keys alone have is full. */
    __device__ void note_shown(uint32_t rows, uint32_t n, int thread) {
        if (thread % 32 == 0) noted[n % 2][thread / 32] = rows;
    }
    __device__ void store_shown(uint32_t n, int thread) {
        if (thread % 32 == 0) shown[n % C::STAGES][thread / 32] = noted[n % 2][thread / 32];
    }
    __device__ void load_shown(uint32_t (&rows)[C::KEYS / SHARE_ROWS], uint32_t n) const {
        const uint4 all = *(const uint4 *)shown[n % C::STAGES];
        rows[0] = all.x, rows[1] = all.y, rows[2] = all.z, rows[3] = all.w;
    }
};

/* Has each unit's tiles brought by the loading warpgroup: load(first, count) those of one. */
template <typename C, typename Load>
__device__ void copy_units(const cpa_cuda_sparse_args &args, listed_shared<C> &shared, int thread, Load load) {
    for (int32_t unit = first_unit<C>(); unit >= 0; unit = shared.works[COPYING].next) {
        named_sync(LOADERS_ALONE, WARPGROUP); /* nobody needs the unit before */
        if (thread == 0) take_unit<C>(args, shared.works[COPYING], unit);
        named_sync(LOADERS_ALONE, WARPGROUP);
        load(shared.works[COPYING].first_tile, shared.works[COPYING].count);
    }
}

/* Arrives at the barrier once the copies of this thread so far are there; whoever waits has counted it. */
__device__ inline void arrive_with_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* The rows of elements, by the loading warpgroup: a warp brings 16 of a tile, four at a time, 8 lanes 64 columns of
 * each. A lane looks up one row, and the others learn of it by shuffles. Past the width of keys, and where there is no key,
 * are zeros. */
template <typename C>
__device__ void copy_listed(const cpa_cuda_sparse_args &args, listed_shared<C> &shared, uint32_t tiles, int thread) {
    constexpr int LANES = COLUMNS / 8, AT_ONCE = 32 / LANES, EACH = SHARE_ROWS / AT_ONCE;
    const int warp = thread / 32, lane = thread % 32, chunk = lane % LANES, within = lane / LANES;
    const int own_row = warp * SHARE_ROWS + lane % SHARE_ROWS;
    const cpa_cuda_attend_args &a = args.a[0];
    uint32_t n = 0;
    copy_units(args, shared, thread, [&](int first, int count) {
        const char *next = count > 0 ? shared.key_at(args, first, own_row) : nullptr;
        for (int i = 1; i <= count; i++, n++) {
            const uint32_t tile = tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES;
            shared.note_shown(__ballot_sync(0xffffffff, next != nullptr) & 0xffff, n, thread);
            const char *from[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++)
                from[j] = (const char *)__shfl_sync(0xffffffff, (uint64_t)next, within + AT_ONCE * j);
            if (i < count) next = shared.key_at(args, first + i, own_row); /* before the waiting */
#pragma unroll
            for (int at = 0; at < LATENT_PARTS; at++) {
                const int part = at == 0 ? KEYS_ALONE : at - 1; /* in the order in which they are needed */
                shared.wait_empty(n, part);
                if (part == KEYS_ALONE && lane == 0) {
                    shared.store_shown(n, thread);
                    barrier_arrive(shared.full_at(n, part));
                }
#pragma unroll
                for (int j = C::first_of(part); j < C::first_of(part) + C::count_of(part); j++)
#pragma unroll
                    for (int row = 0; row < EACH; row++) {
                        const int column = j * COLUMNS + chunk * 8;
                        const bool is = from[row] && column < a.k_dim;
                        const uint32_t to = swizzled<COLUMNS>(warp * SHARE_ROWS + within + AT_ONCE * row, chunk);
                        copy_async_16(tile + j * COLUMNS_BYTES + to, is ? from[row] + column * 2 : a.k, is);
                    }
                arrive_with_copies(shared.full_at(n, part));
            }
        }
    });
}

/* The same of codes. */
template <typename C>
__device__ void copy_listed_codes(const cpa_cuda_sparse_args &args, listed_shared<C> &shared, uint32_t tiles,
                                  int thread) {
    code_loader<C> loader(args, shared, thread);
    uint32_t n = 0;
    copy_units(args, shared, thread, [&](int first, int count) {
        if (count > 0) {
            loader.look_up(first, n);
            loader.read_first();
        }
        for (int i = 1; i <= count; i++, n++)
            loader.load(n, tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES, first + min(i, count - 1));
    });
}

} // namespace

#endif
