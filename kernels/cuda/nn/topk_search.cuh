/* What topk and topk_merge share: where the k largest of the 32-bit orders that one CTA or a team of them has end, and
 * a pass over what is chosen in the order in which it lies.
 *
 * A source is what one CTA has: `size` entries, of which a unit of 4 lies in registers at a time,
 *
 *     source.load(at, units)        units of entries from `at` on, each WARP_UNIT entries behind the one before; behind
 *                                   the last come such as are not chosen
 *     source.orders(unit, at, out)  the orders of a unit's entries (kernels/topk.h)
 *     source.column(at)             a number by which equal ones are told apart, the smaller one first; below 2^31 */
#ifndef CPA_CUDA_NN_TOPK_SEARCH_CUH
#define CPA_CUDA_NN_TOPK_SEARCH_CUH

#include "kernels/cuda/device/team.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/topk.h"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP_LANES;
/* Entries of a unit, and those of a warp's units, which are neighbours. */
constexpr int UNIT_ENTRIES = 4, WARP_UNIT = WARP_LANES * UNIT_ENTRIES;
/* Units of a thread in a tile, but for passes that have more of them on their way. */
constexpr int UNITS = 2;
/* Bits of an order that each level of a search finds. */
constexpr int UPPER_BITS = 12, MIDDLE_BITS = 10, LOWER_BITS = 10, BINS = 1 << UPPER_BITS;

