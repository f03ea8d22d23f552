/* An update of a reserved attend plan: what attend_plan.c and attend_plan_pieces.c do on the host for a plan that is
 * set, from lengths and block tables that lie on the device. A CTA a sequence takes over its table and makes its item.
 * Then one CTA assigns the units: all of its threads count tiles and write pieces, but one alone says where to cut, as
 * each cut depends on the one before. That is why it only adds, and leaves a few integers a cut. */
#include "kernels/cuda/attend/attend_assign.h"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int READ_THREADS = 256, ASSIGN_THREADS = 256, ASSIGN_WARPS = ASSIGN_THREADS / WARP_LANES;

/* ---- sequences ---- */

__device__ cpa_attend_extent extent_of(const cpa_attend_update &update, int32_t block_size, int64_t s) {
    if (update.kv_indptr) return cpa_attend_extent_of(&update, block_size, s);
    const int64_t table = s * update.table_stride;
    if (!update.lengths) return {table, 0};
    return {table,
            update.length_bytes == 4 ? ((const int32_t *)update.lengths)[s] : ((const int64_t *)update.lengths)[s]};
}

/* What an update says of a sequence. */
struct sequence {
    bool given, refused;
    int64_t table, length;
    cpa_attend_rows rows;
    cpa_placement placement;
    int32_t asker; /* the rank of its rows; of a sequence that is empty or refused, this one */

    __device__ sequence(const cpa_attend_update &update, const cpa_attend_reservation &r, int64_t s) {
        given = s < update.sequences;
        const cpa_attend_extent extent = given ? extent_of(update, r.block_size, s) : cpa_attend_extent{0, 0};
        table = extent.table;
        length = extent.length;
        rows = given ? cpa_attend_rows_of(&update, r.rows, s) : cpa_attend_rows{0, 0, 1};
        placement = {CPA_SHARDED, given && update.first_ranks ? update.first_ranks[s] : 0};
        refused = !cpa_placement_is_valid(r.map, placement) || !rows.fits ||
                  (length != 0 && (length < rows.count || length > r.tokens));
        if (refused) placement.rank = 0, length = 0;
        asker = length > 0 ? cpa_owner_rank(r.map, placement, length - 1) : r.rank;
    }
    __device__ int64_t keys_on(const cpa_attend_reservation &r, int32_t rank) const {
        return cpa_tokens_before(r.map, cpa_tokens_on(r.map, placement, rank), length);
    }
};

/* Copies the entries of so many keys; whether one of them is no block. */
__device__ bool take_table(const cpa_cuda_update_args &a, int64_t s, const sequence &found, int64_t keys) {
    const cpa_attend_reservation &r = a.reservation;
    const int32_t *from = a.update.block_tables + found.table;
    const int64_t entries = (keys + r.block_size - 1) / r.block_size;
    bool bad = false;
#pragma unroll 4
    for (int64_t e = threadIdx.x; e < entries; e += READ_THREADS) {
        const int32_t block = from[e];
        const bool fits = block >= 0 && block < r.num_blocks;
        a.tables[s * r.table_stride + e] = fits ? block : 0;
        bad |= !fits;
    }
    return __syncthreads_or(bad);
}

__device__ cpa_cuda_item item_of(const cpa_cuda_update_args &a, int64_t s, const sequence &found, bool refused,
                                 int64_t keys) {
    const cpa_attend_reservation &r = a.reservation;
    const cpa_attend_place place = r.places[found.asker];
    /* An empty sequence has rows where results are those of the attend, and not of a merge by row maps. */
    const bool empty_rows = found.length == 0 && !r.row_maps, attends = found.length > 0 && (keys > 0 || refused);
    const bool active =
        found.given && (refused || empty_rows || attends || (found.length > 0 && found.asker == r.rank));
    cpa_cuda_item to = {};
    to.item.q_row = place.first_row + found.rows.first;
    to.item.q_count = active ? found.rows.count : 0;
    to.item.q_set = cpa_tokens_on(r.map, found.placement, found.asker);
    to.item.k_set = cpa_tokens_on(r.map, found.placement, r.rank);
    to.item.q_first = found.length > 0 ? cpa_tokens_before(r.map, to.item.q_set, found.length - found.rows.count) : 0;
    to.item.k_count = refused ? 0 : keys;
    to.item.table = s * r.table_stride;
    to.state_shift = place.state_shift;
    to.begin = s * r.rows * a.group;
    to.ready = found.asker == r.rank && r.ready_rows > 0;
    to.refused = refused;
    return to;
}

__global__ void __launch_bounds__(READ_THREADS) read_sequences(const __grid_constant__ cpa_cuda_update_args a) {
    const cpa_attend_reservation &r = a.reservation;
    const int64_t s = blockIdx.x;
    const sequence found(a.update, r, s);
    const int64_t keys = found.keys_on(r, r.rank);
    const bool bad_table = take_table(a, s, found, keys);
    if (threadIdx.x == 0) a.items[s] = item_of(a, s, found, found.refused || bad_table, keys);
    for (int32_t rank = threadIdx.x; r.row_maps && rank < r.map.cp_size; rank += READ_THREADS) {
        const bool own = found.given && found.asker == r.rank && rank == r.rank && (found.refused || found.length > 0);
        const bool other = found.asker == r.rank && found.keys_on(r, rank) > 0;
        r.row_maps[rank * r.sequences + s] = own || other ? (int32_t)s : -1;
    }
}

