/* The prefill pieces of an update of a reserved plan: what attend_plan_pieces.c does on the host, by one CTA. It lists
 * the items that are cut into tiles, looks for the split of their keys, and writes all pieces, the longest first. What
 * is left of the room for pieces and splits is filled up with such as have no rows. */
#include "kernels/cuda/attend/attend_tiles.h"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int THREADS = 1024, WARPS = THREADS / WARP_LANES;

/* ---- all threads together ---- */

/* The sum over the threads before, and in *total that over all. */
__device__ int32_t sum_before(int32_t x, int32_t *total) {
    __shared__ int32_t of_warp[WARPS];
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    int32_t sum = x;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads(); /* what the call before left has been read */
    if (lane == WARP_LANES - 1) of_warp[warp] = sum;
    __syncthreads();
    int32_t before = 0, all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) before = all;
        all += of_warp[w];
    }
    *total = all;
    return before + sum - x;
}

__device__ int32_t largest(int32_t x) {
    __shared__ int32_t of_warp[WARPS];
    const int32_t own = __reduce_max_sync(0xffffffff, x);
    __syncthreads();
    if (threadIdx.x % WARP_LANES == 0) of_warp[threadIdx.x / WARP_LANES] = own;
    __syncthreads();
    return __reduce_max_sync(0xffffffff, of_warp[threadIdx.x % WARP_LANES]);
}

/* ---- items ---- */

/* The items of tiles in order; how many they are. */
__device__ int32_t list_items(const cpa_cuda_update_args &a) {
    int32_t n = 0, more;
    for (int64_t first = 0; first < a.n_items; first += THREADS, n += more) {
        const int64_t i = first + threadIdx.x;
        const bool is_tiled = i < a.n_items && cpa_cuda_is_tiled(&a, &a.items[i]);
        const int32_t at = n + sum_before(is_tiled, &more);
        if (is_tiled) a.tiles.items[at] = cpa_cuda_tiled_item_of(&a, (int32_t)i);
    }
    __syncthreads();
    return n;
}

/* Tells each item what there is of those before it; what there is of all. */
__device__ cpa_cuda_tile_count place_items(const cpa_cuda_update_args &a, int32_t n, int64_t split) {
    cpa_cuda_tile_count all = {}, more;
    for (int32_t first = 0; first < n; first += THREADS) {
        const int32_t i = first + (int32_t)threadIdx.x;
        cpa_cuda_tile_count own = {};
        if (i < n) own = cpa_cuda_tile_count_of(&a.tiles.items[i], split);
        const cpa_cuda_tile_count before = {all.pieces + sum_before(own.pieces, &more.pieces),
                                            all.partial_rows + sum_before(own.partial_rows, &more.partial_rows),
                                            all.splits + sum_before(own.splits, &more.splits)};
        if (i < n) a.tiles.items[i].before = before;
        all.pieces += more.pieces;
        all.partial_rows += more.partial_rows;
        all.splits += more.splits;
    }
    __syncthreads();
    return all;
}

/* ---- where keys are cut ---- */

/* Pieces of all items, by the threads of a warp. */
__device__ int64_t count_pieces(const cpa_cuda_update_args &a, int32_t n, int64_t split) {
    int64_t pieces = 0;
    for (int32_t i = threadIdx.x % WARP_LANES; i < n; i += WARP_LANES) {
        const cpa_cuda_tiled_item &item = a.tiles.items[i];
        pieces += (int64_t)item.tiles * cpa_cuda_cuts_of(&item, split);
    }
    return warp_sum(pieces);
}

/* cpa_cuda_least_split: each warp tries another of the lengths between, and longer pieces are never more of them. */
__device__ int64_t least_split(const cpa_cuda_update_args &a, int32_t n, int64_t least, int64_t most,
                               int64_t most_pieces) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    while (least < most) {
        const int64_t step = (most - least + WARPS - 1) / WARPS, tried = least + step * warp;
        const bool fits = tried >= most || count_pieces(a, n, tried) <= most_pieces;
        const int too_short = __syncthreads_count(lane == 0 && !fits);
        if (too_short == 0) return least;
        most = min(most, least + step * too_short);
        least += step * (too_short - 1) + 1;
    }
    return least;
}

