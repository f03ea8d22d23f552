/* How partial states of decode rows become one: those of a CTA's warps, and those that the pieces of a tile left in the
 * work space. The CTA that comes last joins the pieces; the order of the sums is that of the keys, whoever it is.
 *
 * This is the end of a short kernel, where nothing hides what an instruction takes: a warp has a row to itself, four
 * columns a lane, and the logsumexps in between are in base 2. */
#ifndef CPA_CUDA_DECODE_JOIN_CUH
#define CPA_CUDA_DECODE_JOIN_CUH

#include "base/dependent.cuh"
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/device/warp.cuh"

/* The states of the warps of a CTA as join_warps takes them: largest raw scores, sums of exponentials relative to
 * them, and the rows of O, PITCH floats each. Warps are counted by gang, then head, then tile of rows. */
template <typename C>
struct warp_states {
    static constexpr int PITCH = C::V_DIM + 8, WARP_FLOATS = C::WARP_BYTES / 4;
    static_assert(C::TILES * CPA_CUDA_DECODE_ROWS * PITCH * 4 <= C::WARP_BYTES, "accumulators fit into the stages");
    float max[C::WARPS][CPA_CUDA_DECODE_ROWS], sum[C::WARPS][CPA_CUDA_DECODE_ROWS];

    /* The first row of the O of a warp. */
    static __device__ int rows_of(int warp) {
        return warp / C::TILES * WARP_FLOATS + warp % C::TILES * CPA_CUDA_DECODE_ROWS * PITCH;
    }
};

/* A row's part of a lane: O over the sum, and the logsumexp. */
template <typename C>
struct lane_state {
    static constexpr int PARTS = (C::V_DIM + 127) / 128;
    float o[PARTS][4];
    float lse2;

    static __device__ int column(int part, int lane) { return part * 128 + lane * 4; }

    __device__ void store_partial(const cpa_cuda_attend_args &a, int64_t at, int lane) const {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            if (column(p, lane) < a.v_dim) store_floats(a.partial_o + at * a.v_dim + column(p, lane), o[p]);
        if (lane == 0) a.partial_lse[at] = lse2;
    }
    __device__ void store(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int row, int kv_group,
                          int lane) const {
        const row_sink sink(a, piece.q_row, piece.state_shift, piece.row_begin + row, kv_group,
                            piece.refused ? NAN : lse2 * (float)M_LN2);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            if (column(p, lane) < a.v_dim) sink.template store<typename C::element>(column(p, lane), o[p]);
        __syncwarp(); /* the lanes have read the LSE that is there */
        if (lane == 0) sink.store_lse();
    }
};

/* The state of a row of one of the CTA's heads, of the warps that took its keys, in their order. */
template <typename C>
__device__ lane_state<C> join_warps(const cpa_cuda_attend_args &a, const warp_states<C> &states, const float *o,
                                    int row, int head, int lane) {
    float max[C::GANGS], top = -INFINITY, sum = 0;
    const int tile = C::TILES == 1 ? 0 : row / CPA_CUDA_DECODE_ROWS, of_tile = row - tile * CPA_CUDA_DECODE_ROWS;
    const auto warp_of = [&](int gang) { return (gang * C::HEADS + head) * C::TILES + tile; };
#pragma unroll
    for (int g = 0; g < C::GANGS; g++) max[g] = states.max[warp_of(g)][of_tile], top = fmaxf(top, max[g]);
#pragma unroll
    for (int g = 0; g < C::GANGS; g++) {
        max[g] = worth_of(max[g], top, a.scale_log2); /* from here on the weight */
        sum += max[g] * states.sum[warp_of(g)][of_tile];
    }
    sum = counted_sum(sum, top, a.scale_log2);
    const float inverse = sum == 0 ? 0 : __fdividef(1, sum);
    lane_state<C> result = {};
    result.lse2 = lse_of(sum, top * a.scale_log2 + log2_fast(sum));
#pragma unroll
    for (int g = 0; g < C::GANGS; g++) {
#pragma unroll
        for (int p = 0; p < result.PARTS; p++) {
            float part[4];
            const int column = result.column(p, lane) % C::V_DIM;
            load_floats(o + states.rows_of(warp_of(g)) + of_tile * states.PITCH + column, part);
            for (int e = 0; e < 4; e++) result.o[p][e] += max[g] * inverse * part[e];
        }
    }
    return result;
}

