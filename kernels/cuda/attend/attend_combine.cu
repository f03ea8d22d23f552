/* attend, last step: joins the partial states that pieces left in the work space, those of prefill tiles, and those of
 * decode units whose kernel does not join them itself. The order of the sums follows that of the keys, so the result
 * does not depend on when the states were written. */
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
    /* The weighted sum over the states `first`, first + step, ... of four columns. */
    __device__ void sum(float (&value)[4], int first, int step, int column, int lane) const {
        for (int begin = 0; begin < count; begin += WARP_LANES) {
            const int n = min(count - begin, WARP_LANES);
            const bool counts = lane < n && weights > 0;
            const float share = counts ? expf(lse[(int64_t)(begin + lane) * stride] - base) / weights : 0;
#pragma unroll 16
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
            states.sum(value, part, parts, column, lane);
            if (parts > 1) add_warps(value, sums, warp, lane);
            if (part == 0 && column < a.v_dim) sink.template store<Element>(column, value);
        }
        __syncwarp(); /* the lanes of the row have read the LSE that is there */
        if (part == 0 && lane == 0) sink.store_lse();
    }
}

/* Of decode units, each of whose tiles is told of by its first piece, on the list of some CTA. Rows of latents are
 * wide, and have a state of nearly every multiprocessor where one sequence is long: the warps of a CTA share a row's
 * columns. */
template <typename Element>
__global__ void __launch_bounds__(WARPS *WARP_LANES, 4)
    attend_combine_units(const __grid_constant__ cpa_cuda_attend_args a) {
    const int kv_group = blockIdx.z, warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    dependent_allow();
    dependent_wait();
    for (int at = blockIdx.x, next; at >= 0; at = next) {
        const cpa_cuda_piece &piece = a.pieces[at];
        const int rows = piece.row_end - piece.row_begin;
        const int before = (piece.states - piece.pieces) * rows; /* states of shared keys come first */
        next = piece.next;
        if (piece.partial < 0 || piece.partial != piece.first_partial + before) continue;
        for (int row = blockIdx.y; row < rows; row += gridDim.y) {
            const int64_t first = kv_group * a.partial_rows + piece.first_partial + row;
            const row_states states(a, piece.states, rows, first, lane);
            const row_sink sink(a, piece.q_row, piece.state_shift, piece.row_begin + row, kv_group, states.joint_lse());
            for (int column = warp * COLUMNS + lane * 4; column - lane * 4 < a.v_dim; column += WARPS * COLUMNS) {
                float value[4] = {0, 0, 0, 0};
                states.sum(value, 0, 1, column, lane);
                if (column < a.v_dim) sink.template store<Element>(column, value);
            }
            __syncthreads(); /* all have read the LSE that is there */
            if (threadIdx.x == 0) sink.store_lse();
        }
    }
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

extern "C" cpa_status cpa_cuda_attend_combine_units(const cpa_cuda_attend_args *args, int32_t ctas,
                                                    cpa_stream *stream) {
    const int unit_parts = 32; /* CTAs that share a tile's rows */
    const dim3 grid(ctas, unit_parts, args->kv_heads);
    const auto kernel = args->q_dtype == CPA_BF16 ? attend_combine_units<__nv_bfloat16> : attend_combine_units<__half>;
    return cpa_cuda_check(
        &stream->error,
        launch_dependent(kernel, grid, WARPS * WARP_LANES, *args, args->early, cpa_cuda_handle(stream)), "attend");
}