struct search_memory {
    alignas(16) uint32_t bins[BINS];
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

/* visit(at, units) for each tile of the source, until it returns false, while the units of the next tile are loaded:
 * those of this thread, of which unit u begins at entry at + u * WARP_UNIT. All threads come along. */
template <int OWN, typename Source, typename Visit>
__device__ void for_tiles(const Source &source, const Visit &visit) {
    constexpr int WARP_ENTRIES = OWN * WARP_UNIT, TILE = WARPS * WARP_ENTRIES;
    const int32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    int32_t at = warp * WARP_ENTRIES + lane * UNIT_ENTRIES;
    typename Source::unit units[OWN], next[OWN];
    source.load(at, next);
    for (int32_t tile = 0; tile < source.size; tile += TILE, at += TILE) {
#pragma unroll
        for (int u = 0; u < OWN; u++) units[u] = next[u];
        source.load(at + TILE, next);
        if (!visit(at, units)) return;
    }
}

/* ---- the search ---- */

/* Counts the keys, key(order, entry), that share the upper bits that were found, by their next BITS above SHIFT. */
template <int SHIFT, int BITS, typename Source, typename Key>
__device__ void count_bins(const Source &source, const Key &key, uint32_t found, search_memory &memory) {
    for (int b = threadIdx.x; b < 1 << BITS; b += THREADS) memory.bins[b] = 0;
    __syncthreads();
    for_tiles<UNITS>(source, [&](int32_t at, const auto &units) {
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
        return true;
    });
}

/* A team whose bins are added up in `sums`, BINS numbers in the shared memory of each CTA. */
struct summing_team : team {
    uint32_t *sums;
};

/* The counts of neighbouring bins. */
template <int N>
struct alignas(N % 4 ? 8 : 16) bin_counts {
    uint32_t of[N];
};

/* The bins from `begin` on, once all have been counted. */
template <int BITS, int N>
__device__ bin_counts<N> read_bins(const lone_cta &cta, int begin, const search_memory &memory) {
    cta.sync();
    return *(const bin_counts<N> *)(memory.bins + begin);
}

/* Those of all CTAs added up: each adds its part. */
template <int BITS, int N>
__device__ bin_counts<N> read_bins(const summing_team &cta, int begin, const search_memory &memory) {
    const int part = (1 << BITS) / cta.size();
    bin_counts<N> counts;
    cta.sync();
    for (int i = threadIdx.x; i < part; i += THREADS) {
        uint32_t sum = 0;
        for (int c = 0; c < cta.size(); c++) sum += cta.read(memory.bins[cta.rank() * part + i], c);
        cta.sums[i] = sum;
    }
    cta.sync();
#pragma unroll
    for (int i = 0; i < N; i++) counts.of[i] = cta.read(cta.sums[(begin + i) % part], (begin + i) / part);
    return counts;
}

/* Finds the bin in which the wanted number of keys ends, counted from the last bin on. */
template <int BITS, typename Team>
__device__ void find_bin(const Team &cta, search &at, search_memory &memory) {
    constexpr int OWN = (1 << BITS) / THREADS;
    const int begin = (1 << BITS) - OWN - (int)threadIdx.x * OWN;
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const bin_counts<OWN> counts = read_bins<BITS, OWN>(cta, begin, memory);
    uint32_t own = 0;
#pragma unroll
    for (int b = 0; b < OWN; b++) own += counts.of[b];
    const uint32_t upto = sum_upto_lane(own);
    if (lane == WARP_LANES - 1) memory.warp_sums[warp] = upto;
    if (threadIdx.x == 0) memory.bin = -1;
    __syncthreads();
    uint32_t before = sum_upto_lane(lane < warp ? memory.warp_sums[lane] : 0);
    before = __shfl_sync(0xffffffff, before, WARP_LANES - 1) + upto - own;
    if (before < at.wanted && before + own >= at.wanted) {
#pragma unroll
        for (int b = OWN - 1; b >= 0; b--) {
            if (before < at.wanted && before + counts.of[b] >= at.wanted) {
                memory.bin = begin + b;
                memory.before = before;
                memory.among = counts.of[b];
            }
            before += counts.of[b];
        }
    }
    __syncthreads();
    at.all = memory.bin < 0;
    if (at.all) return;
    at.found = at.found << BITS | (uint32_t)memory.bin;
    at.wanted -= memory.before;
    at.among = memory.among;
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
template <typename Team, typename Source>
__device__ chosen_rule rule_of(const Team &cta, const Source &source, const search &at, search_memory &memory) {
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

/* What chooses the k best. */
template <typename Team, typename Source>
__device__ chosen_rule find_rule(const Team &cta, const Source &source, uint32_t k, search_memory &memory) {
    auto order_itself = [](uint32_t order, int32_t) { return order; };
    search at = {0, k, 0, false};
    count_bins<MIDDLE_BITS + LOWER_BITS, UPPER_BITS>(source, order_itself, at.found, memory);
    find_bin<UPPER_BITS>(cta, at, memory);
    if (at.all) return all_chosen();
    count_bins<LOWER_BITS, MIDDLE_BITS>(source, order_itself, at.found, memory);
    find_bin<MIDDLE_BITS>(cta, at, memory);
    count_bins<0, LOWER_BITS>(source, order_itself, at.found, memory);
    find_bin<LOWER_BITS>(cta, at, memory);
    return rule_of(cta, source, at, memory);
}

/* What a rule takes of a unit: bit e for its entry e. */
template <typename Source>
__device__ uint32_t taken_of_unit(const Source &source, const chosen_rule &rule, const typename Source::unit &unit,
                                  int32_t at) {
    uint32_t orders[UNIT_ENTRIES], taken = 0;
    source.orders(unit, at, orders);
#pragma unroll
    for (int e = 0; e < UNIT_ENTRIES; e++)
        taken |= (uint32_t)(orders[e] >= rule.order && rule.takes(orders[e], source.column(at + e))) << e;
    return taken;
}

template <typename Source>
__device__ uint32_t count_chosen(const Source &source, const chosen_rule &rule) {
    uint32_t count = 0;
    for_tiles<UNITS>(source, [&](int32_t at, const auto &units) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            count += __popc(taken_of_unit(source, rule, units[u], at + u * WARP_UNIT));
        return true;
    });
    return (uint32_t)block_sum(count);
}

/* The ones of each byte, which has no others than its 4 lower bits. */
__device__ uint32_t ones_of_bytes(uint32_t bits) {
    bits -= bits >> 1 & 0x05050505u;
    return (bits & 0x03030303u) + (bits >> 2 & 0x03030303u);
}

__device__ uint32_t byte_of(uint32_t bytes, int which) {
    return bytes >> 8 * which & 0xff;
}

/* put(entry, unit, e, place) for what is taken, entry e of a unit, taken(unit, at) of which has a bit for each entry.
 * Places count from `place` on in the order of the entries; returns the place behind the last, or, once that is more
 * than `most`, one that is, with the further entries not put. All threads come along.
 *
 * The units of a thread have a byte each in a word of counts, whose sums over a warp, at most WARP_UNIT, fit too. */
template <int OWN, typename Source, typename Taken, typename Put>
__device__ uint32_t for_taken(const Source &source, const Taken &taken_of, uint32_t place, uint32_t most,
                              search_memory &memory, const Put &put) {
    static_assert(OWN <= 4 && WARP_UNIT < 256, "a byte for each unit");
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    int turn = 0; /* warps that are a tile ahead write the other counts */
    for_tiles<OWN>(source, [&](int32_t at, const auto &units) {
        uint32_t taken = 0, of_warp = 0;
#pragma unroll
        for (int u = 0; u < OWN; u++) taken |= taken_of(units[u], at + u * WARP_UNIT) << 8 * u;
        const uint32_t own = ones_of_bytes(taken), upto = sum_upto_lane(own);
        const uint32_t of_units = __shfl_sync(0xffffffff, upto, WARP_LANES - 1);
#pragma unroll
        for (int u = 0; u < OWN; u++) of_warp += byte_of(of_units, u);
        if (lane == 0) memory.warp_counts[turn][warp] = of_warp;
        __syncthreads();
        const uint32_t upto_warp = sum_upto_lane(lane < WARPS ? memory.warp_counts[turn][lane] : 0);
        uint32_t first = place + __shfl_sync(0xffffffff, upto_warp, warp) - of_warp;
        place += __shfl_sync(0xffffffff, upto_warp, WARPS - 1);
        turn ^= 1;
        if (place > most) return false; /* alike for all threads */
#pragma unroll
        for (int u = 0; u < OWN; u++) {
            uint32_t next = first + byte_of(upto - own, u);
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++)
                if (taken >> (8 * u + e) & 1) put(at + u * WARP_UNIT + e, units[u], e, next++);
            first += byte_of(of_units, u);
        }
        return true;
    });
    return place;
}

/* put(entry, place) for what a rule chooses. */
template <typename Source, typename Put>
__device__ uint32_t for_chosen(const Source &source, const chosen_rule &rule, uint32_t place, search_memory &memory,
                               const Put &put) {
    const auto taken = [&](const typename Source::unit &unit, int32_t at) {
        return taken_of_unit(source, rule, unit, at);
    };
    return for_taken<UNITS>(source, taken, place, UINT32_MAX, memory,
                            [&](int32_t entry, const auto &, int, uint32_t at) { put(entry, at); });
}

} // namespace

#endif
