/* attend, last step: joins the partial states that pieces left in the work space, those of prefill tiles, and those of
 * decode units whose kernel does not join them itself. The order of the sums is fixed by how many states there are, and
 * by whether the row's state is resumed, so the result does not depend on when they were written. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int WARPS = 4, COLUMNS = WARP_LANES * 4;
constexpr int MANY = 8; /* states of a row that one warp sums, where the rows are few: of an item's last tile */

/* The states of a row: their LSEs and their O, `stride` rows apart. */
struct row_states {
    const float *lse, *o;
    int32_t count, stride, v_dim;
    float base, weights; /* over the LSEs: their maximum, or 0 if that is -inf; the sum of exp(LSE - base) */

    __device__ row_states(const cpa_cuda_attend_args &a, int32_t states, int32_t rows, int64_t first, int lane)
        : lse(a.partial_lse + first), o(a.partial_o + first * a.v_dim), count(states), stride(rows), v_dim(a.v_dim),
          base(-INFINITY), weights(0) {
        for (int s = lane; s < count; s += WARP_LANES) base = fmaxf(base, lse[(int64_t)s * stride]);
        base = warp_max(base);
        if (base == -INFINITY) base = 0;
        for (int s = lane; s < count; s += WARP_LANES) weights += expf(lse[(int64_t)s * stride] - base);
        weights = warp_sum(weights);
    }
    /* NaN if one is, and -inf if all are. */
    __device__ float joint_lse() const { return base + logf(weights); }
    /* The weighted sum over the states `first`, first + step, ... of four columns, AT_ONCE loaded together. */
    template <int AT_ONCE>
    __device__ void sum(float (&value)[4], int first, int step, int column, int lane) const {
        for (int begin = 0; begin < count; begin += WARP_LANES) {
            const int n = min(count - begin, WARP_LANES);
            const bool counts = lane < n && weights > 0;
            const float share = counts ? expf(lse[(int64_t)(begin + lane) * stride] - base) / weights : 0;
#pragma unroll AT_ONCE
            for (int s = first; s < n; s += step) {
                const float weight = __shfl_sync(0xffffffff, share, s);
                float part[4] = {0, 0, 0, 0};
                if (column < v_dim) load_floats(o + (int64_t)(begin + s) * stride * v_dim + column, part);
                for (int e = 0; e < 4; e++) value[e] += weight * part[e];
            }
        }
    }
};

/* The sum of what the warps have, for the first of them. Called by all. */
__device__ void add_warps(float (&value)[4], float (&sums)[WARPS][COLUMNS], int warp, int lane) {
    store_floats(&sums[warp][lane * 4], value);
    __syncthreads();
    for (int other = 1; other < WARPS && warp == 0; other++) {
        float more[4];
        load_floats(&sums[other][lane * 4], more);
        for (int e = 0; e < 4; e++) value[e] += more[e];
    }
    __syncthreads();
}

/* Of prefill tiles: a warp a row, or all warps of a CTA a row of many states, each every fourth. */
template <typename Element>
__global__ void __launch_bounds__(WARPS *WARP_LANES, 4) attend_combine(const __grid_constant__ cpa_cuda_attend_args a) {
    __shared__ __align__(16) float sums[WARPS][COLUMNS];
    dependent_allow(); /* the kernel that sends the states, or tells of them */
    const cpa_cuda_split split = a.splits[blockIdx.x]; /* of the plan: there before the kernel that wrote the states */
    const int kv_group = blockIdx.y, rows = split.row_end - split.row_begin;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int parts = split.count > MANY && rows <= CPA_CUDA_DECODE_ROWS ? WARPS : 1;
    const int part = parts > 1 ? warp : 0, rows_at_once = WARPS / parts;
    dependent_wait();
    for (int row = blockIdx.z * rows_at_once + warp - part; row < rows; row += gridDim.z * rows_at_once) {
        const int64_t first = kv_group * a.partial_rows + split.partial + row;
        const row_states states(a, split.count, rows, first, lane);
        const row_sink sink(a, split.q_row, split.state_shift, split.row_begin + row, kv_group, states.joint_lse());
        for (int begin = 0; begin < a.v_dim; begin += COLUMNS) {
            const int column = begin + lane * 4;
            float value[4] = {0, 0, 0, 0};
            states.sum<16>(value, part, parts, column, lane);
            if (parts > 1) add_warps(value, sums, warp, lane);
            if (part == 0 && column < a.v_dim) sink.template store<Element>(column, value);
        }
        __syncwarp(); /* the lanes of the row have read the LSE that is there */
        if (part == 0 && lane == 0) sink.store_lse();
    }
}

