/* What topk and topk_merge share: where the k largest of the 32-bit orders that a team of CTAs has end, and a pass over
 * what is chosen in the order in which it lies.
 *
 * A source is what one CTA has: `size` entries, of which a unit of 4 lies in registers at a time,
 *
 *     source.load(at)               the 4 entries from `at` on; behind the last come such as are not chosen
 *     source.orders(unit, at, out)  their orders (kernels/topk.h)
 *     source.column(at)             a number by which equal ones are told apart, the smaller one first; below 2^31 */
#ifndef CPA_CUDA_NN_TOPK_SEARCH_CUH
#define CPA_CUDA_NN_TOPK_SEARCH_CUH

#include "kernels/cuda/device/team.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/topk.h"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP_LANES;
/* Units of a thread in a tile; a warp has neighbouring ones. */
constexpr int UNIT_ENTRIES = 4, UNITS = 2, WARP_UNIT = WARP_LANES * UNIT_ENTRIES;
constexpr int WARP_ENTRIES = UNITS * WARP_UNIT, TILE = WARPS * WARP_ENTRIES;
/* Bits of an order that each level of a search finds. */
constexpr int UPPER_BITS = 12, MIDDLE_BITS = 10, LOWER_BITS = 10, BINS = 1 << UPPER_BITS;

struct search_memory {
    uint32_t bins[BINS];
    uint32_t sums[BINS / 2]; /* over all CTAs of a team of several, of this one's part of the bins */
    uint32_t warp_sums[WARPS], warp_counts[2][WARPS];
    uint32_t before, among, count;
    int32_t bin;
};

/* How far a search has come: the upper bits of the order that it looks for, how many of those that share them are still
 * wanted, and how many there are. `all`: there are fewer orders than wanted. */
struct search {
    uint32_t found, wanted, among;
    bool all;
};

/* The sum over this lane of the warp and those before it. */
__device__ uint32_t sum_upto_lane(uint32_t x) {
    const int lane = threadIdx.x % WARP_LANES;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffff, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

/* visit(at, units) for each tile of the source, while the units of the next are loaded: those of this thread, of which
 * unit u begins at entry at + u * WARP_UNIT. All threads come along. */
template <typename Source, typename Visit>
__device__ void for_tiles(const Source &source, const Visit &visit) {
    const int32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    int32_t at = warp * WARP_ENTRIES + lane * UNIT_ENTRIES;
    typename Source::unit units[UNITS], next[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++) next[u] = source.load(at + u * WARP_UNIT);
    for (int32_t tile = 0; tile < source.size; tile += TILE, at += TILE) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            units[u] = next[u];
            next[u] = source.load(at + TILE + u * WARP_UNIT);
        }
        visit(at, units);
    }
}

/* ---- the search ---- */

/* Counts the keys, key(order, entry), that share the upper bits that were found, by their next BITS above SHIFT. */
template <int SHIFT, int BITS, typename Source, typename Key>
__device__ void count_bins(const Source &source, const Key &key, uint32_t found, search_memory &memory) {
    for (int b = threadIdx.x; b < 1 << BITS; b += THREADS) memory.bins[b] = 0;
    __syncthreads();
    for_tiles(source, [&](int32_t at, const auto &units) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint32_t orders[UNIT_ENTRIES];
            source.orders(units[u], at + u * WARP_UNIT, orders);
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++) {
                const uint32_t number = key(orders[e], at + u * WARP_UNIT + e);
                if (number > CPA_TOPK_NEVER && number >> SHIFT >> BITS == found)
                    atomicAdd(&memory.bins[(number >> SHIFT) & ((1u << BITS) - 1)], 1u);
            }
        }
    });
}

/* The bins of all CTAs added up: each adds its part. */
template <int BITS>
__device__ void share_bins(const team &cta, search_memory &memory) {
    const int part = (1 << BITS) / cta.size();
    cta.sync(); /* the bins are complete */
    if (cta.size() == 1) return;
    for (int i = threadIdx.x; i < part; i += THREADS) {
        uint32_t sum = 0;
        for (int c = 0; c < cta.size(); c++) sum += cta.read(memory.bins[cta.rank() * part + i], c);
        memory.sums[i] = sum;
    }
    cta.sync();
}

/* Finds the bin in which the wanted number of keys ends, counted from the last bin on. */
template <int BITS>
__device__ void find_bin(const team &cta, search &at, search_memory &memory) {
    constexpr int OWN = (1 << BITS) / THREADS;
    const int part = (1 << BITS) / cta.size(), top = (1 << BITS) - 1 - (int)threadIdx.x * OWN;
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    uint32_t counts[OWN], own = 0;
    share_bins<BITS>(cta, memory);
#pragma unroll
    for (int b = 0; b < OWN; b++) {
        const int bin = top - b;
        counts[b] = cta.size() == 1 ? memory.bins[bin] : cta.read(memory.sums[bin % part], bin / part);
        own += counts[b];
    }
    const uint32_t upto = sum_upto_lane(own);
    if (lane == WARP_LANES - 1) memory.warp_sums[warp] = upto;
    if (threadIdx.x == 0) memory.bin = -1;
    __syncthreads();
    uint32_t before = sum_upto_lane(lane < warp ? memory.warp_sums[lane] : 0);
    before = __shfl_sync(0xffffffff, before, WARP_LANES - 1) + upto - own;
    if (before < at.wanted && before + own >= at.wanted) {
#pragma unroll
        for (int b = 0; b < OWN; b++) {
            if (before < at.wanted && before + counts[b] >= at.wanted) {
                memory.bin = top - b;
                memory.before = before;
                memory.among = counts[b];
            }
            before += counts[b];
        }
    }
    __syncthreads();
    at.all = memory.bin < 0;
    if (at.all) return;
    at.found = at.found << BITS | (uint32_t)memory.bin;
    at.wanted -= memory.before;
    at.among = memory.among;
}