/* The joint state of a row of the tile, whose states begin at row `first` of the work space: of shared keys, then those
 * that the tile's pieces left. A lane weighs
 * a state of 32; all load their columns of each. */
template <typename C>
__device__ lane_state<C> join_pieces(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int64_t first,
                                     int lane) {
    constexpr int PARTS = lane_state<C>::PARTS, AT_ONCE = 8 / PARTS; /* loads of a lane that are under way together */
    const uint32_t rows = piece.row_end - piece.row_begin, stride = rows * a.v_dim;
    const float *lses = a.partial_lse + first, *from[PARTS];
    lane_state<C> result = {};
    float top = -INFINITY, sum = 0, weight = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) from[p] = a.partial_o + first * a.v_dim + min(result.column(p, lane), a.v_dim - 4);
    for (int begin = 0; begin < piece.states; begin += AT_ONCE) {
        const int in_turn = begin % WARP_LANES;
        float lse = -INFINITY, part[AT_ONCE][PARTS][4];
        if (in_turn == 0 && begin + lane < piece.states) lse = lses[(begin + lane) * rows];
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
            const uint32_t at = min(begin + s, piece.states - 1) * stride; /* one past the last weighs nothing */
#pragma unroll
            for (int p = 0; p < PARTS; p++) load_floats(from[p] + at, part[s][p]);
        }
        if (in_turn == 0) {
            const float max = fmaxf(top, warp_max(lse)), base = max == -INFINITY ? 0 : max;
            const float keep = exp2_fast(top - base);
            weight = exp2_fast(lse - base);
            sum = sum * keep + weight;
            top = max;
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                for (int e = 0; e < 4; e++) result.o[p][e] *= keep;
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
            const float of_state = __shfl_sync(0xffffffff, weight, in_turn + s);
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                for (int e = 0; e < 4; e++) result.o[p][e] += of_state * part[s][p][e];
        }
    }
    sum = warp_sum(sum);
    const float inverse = sum == 0 ? 0 : __fdividef(1, sum);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        for (int e = 0; e < 4; e++) result.o[p][e] *= inverse;
    result.lse2 = lse_of(sum, top + log2_fast(sum));
    return result;
}

/* Counts the CTA among those that are done with a piece of the tile; whether it is the last, which puts the counter
 * back to 0. Called by all threads after they have stored their states. */
__device__ inline bool is_last_piece(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece) {
    __shared__ bool last;
    __syncthreads();
    if (piece.pieces == 1) return true;
    if (threadIdx.x == 0) {
        uint32_t *counter = a.counters + piece.counter * gridDim.x + blockIdx.x, before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        last = before + 1 == (uint32_t)piece.pieces;
        if (last) *counter = 0;
    }
    __syncthreads();
    return last;
}

/* Stores the rows of the CTA's heads: of the piece, and if it is the last of its tile to end, of the tile. Begins and
 * ends with a barrier. */
template <typename C>
__device__ void store_rows(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group,
                           const warp_states<C> &states, const float *o, int warp, int lane) {
    const int rows = (piece.row_end - piece.row_begin) * C::HEADS;
    const bool split = piece.partial >= 0;
    const auto work_row = [&](int first, int row, int head) {
        return (kv_group + head) * a.partial_rows + first + row;
    };
    __syncthreads();
    for (int i = warp; i < rows; i += C::WARPS) {
        const int head = i % C::HEADS, row = i / C::HEADS;
        const lane_state<C> state = join_warps<C>(a, states, o, row, head, lane);
        if (split) {
            state.store_partial(a, work_row(piece.partial, row, head), lane);
        } else {
            state.store(a, piece, row, kv_group + head, lane);
        }
    }
    if (split && is_last_piece(a, piece)) {
        if (a.beside_shared) dependent_wait();
        for (int i = warp; i < rows; i += C::WARPS) {
            const int head = i % C::HEADS, row = i / C::HEADS;
            join_pieces<C>(a, piece, work_row(piece.first_partial, row, head), lane)
                .store(a, piece, row, kv_group + head, lane);
        }
    }
    __syncthreads();
}

#endif
