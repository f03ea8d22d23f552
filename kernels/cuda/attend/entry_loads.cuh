/* The warpgroup of sparse_entries.cu that brings the rows which lists name, tile by tile: it reads the codes of one to
 * registers while it widens those of the one before. */
#ifndef CPA_CUDA_ENTRY_LOADS_CUH
#define CPA_CUDA_ENTRY_LOADS_CUH

#include "kernels/cuda/attend/entry_tiles.cuh"
#include "kernels/cuda/cache/tiles.cuh"

namespace {

constexpr int CHUNK = 16; /* bytes, and codes, that a thread reads at once */

/* Zeros in the place of a key that a list does not name. */
__device__ uint4 no_key[36];

/* Where a row and its scales lie; none: the list names no key there. */
struct entry_place {
    const char *row;
    const uint8_t *scales;
    bool any;
};

/* Looks up a row of each tile; its entry of the list waits until the next one is due. */
template <typename C>
struct entry_places {
    const cpa_cuda_sparse_args &args;
    const listed_work &work;
    const int row_of_tile;
    int32_t position, entry;

    __device__ void read_entry(int tile) {
        const int scope = tile >= work.of_first_scope;
        position = (tile - (scope ? work.of_first_scope : 0)) * C::KEYS + row_of_tile;
        entry = entry_at(work.keys[scope], position);
    }
    __device__ entry_place place(int tile) const {
        const int scope = tile >= work.of_first_scope;
        const cpa_cuda_attend_args &a = args.a[scope];
        const int64_t slot = slot_of(a, args.lists[scope], work.row, work.keys[scope], position, entry);
        if (slot < 0) return {(const char *)no_key, (const uint8_t *)no_key, false};
        const int64_t token = slot & ((1 << a.block_shift) - 1);
        const char *block = a.k + (slot >> a.block_shift) * a.k_block_stride;
        return {block + token * a.k_token_stride, (const uint8_t *)block + a.k_words_at + token * POWER_SCALES, true};
    }
};

/* 16 bytes to the other CTA of a pair, where they arrive at the barrier. */
__device__ inline void store_there(uint32_t to, const uint32_t (&x)[4], uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
                 : "memory");
}

/* What a thread does: of a row of each half of a tile, 32 rows, that is this CTA's, a fourth. The rows of a warp are
 * eight, so that those who store together use all banks. Of a group of COLUMNS codes it reads a chunk, of one of
 * elements two. */
template <typename C>
struct entry_loader {
    static constexpr int HALF = C::KEYS / 2, WARP_ROWS = 8, ROW_THREADS = 32 / WARP_ROWS;
    static constexpr int HALVES = C::PAIRED ? 1 : 2; /* of a tile, that are this CTA's */
    static constexpr int GROUPS = C::K_DIM / COLUMNS, ELEMENTS = GROUPS - 1; /* that group */
    static constexpr int READS = GROUPS + 1, ALL = READS * HALVES;
    static constexpr int AHEAD = C::PAIRED ? READS : READS / 3;
    static_assert(ALL % AHEAD == 0, "each read of a tile has its registers");
    static constexpr int TAIL_AT = ELEMENTS * COLUMNS; /* bytes before the elements */
    static constexpr int PART_BYTES = HALF * C::PART * 2; /* of a part, from the other CTA of a pair */

    entry_shared<C> &shared;
    int warp, lane;
    const uint32_t away; /* from a shared address to the same of the other CTA of a pair */
    const char *row[HALVES]; /* of the tile that is read */
    const uint8_t *bytes[HALVES];
    uint32_t rows; /* that there are, of that tile */
    uint4 read[AHEAD]; /* what is widened next */
    uint2 scales[HALVES];

    __device__ entry_loader(entry_shared<C> &of, int thread)
        : shared(of), warp(thread / 32), lane(thread % 32),
          away(C::PAIRED ? address_in(shared_address(&of), cluster_cta() ^ 1) - shared_address(&of) : 0) {}

    /* The half of a tile that a thread has first, of `which` 0, and the other one. */
    __device__ int half(int which) const { return C::PAIRED ? cluster_cta() ^ which : which; }
    __device__ int row_in(int which) const { return half(which) * HALF + warp * WARP_ROWS + lane % WARP_ROWS; }
    __device__ int quarter() const { return lane / WARP_ROWS; }

    /* Where the rows of the i-th tile of the unit lie: half of the lanes look up one each, of either half. */
    __device__ void look_up(entry_places<C> &places, int i) {
        const int last = places.work.count - 1;
        const entry_place place = places.place(places.work.first_tile + min(i, last));
        rows = __ballot_sync(0xffffffff, place.any);
#pragma unroll
        for (int which = 0; which < HALVES; which++) {
            const int from = which * WARP_ROWS + lane % WARP_ROWS;
            row[which] = (const char *)__shfl_sync(0xffffffff, (uint64_t)place.row, from);
            bytes[which] = (const uint8_t *)__shfl_sync(0xffffffff, (uint64_t)place.scales, from);
        }
        places.read_entry(places.work.first_tile + min(i + 1, last));
    }
    __device__ void show(uint32_t n) {
        uint8_t *shown = (uint8_t *)&shared.shown[n % C::STAGES];
        if (lane < 2) shown[half(lane) * (HALF / WARP_ROWS) + warp] = (uint8_t)(rows >> lane * WARP_ROWS);
    }

    /* ---- what is read, in the order of parts, of each half of the rows ---- */

