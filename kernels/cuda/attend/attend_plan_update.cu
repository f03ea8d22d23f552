/* An update of a reserved attend plan: what attend_plan.c and attend_plan_pieces.c do on the host for a plan that is
 * set, from lengths and block tables that lie on the device. A CTA a sequence takes over its table and makes its items.
 * Then one CTA assigns the units: all of its threads count tiles and write pieces, but one alone says where to cut, as
 * each cut depends on the one before. That is why it only adds, and leaves a few integers a cut. */
#include "kernels/attend_update.h"
#include "kernels/cuda/attend/attend_assign.h"
#include "kernels/cuda/attend/attend_tiles.h"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int READ_THREADS = 256, ASSIGN_THREADS = 256, ASSIGN_WARPS = ASSIGN_THREADS / WARP_LANES;

/* ---- sequences ---- */

/* The largest of the entries of qo_indptr in front of a sequence's own, at least 0, where rows follow from them; for all
 * threads. */
__device__ int64_t rows_before(const cpa_attend_reservation &r, const cpa_attend_update &update, int64_t s) {
    __shared__ int32_t largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    int32_t mine = 0;
    const int64_t n = update.qo_indptr && !r.fixed_rows && s < update.sequences ? s : 0;
    for (int64_t i = threadIdx.x; i < n; i += READ_THREADS) mine = max(mine, update.qo_indptr[i]);
    mine = __reduce_max_sync(0xffffffff, mine);
    if (threadIdx.x % WARP_LANES == 0 && mine > 0) atomicMax(&largest, mine);
    __syncthreads();
    return largest;
}

/* What an update says of a sequence. One that it does not have has neither keys nor rows. */
__device__ cpa_attend_sequence sequence_of(const cpa_cuda_update_args &a, int64_t s, int64_t before) {
    if (s < a.update.sequences) return cpa_attend_sequence_of(&a.reservation, &a.update, s, before);
    cpa_attend_sequence none = {};
    const bool ragged = a.update.qo_indptr && !a.reservation.fixed_rows;
    none.rows.first = ragged ? a.reservation.total_rows : s * a.reservation.rows;
    none.first_asker = a.reservation.rank;
    return none;
}