/* ---- decode units ---- */

constexpr int UNIT_WARPS = 8, UNIT_THREADS = UNIT_WARPS * WARP_LANES;

/* How the warps of a CTA share the rows of a tile: the columns of a row, its states where they are many, and rows. Where
 * they are more than a warp takes at once, as those of one long sequence, other CTAs have the other columns: unless a
 * row's state is resumed, whose LSE that is there all must have read before it is replaced. */
struct unit_shares {
    int columns; /* warps that have different columns of a row */
    int parts;   /* warps that have different states */
    int rows;    /* that the CTA has at once */
    int spread;  /* CTAs that have different columns of them */

    __device__ unit_shares(const cpa_cuda_attend_args &a, int states) {
        const int all = (a.v_dim + COLUMNS - 1) / COLUMNS;
        const bool many = states > MANY;
        spread = states > WARP_LANES && !a.resume ? all : 1;
        columns = all / spread;
        parts = many ? UNIT_WARPS / columns : 1;
        rows = UNIT_WARPS / (columns * parts);
    }
    /* How often so much is done for all of a tile. */
    __device__ int turns(int tile_rows) const { return (tile_rows + rows - 1) / rows * spread; }
};

/* The first piece, from `at` on in a CTA's list, of those that a tile is split into; -1: there is none. */
__device__ int first_of_tile(const cpa_cuda_attend_args &a, int at) {
    for (; at >= 0; at = a.pieces[at].next) {
        const cpa_cuda_piece &piece = a.pieces[at];
        const int before = (piece.states - piece.pieces) * (piece.row_end - piece.row_begin); /* shared keys' states */
        if (piece.partial >= 0 && piece.partial == piece.first_partial + before) break;
    }
    return at;
}

/* Tiles that are told of by their first pieces, one by a thread at most, and how many turns they and those before them
 * take. */
struct split_tiles {
    int pieces[UNIT_THREADS], turns[UNIT_THREADS], of_warps[UNIT_WARPS];

    __device__ void list(const cpa_cuda_attend_args &a, int at) {
        const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        int sum = 0;
        if (at >= 0) {
            const cpa_cuda_piece &piece = a.pieces[at];
            sum = unit_shares(a, piece.states).turns(piece.row_end - piece.row_begin);
        }
        for (int step = 1; step < WARP_LANES; step *= 2) {
            const int before = __shfl_up_sync(0xffffffff, sum, step);
            if (lane >= step) sum += before;
        }
        if (lane == WARP_LANES - 1) of_warps[warp] = sum;
        __syncthreads();
        for (int other = 0; other < warp; other++) sum += of_warps[other];
        pieces[threadIdx.x] = at;
        turns[threadIdx.x] = sum;
        __syncthreads();
    }
    __device__ int count() const { return turns[UNIT_THREADS - 1]; }
    /* The tile of a turn. */
    __device__ int find(int turn) const {
        int low = 0, high = UNIT_THREADS - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (turns[middle] > turn)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }
};

