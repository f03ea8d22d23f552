/* Tiles of the places of experts, which a kernel finds from the offsets on the device: each expert's places are tiles of
 * so many, the last one of what is left. */
#ifndef CPA_CUDA_EXPERT_TILES_CUH
#define CPA_CUDA_EXPERT_TILES_CUH

#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/experts/expert_linear.h"

struct expert_tile {
    int32_t expert;        /* expert of the tile; -1: there is no such tile */
    int32_t first, places; /* its places are [first, first + places) */
};

/* The places of an expert, within `rows`. */
__device__ inline expert_tile places_of(const int32_t *offsets, int32_t expert, int32_t rows) {
    const int32_t begin = min(max(offsets[expert], 0), rows), end = max(min(offsets[expert + 1], rows), begin);
    return {expert, begin, end - begin};
}

/* Tile number `index`; all lanes of a warp ask for the same one. No offsets: all places are expert 0's. */
__device__ inline expert_tile find_expert_tile(const int32_t *offsets, int32_t experts, int32_t rows,
                                               int32_t tile_rows, int32_t index) {
    const int lane = threadIdx.x % WARP_LANES;
    expert_tile tile = {offsets ? -1 : 0, 0, rows};
    int32_t in_front = 0; /* tiles of the experts in front */
    if (offsets) {        /* a lane has a range of experts */
        const int32_t range = (experts + WARP_LANES - 1) / WARP_LANES;
        const int32_t begin = min(experts, lane * range), end = min(experts, begin + range);
        int32_t own = 0, sum;
        for (int32_t e = begin; e < end; e++) own += (places_of(offsets, e, rows).places + tile_rows - 1) / tile_rows;
        sum = own;
        for (int step = 1; step < WARP_LANES; step *= 2) {
            const int32_t before = __shfl_up_sync(0xffffffff, sum, step);
            if (lane >= step) sum += before;
        }
        const uint32_t holders = __ballot_sync(0xffffffff, index < sum);
        if (holders == 0) return tile;
        const int holder = __ffs((int)holders) - 1;
        if (lane == holder) {
            in_front = sum - own;
            for (int32_t e = begin; e < end; e++) {
                tile = places_of(offsets, e, rows);
                const int32_t tiles = (tile.places + tile_rows - 1) / tile_rows;
                if (index < in_front + tiles) break;
                in_front += tiles;
            }
        }
        tile.expert = __shfl_sync(0xffffffff, tile.expert, holder);
        tile.first = __shfl_sync(0xffffffff, tile.first, holder);
        tile.places = __shfl_sync(0xffffffff, tile.places, holder);
        in_front = __shfl_sync(0xffffffff, in_front, holder);
    }
    const int64_t skipped = (int64_t)(index - in_front) * tile_rows; /* grids go on past the last tile */
    if (skipped >= tile.places) return {-1, 0, 0};
    tile.first += (int32_t)skipped;
    tile.places = min(tile_rows, tile.places - (int32_t)skipped);
    return tile;
}

/* The most tiles that there may be. */
inline int64_t most_expert_tiles(int64_t rows, int64_t experts, int64_t tile_rows) {
    const int64_t with_places = rows < experts ? rows : experts;
    const int64_t tiles = (rows - with_places) / tile_rows + with_places;
    return tiles < rows ? tiles : rows;
}

/* Row of x of a place; -1: x does not have it. */
__device__ inline int64_t row_of_place(const cpa_expert_linear_args &a, int32_t place) {
    const int64_t row = a.tokens ? (int64_t)a.tokens[place] : place;
    return row < a.x_rows ? row : -1;
}

/* The scale of output o and input i of an expert. */
__device__ inline float scale_of(const cpa_expert_linear_args &a, int32_t expert, int32_t o, int32_t i) {
    const float *scales = a.weight_scale + (int64_t)expert * a.weight_scale_rows * a.weight_scale_columns;
    if (a.weight_scale_columns == 1 && a.weight_scale_rows == a.outputs) return scales[o];
    return scales[(int64_t)(o / CPA_CUDA_SCALE_BLOCK) * a.weight_scale_columns + i / CPA_CUDA_SCALE_BLOCK];
}

/* Floats behind the sums of a place in shared memory, so that lanes that have neighbouring places use other banks. */
constexpr int SUM_PAD = 4;

/* The results of a tile from sums in shared memory, those of a place `line` floats apart; neighbouring threads store
 * neighbouring outputs. */
template <typename T, int OUTPUTS, int THREADS>
__device__ void store_sums(const cpa_cuda_expert_product &p, const expert_tile &tile, int32_t output,
                           const float *sums, int line) {
    const cpa_expert_linear_args &a = p.args;
    for (int i = threadIdx.x; i < tile.places * OUTPUTS; i += THREADS) {
        const int32_t place = i / OUTPUTS, o = output + i % OUTPUTS;
        float sum = sums[place * line + i % OUTPUTS];
        if (o >= a.outputs) continue;
        if (p.bias) sum += to_float(((const T *)p.bias)[o]);
        if (row_of_place(a, tile.first + place) < 0) sum = NAN;
        write_element(a.out, a.out_dtype, (tile.first + place) * a.out_stride + o, sum);
    }
}

#endif