/* Copies the entries of so many keys; whether one of them is no block. */
__device__ bool take_table(const cpa_cuda_update_args &a, int64_t s, int64_t table, int64_t keys) {
    const cpa_attend_reservation &r = a.reservation;
    const int32_t *from = a.update.block_tables + table;
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

/* The item of the rows of one rank. Where several may ask for rows of a sequence, each has room for all of them. */
__device__ cpa_cuda_item item_of(const cpa_cuda_update_args &a, int64_t s, const cpa_attend_sequence &found,
                                 int32_t index, int32_t askers, int32_t refused, int64_t keys) {
    const cpa_attend_reservation &r = a.reservation;
    const int32_t asker = cpa_attend_asker(&r, &found, index);
    const cpa_attend_place place = r.places[asker];
    cpa_cuda_item to = {};
    to.item = cpa_attend_item_of(&r, &found, asker, place, keys, s * r.table_stride, refused);
    to.state_shift = place.state_shift;
    to.begin = (askers > 1 ? (s * askers + index) * r.rows : found.rows.first) * a.group;
    to.ready = asker == r.rank && r.ready_rows > 0;
    to.refused = refused;
    return to;
}

/* Where the states of each row of a sequence come from, and which row of the step each that is attended is. */
__device__ void map_rows(const cpa_attend_reservation &r, int64_t s, const cpa_attend_sequence &found) {
    for (int32_t i = threadIdx.x; i < r.map.cp_size * r.rows; i += READ_THREADS) {
        const int32_t rank = i / r.rows, of_sequence = i % r.rows;
        const int64_t row = s * r.rows + of_sequence;
        r.row_maps[rank * r.sequences * r.rows + row] = cpa_attend_map_row(&r, &found, rank, of_sequence);
        r.step_rows[r.places[rank].first_row + row] = cpa_attend_step_row(&r, &found, rank, of_sequence);
    }
}

__global__ void __launch_bounds__(READ_THREADS) read_sequences(const __grid_constant__ cpa_cuda_update_args a) {
    const cpa_attend_reservation &r = a.reservation;
    const int64_t s = blockIdx.x;
    const cpa_attend_sequence found = sequence_of(a, s, rows_before(a.reservation, a.update, s));
    const int64_t keys = cpa_attend_keys_on(&r, &found, r.rank);
    const bool bad_table = take_table(a, s, found.table, keys);
    const int32_t refused = !found.refused && bad_table ? CPA_REFUSED_TABLE : found.refused;
    const int32_t askers = cpa_attend_askers(&r);
    for (int32_t i = threadIdx.x; i < askers; i += READ_THREADS)
        a.items[s * askers + i] = item_of(a, s, found, i, askers, refused, keys);
    if (r.row_maps) map_rows(r, s, found);
}

/* ---- pieces ---- */

__device__ int64_t tiles_of(const cpa_cuda_item &item) {
    return (item.item.k_count + CPA_CUDA_DECODE_KEYS - 1) / CPA_CUDA_DECODE_KEYS;
}

__device__ int32_t packed_rows(const cpa_cuda_update_args &a, const cpa_cuda_item &item) {
    return (int32_t)item.item.q_count * a.group;
}

/* None of an item without rows, and of one of prefill tiles. */
__device__ int32_t units_of(const cpa_cuda_update_args &a, const cpa_cuda_item &item) {
    return cpa_cuda_is_tiled(&a, &item) ? 0 : (packed_rows(a, item) + a.team.rows - 1) / a.team.rows;
}

/* The shares of the items as they are: cpa_cuda_share_decode with teams that are fixed. */
__device__ cpa_cuda_decode_shares share(const cpa_cuda_update_args &a) {
    cpa_cuda_decode_shares shares = {};
    int64_t load = 0, pieces = 0;
    shares.teams = a.teams;
    for (int64_t s = threadIdx.x; s < a.n_items; s += ASSIGN_THREADS)
        load += units_of(a, a.items[s]) * (tiles_of(a.items[s]) + CPA_CUDA_DECODE_OVERHEAD);
    shares.cap = cpa_cuda_decode_cap(block_sum(load), a.teams, a.heads);
    for (int64_t s = threadIdx.x; s < a.n_items; s += ASSIGN_THREADS)
        pieces += units_of(a, a.items[s]) * cpa_cuda_decode_pieces(tiles_of(a.items[s]), shares.cap);
    shares.apart = block_sum(pieces) <= a.teams;
    return shares;
}

/* Tells the host of the first sequence whose rows are refused. */
__device__ void tell_refused(const cpa_cuda_update_args &a) {
    __shared__ int32_t first;
    if (threadIdx.x == 0) first = (int32_t)a.n_items;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < a.n_items; i += ASSIGN_THREADS)
        if (a.items[i].refused && a.items[i].item.q_count > 0) atomicMin(&first, i);
    __syncthreads();
    if (threadIdx.x != 0) return;
    a.refusal->sequence = first < a.n_items ? first / cpa_attend_askers(&a.reservation) : -1;
    a.refusal->why = first < a.n_items ? a.items[first].refused : 0;
}

/* The items whose units are assigned next, in order. */
struct item_list {
    cpa_cuda_decode_unit units[ASSIGN_THREADS];          /* each of the item's */
    int32_t items[ASSIGN_THREADS], rows[ASSIGN_THREADS]; /* packed rows */
    int32_t of_warp[ASSIGN_WARPS];

    /* Takes those of the next ASSIGN_THREADS items that are ready, or are not; how many. */
    __device__ int fill(const cpa_cuda_update_args &a, const cpa_cuda_decode_shares &shares, int64_t first, int ready) {
        const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        const int64_t s = first + threadIdx.x;
        const bool taken = s < a.n_items && units_of(a, a.items[s]) > 0 && (a.items[s].ready != 0) == (ready != 0);
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
    tell_refused(a);
    for (int ready = a.reservation.ready_rows > 0; ready >= 0; ready--) {
        for (int64_t first = 0; first < a.n_items; first += ASSIGN_THREADS) {
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