/* How many keys of this CTA lie in the bin that was found last, and above it. */
template <int BITS>
__device__ uint32_t count_from(const search &at, const search_memory &memory) {
    const int bin = (int)(at.found & ((1u << BITS) - 1));
    uint32_t sum = 0;
    for (int b = bin + (int)threadIdx.x; b < 1 << BITS; b += THREADS) sum += memory.bins[b];
    return (uint32_t)block_sum(sum);
}

/* ---- what is chosen ---- */

/* Chosen are the orders above `order`, and of those that equal it the columns up to `last_column`. */
struct chosen_rule {
    uint32_t order;
    int32_t last_column;
    __device__ bool takes(uint32_t of, int32_t column) const {
        return of > order || (of == order && column <= last_column);
    }
};

/* All, where there are fewer than wanted. */
__device__ chosen_rule all_chosen() {
    return {CPA_TOPK_NEVER + 1, INT32_MAX};
}

/* The rule of a search that has found its order: where more than wanted equal it, the first columns are looked for in
 * the same way. */
template <typename Source>
__device__ chosen_rule rule_of(const team &cta, const Source &source, const search &at, search_memory &memory) {
    if (at.among == at.wanted) return {at.found, INT32_MAX};
    const uint32_t order = at.found;
    auto earliness = [&](uint32_t of, int32_t entry) {
        return of == order ? ~(uint32_t)source.column(entry) : CPA_TOPK_NEVER;
    };
    search columns = {0, at.wanted, 0, false};
    count_bins<MIDDLE_BITS + LOWER_BITS, UPPER_BITS>(source, earliness, columns.found, memory);
    find_bin<UPPER_BITS>(cta, columns, memory);
    count_bins<LOWER_BITS, MIDDLE_BITS>(source, earliness, columns.found, memory);
    find_bin<MIDDLE_BITS>(cta, columns, memory);
    count_bins<0, LOWER_BITS>(source, earliness, columns.found, memory);
    find_bin<LOWER_BITS>(cta, columns, memory);
    return {order, (int32_t)~columns.found};
}

template <typename Source>
__device__ uint32_t count_chosen(const Source &source, const chosen_rule &rule) {
    uint32_t count = 0;
    for_tiles(source, [&](int32_t at, const auto &units) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint32_t orders[UNIT_ENTRIES];
            source.orders(units[u], at + u * WARP_UNIT, orders);
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++)
                count += orders[e] >= rule.order && rule.takes(orders[e], source.column(at + u * WARP_UNIT + e));
        }
    });
    return (uint32_t)block_sum(count);
}

/* put(entry, order, place) for what is chosen, whose places count from `place` on in the order of the entries; returns
 * the place behind the last. All threads come along. */
template <typename Source, typename Put>
__device__ uint32_t for_chosen(const Source &source, const chosen_rule &rule, uint32_t place, search_memory &memory,
                               const Put &put) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const uint32_t lower = (1u << lane) - 1;
    int turn = 0; /* warps that are a tile ahead write the other counts */
    for_tiles(source, [&](int32_t at, const auto &units) {
        uint32_t taken = 0, places[UNITS], of_warp = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint32_t orders[UNIT_ENTRIES];
            source.orders(units[u], at + u * WARP_UNIT, orders);
            uint32_t of_unit = 0;
            places[u] = of_warp;
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++) {
                const int32_t entry = at + u * WARP_UNIT + e;
                const bool takes = orders[e] >= rule.order && rule.takes(orders[e], source.column(entry));
                const uint32_t votes = __ballot_sync(0xffffffff, takes);
                taken |= (uint32_t)takes << (u * UNIT_ENTRIES + e);
                places[u] += __popc(votes & lower);
                of_unit += __popc(votes);
            }
            of_warp += of_unit;
        }
        if (lane == 0) memory.warp_counts[turn][warp] = of_warp;
        __syncthreads();
        const uint32_t upto = sum_upto_lane(lane < WARPS ? memory.warp_counts[turn][lane] : 0);
        const uint32_t first = place + __shfl_sync(0xffffffff, upto, warp) - of_warp;
        place += __shfl_sync(0xffffffff, upto, WARPS - 1);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const uint32_t of_unit = taken >> (u * UNIT_ENTRIES) & ((1u << UNIT_ENTRIES) - 1);
            uint32_t orders[UNIT_ENTRIES], next = first + places[u];
            if (of_unit == 0) continue;
            source.orders(units[u], at + u * WARP_UNIT, orders);
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++)
                if (of_unit >> e & 1) put(at + u * WARP_UNIT + e, orders[e], next++);
        }
        turn ^= 1;
    });
    return place;
}

} // namespace

#endif