/* ---- pieces ---- */

__device__ int64_t tiles_of(const cpa_cuda_item &item) {
    return (item.item.k_count + CPA_CUDA_DECODE_KEYS - 1) / CPA_CUDA_DECODE_KEYS;
}

__device__ int32_t packed_rows(const cpa_cuda_update_args &a, const cpa_cuda_item &item) {
    return (int32_t)item.item.q_count * a.group;
}

/* None of an item without rows. */
__device__ int32_t units_of(const cpa_cuda_update_args &a, const cpa_cuda_item &item) {
    return (packed_rows(a, item) + a.team.rows - 1) / a.team.rows;
}

/* The sum over all threads, for all of them. */
__device__ int64_t block_sum(int64_t x) {
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    const unsigned long long sum = warp_sum((unsigned long long)x);
    if (threadIdx.x % WARP_LANES == 0) atomicAdd(&total, sum);
    __syncthreads();
    const int64_t result = (int64_t)total;
    __syncthreads();
    return result;
}

/* The shares of the sequences as they are: cpa_cuda_share_decode with teams that are fixed. */
__device__ cpa_cuda_decode_shares share(const cpa_cuda_update_args &a) {
    cpa_cuda_decode_shares shares = {};
    int64_t load = 0, pieces = 0;
    shares.teams = a.teams;
    for (int64_t s = threadIdx.x; s < a.reservation.sequences; s += ASSIGN_THREADS)
        load += units_of(a, a.items[s]) * (tiles_of(a.items[s]) + CPA_CUDA_DECODE_OVERHEAD);
    shares.cap = cpa_cuda_decode_cap(block_sum(load), a.teams, a.heads);
    for (int64_t s = threadIdx.x; s < a.reservation.sequences; s += ASSIGN_THREADS)
        pieces += units_of(a, a.items[s]) * cpa_cuda_decode_pieces(tiles_of(a.items[s]), shares.cap);
    shares.apart = block_sum(pieces) <= a.teams;
    return shares;
}

/* The items whose units are assigned next, in order. */
struct item_list {
    cpa_cuda_decode_unit units[ASSIGN_THREADS];          /* each of the item's */
    int32_t items[ASSIGN_THREADS], rows[ASSIGN_THREADS]; /* packed rows */
    int32_t of_warp[ASSIGN_WARPS];

    /* Takes the items among the next ASSIGN_THREADS sequences that are ready, or are not; how many. */
    __device__ int fill(const cpa_cuda_update_args &a, const cpa_cuda_decode_shares &shares, int64_t first, int ready) {
        const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        const int64_t s = first + threadIdx.x;
        const bool taken =
            s < a.reservation.sequences && a.items[s].item.q_count > 0 && (a.items[s].ready != 0) == (ready != 0);
        const uint32_t votes = __ballot_sync(0xffffffff, taken);
        int at = __popc(votes & ((1u << lane) - 1)), n = 0;
        __syncthreads(); /* what the list held is assigned */
        if (lane == 0) of_warp[warp] = __popc(votes);
        __syncthreads();
        for (int w = 0; w < ASSIGN_WARPS; w++) {
            if (w < warp) at += of_warp[w];
            n += of_warp[w];
        }
        if (taken) {
            units[at] = cpa_cuda_decode_unit_of(&shares, tiles_of(a.items[s]));
            items[at] = (int32_t)s;
            rows[at] = packed_rows(a, a.items[s]);
        }
        __syncthreads();
        return n;
    }
};

__global__ void __launch_bounds__(ASSIGN_THREADS) assign_pieces(const __grid_constant__ cpa_cuda_update_args a) {
    __shared__ item_list list;
    __shared__ int32_t n_cuts, busy_teams;
    const cpa_cuda_decode_shares shares = share(a);
    cpa_cuda_assigner d = {};
    for (int ready = a.reservation.ready_rows > 0; ready >= 0; ready--) {
        for (int64_t first = 0; first < a.reservation.sequences; first += ASSIGN_THREADS) {
            const int n = list.fill(a, shares, first, ready);
            if (threadIdx.x != 0) continue;
            for (int i = 0; i < n; i++)
                cpa_cuda_assign_item(&a, &shares, &d, list.units[i], list.items[i], list.rows[i]);
        }
    }
    if (threadIdx.x == 0) n_cuts = d.cuts, busy_teams = d.cuts > 0 ? (int32_t)d.turn.team + 1 : 0;
    __syncthreads();
    const int32_t ctas = a.team.ctas, n_pieces = n_cuts * ctas;
    for (int32_t i = threadIdx.x; i < n_pieces; i += ASSIGN_THREADS) cpa_cuda_write_cut(&a, i / ctas, i % ctas, n_cuts);
    for (int32_t cta = busy_teams * ctas + (int32_t)threadIdx.x; cta < a.teams * ctas; cta += ASSIGN_THREADS) {
        cpa_cuda_piece idle = {};
        idle.partial = idle.next = -1;
        a.pieces[cta] = idle;
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_read_sequences(const cpa_cuda_update_args *args, cpa_stream *stream) {
    read_sequences<<<(unsigned)args->reservation.sequences, READ_THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "attend plan");
}

extern "C" cpa_status cpa_cuda_assign_pieces(const cpa_cuda_update_args *args, cpa_stream *stream) {
    assign_pieces<<<1, ASSIGN_THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "attend plan");
}