/* As choose_prefill_split of attend_plan_pieces.c; a length that cuts no item where that finds none. */
__device__ int64_t choose_split(const cpa_cuda_update_args &a, int32_t n) {
    const int64_t heads = a.tiles.kv_heads, device = a.tiles.multiprocessors;
    int64_t tiles = 0, tile_keys = 0, least = INT64_MAX, split;
    int32_t most = 1;
    for (int32_t i = threadIdx.x; i < n; i += THREADS) {
        const cpa_cuda_tiled_item &item = a.tiles.items[i];
        tiles += item.tiles;
        tile_keys += (int64_t)item.tiles * item.keys;
        most = max(most, item.keys);
    }
    tiles = block_sum(tiles);
    tile_keys = block_sum(tile_keys);
    split = most = largest(most);
    if (tiles * heads >= CPA_CUDA_PREFILL_WAVES * device) return split;
    for (int64_t waves = 1; waves <= CPA_CUDA_PREFILL_WAVES; waves++) {
        const int64_t places = waves * device, shortest = cpa_cuda_shortest_split(tile_keys, heads, places);
        const int64_t tried = least_split(a, n, shortest, most, places / heads);
        const int64_t cost = cpa_cuda_split_cost(count_pieces(a, n, tried), heads, device, tried);
        if (cost < least) {
            least = cost;
            split = tried;
        }
    }
    return split;
}

/* ---- pieces ---- */

/* Of the whole list, by its number among all. */
__device__ cpa_cuda_piece piece_at(const cpa_cuda_update_args &a, int32_t n, int64_t split, int32_t index) {
    const cpa_cuda_tiled_item &item = a.tiles.items[cpa_cuda_tiled_item_at(a.tiles.items, n, index)];
    return cpa_cuda_tile_piece(&a, &item, split, index - item.before.pieces);
}

/* The splits of an item, and those that fill up. */
__device__ void write_splits(const cpa_cuda_update_args &a, int32_t n, int64_t split, int32_t n_splits) {
    for (int32_t i = 0; i < n && n_splits > 0; i++) {
        const cpa_cuda_tiled_item &item = a.tiles.items[i];
        const int32_t cuts = cpa_cuda_cuts_of(&item, split);
        for (int32_t tile = threadIdx.x; tile < item.tiles && cuts > 1; tile += THREADS) {
            const cpa_cuda_piece first = cpa_cuda_tile_piece(&a, &item, split, tile * cuts);
            a.tiles.splits[item.before.splits + tile] = cpa_cuda_tile_split(&first, cuts);
        }
    }
    for (int32_t i = n_splits + (int32_t)threadIdx.x; i < a.tiles.most_splits; i += THREADS)
        a.tiles.splits[i] = cpa_cuda_split{};
}

/* Counting sort by cost, the longest first. What costs about the same comes in any order: nothing depends on it but how
 * long the whole takes. */
__device__ void write_pieces(const cpa_cuda_update_args &a, int32_t n, int64_t split, int32_t n_pieces) {
    __shared__ int32_t places[CPA_CUDA_COST_BUCKETS]; /* first pieces of each bucket, then where its next one goes */
    static_assert(CPA_CUDA_COST_BUCKETS == THREADS, "a bucket a thread");
    int32_t most = 1, all;
    places[threadIdx.x] = 0;
    for (int32_t i = threadIdx.x; i < n_pieces; i += THREADS) {
        const cpa_cuda_piece piece = piece_at(a, n, split, i);
        const int32_t cost = (int32_t)cpa_cuda_visible_keys(a.reservation.map, &piece, a.group, 0);
        a.tiles.costs[i] = cost;
        most = max(most, cost);
    }
    most = largest(most);
    for (int32_t i = threadIdx.x; i < n_pieces; i += THREADS)
        atomicAdd(&places[cpa_cuda_cost_bucket(a.tiles.costs[i], most)], 1);
    __syncthreads();
    const int32_t place = sum_before(places[threadIdx.x], &all);
    places[threadIdx.x] = place;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < n_pieces; i += THREADS)
        a.tiles.pieces[atomicAdd(&places[cpa_cuda_cost_bucket(a.tiles.costs[i], most)], 1)] = piece_at(a, n, split, i);
    cpa_cuda_piece idle = {};
    idle.partial = idle.next = -1;
    for (int32_t i = n_pieces + (int32_t)threadIdx.x; i < a.tiles.most_pieces; i += THREADS) a.tiles.pieces[i] = idle;
}

__global__ void __launch_bounds__(THREADS) cut_tiles(const __grid_constant__ cpa_cuda_update_args a) {
    const int32_t n = list_items(a);
    const int64_t split = n > 0 ? choose_split(a, n) : 1;
    const cpa_cuda_tile_count all = place_items(a, n, split);
    write_pieces(a, n, split, all.pieces);
    write_splits(a, n, split, all.splits);
}

} // namespace

extern "C" cpa_status cpa_cuda_cut_tiles(const cpa_cuda_update_args *args, cpa_stream *stream) {
    cut_tiles<<<1, THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "attend plan");
}