    /* The i-th read of a tile: which part it belongs to, counted as they come, of which rows it is, which group of
     * COLUMNS, and which chunk of a thread in the group of elements, which the last part ends with. */
    struct read_place {
        int part, half, group, second;
    };
    static __device__ constexpr read_place place_of(int i) {
        const int each = 2 * HALVES, last = ENTRY_PARTS - 1, part = i / each < last ? i / each : last;
        const int within = i - part * each, reads = part == last ? 3 : 2;
        const int of_part = within % reads, group = of_part < 1 ? of_part : 1;
        return {part, within / reads, C::part_at(part) * C::PART_TILES + group, of_part - group};
    }
    /* In this order among the stores: the compiler would read earlier, for which there are no registers. */
    static __device__ uint4 read_chunk(const char *from) {
        uint4 to;
        asm volatile("ld.global.nc.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                     : "l"(from)
                     : "memory");
        return to;
    }
    __device__ uint4 read_at(const read_place &at) const {
        if (at.group < ELEMENTS) return read_chunk(row[at.half] + at.group * COLUMNS + quarter() * CHUNK);
        return read_chunk(row[at.half] + TAIL_AT + (quarter() + at.second * ROW_THREADS) * CHUNK);
    }
    __device__ void read_scales() {
#pragma unroll
        for (int i = 0; i < HALVES; i++) scales[i] = __ldg((const uint2 *)bytes[i]);
    }
    __device__ float scale_of(int half, int group) const {
        return power_of((group < 4 ? scales[half].x : scales[half].y) >> group % 4 * 8 & 255);
    }

    /* ---- what is made of it ---- */

    /* A chunk of elements of a row, swizzled as bulk copies write it. */
    __device__ void store_chunk(uint32_t group_tile, int half, int chunk, const uint32_t (&x)[4], uint32_t barrier) {
        const uint32_t to = group_tile + swizzled<COLUMNS>(row_in(half), chunk);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
        if constexpr (C::PAIRED) store_there(to + away, x, barrier + away);
    }
    __device__ void widen(uint32_t group_tile, int half, const uint4 &from, float scale, uint32_t barrier) {
        const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            uint32_t halves[4], x[4];
#pragma unroll
            for (int i = 0; i < 2; i++)
                e4m3_codes::widen(words[2 * eight + i], 0, halves[2 * i], halves[2 * i + 1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = __half22float2(bits_pair(halves[i]));
                x[i] = pack_pair<typename C::element>(scale * pair.x, scale * pair.y);
            }
            store_chunk(group_tile, half, 2 * quarter() + eight, x, barrier);
        }
    }
    /* The warp has done its part of a part; the bytes from the other CTA come by themselves. */
    __device__ void fill(uint32_t n, int part) {
        async_proxy_fence();
        __syncwarp();
        if (lane > 0) return;
        if (C::PAIRED && warp == 0)
            barrier_expect(shared.full_at(n, part), PART_BYTES);
        else
            barrier_arrive(shared.full_at(n, part));
    }

    /* What load() finds read, of the tile that has been looked up. */
    __device__ void read_first() {
        read_scales();
#pragma unroll
        for (int i = 0; i < AHEAD; i++) read[i] = read_at(place_of(i));
    }

    /* The n-th tile of all, of which the first has been read; next: the one behind it, of the unit's. */
    __device__ void load(entry_places<C> &places, uint32_t tiles, uint32_t n, int next) {
        const uint32_t tile = tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES;
        uint32_t barrier = 0; /* of the part */
        asm volatile("" : "+r"(warp), "+r"(lane)); /* no address is kept from tile to tile: registers are few */
#pragma unroll
        for (int i = 0; i < ALL; i++) {
            const read_place at = place_of(i);
            const int part = C::part_at(at.part);
            if (i == 0 || place_of(i - 1).part < at.part) {
                shared.wait_empty(n, part);
                barrier = shared.full_at(n, part);
            }
            if (i == 0) show(n);
            if (i + AHEAD == ALL) look_up(places, next);
            const uint32_t group_tile = tile + at.group * C::TILE_BYTES;
            const uint4 x = read[i % AHEAD];
            if (at.group < ELEMENTS) {
                widen(group_tile, at.half, x, scale_of(at.half, at.group), barrier);
            } else {
                const uint32_t words[4] = {x.x, x.y, x.z, x.w};
                store_chunk(group_tile, at.half, quarter() + at.second * ROW_THREADS, words, barrier);
            }
            read[i % AHEAD] = read_at(place_of((i + AHEAD) % ALL));
            if (i == ALL - 1 || at.part < place_of(i + 1).part) fill(n, part);
        }
        read_scales();
    }
};

/* The tiles of all units of the CTA. */
template <typename C>
__device__ void load_units(const cpa_cuda_sparse_args &args, entry_shared<C> &shared, uint32_t tiles, int thread) {
    uint32_t n = 0;
    for_units<C>(args, shared, LOADING, LOADERS_ALONE, WARPGROUP, thread == 0, [&](const listed_work &work) {
        if (work.count == 0) return;
        entry_loader<C> loader(shared, thread);
        entry_places<C> places{args, work, loader.row_in(loader.quarter() & 1), 0, -1};
        places.read_entry(work.first_tile);
        loader.look_up(places, 0);
        loader.read_first();
#pragma unroll 1
        for (int i = 0; i < work.count; i++, n++) loader.load(places, tiles, n, i + 1);
    });
}

} // namespace

#endif