/* Some rows of a tile: those of its turn `turn`. Called by all threads. */
template <typename Element>
__device__ void combine_turn(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int turn,
                             float (&sums)[UNIT_WARPS][COLUMNS]) {
    const unit_shares share(a, piece.states);
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, kv_group = blockIdx.y;
    const int column = (turn % share.spread + warp % share.columns) * COLUMNS + lane * 4;
    const int part = warp / share.columns % share.parts, row_of_turn = warp / (share.columns * share.parts);
    const int row = turn / share.spread * share.rows + row_of_turn;
    const int rows = piece.row_end - piece.row_begin;
    const bool has_row = row_of_turn < share.rows && row < rows;
    const int64_t first = kv_group * a.partial_rows + piece.first_partial + (has_row ? row : 0);
    const row_states states(a, piece.states, rows, first, lane);
    const row_sink sink(a, piece.q_row, piece.state_shift, piece.row_begin + (has_row ? row : 0), kv_group,
                        states.joint_lse());
    float value[4] = {0, 0, 0, 0};
    states.sum<8>(value, part, share.parts, column, lane);
    const bool is_first = has_row && part == 0;
    if (share.parts > 1) {
        store_floats(&sums[warp][lane * 4], value);
        __syncthreads();
        for (int other = 1; other < share.parts && is_first; other++) {
            float more[4];
            load_floats(&sums[warp + other * share.columns][lane * 4], more);
            for (int e = 0; e < 4; e++) value[e] += more[e];
        }
    }
    if (is_first && column < a.v_dim) sink.template store<Element>(column, value);
    __syncthreads(); /* all have read the LSE that is there, and the sums */
    if (is_first && column == 0) sink.store_lse();
}

struct combine_units_args {
    cpa_cuda_attend_args a;
    int32_t lists;
};

/* Each tile of decode units is told of by its first piece, on one of the lists, whose heads are the first pieces. */
template <typename Element>
__global__ void __launch_bounds__(UNIT_THREADS, 4)
    attend_combine_units(const __grid_constant__ combine_units_args args) {
    const cpa_cuda_attend_args &a = args.a;
    const int lists = args.lists;
    __shared__ __align__(16) float sums[UNIT_WARPS][COLUMNS];
    __shared__ split_tiles tiles;
    dependent_allow();
    for (int begin = 0; begin < lists; begin += UNIT_THREADS) {
        int at = begin + (int)threadIdx.x < lists ? begin + (int)threadIdx.x : -1;
        while (__syncthreads_or((at = first_of_tile(a, at)) >= 0)) {
            tiles.list(a, at);
            dependent_wait();
            for (int turn = blockIdx.x; turn < tiles.count(); turn += gridDim.x) {
                const int tile = tiles.find(turn);
                combine_turn<Element>(a, a.pieces[tiles.pieces[tile]], turn - (tile > 0 ? tiles.turns[tile - 1] : 0),
                                      sums);
            }
            if (at >= 0) at = a.pieces[at].next;
        }
    }
    dependent_wait(); /* what comes behind takes this kernel's end for that of the one before it */
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_combine(const cpa_cuda_attend_args *args, int32_t n_splits, cpa_stream *stream) {
    const int tile_parts = 4; /* CTAs that share a tile's rows */
    const dim3 grid(n_splits, args->kv_heads, tile_parts);
    const auto kernel = args->q_dtype == CPA_BF16 ? attend_combine<__nv_bfloat16> : attend_combine<__half>;
    const bool early = cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER;
    return cpa_cuda_check(
        &stream->error,
        launch_dependent(kernel, grid, WARPS * WARP_LANES, *args, early, cpa_cuda_handle(stream)), "attend");
}

extern "C" cpa_status cpa_cuda_attend_combine_units(const cpa_cuda_attend_args *args, int32_t lists,
                                                    cpa_stream *stream) {
    const int ctas = 4 * cpa_cuda_device_of(stream)->multiprocessors; /* at once */
    const dim3 grid((ctas + args->kv_heads - 1) / args->kv_heads, args->kv_heads);
    const auto kernel = args->q_dtype == CPA_BF16 ? attend_combine_units<__nv_bfloat16> : attend_combine_units<__half>;
    return cpa_cuda_check(&stream->error,
                          launch_dependent(kernel, grid, UNIT_THREADS, combine_units_args{*args, lists}, args->early,
                                           cpa_cuda_handle(stream)),
                          "attend");
}
