/* Products with experts' weights of any widths, dtypes and strides: a CTA makes TILE outputs of TILE places, a result a
 * thread, from squares of x and weights in shared memory. */
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/experts/expert_tiles.cuh"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int TILE = 16, THREADS = TILE * TILE, SPAN = 32; /* SPAN: inputs at a time */

template <typename T>
__device__ float weight_of(const cpa_expert_linear_args &a, int32_t expert, int32_t o, int32_t i) {
    const int64_t at = expert * a.expert_stride + o * a.weight_stride + i;
    if (a.weight_scale) return read_code(a.weight, CPA_FP8_E4M3, at, __float_as_uint(scale_of(a, expert, o, i)));
    return to_float(((const T *)a.weight)[at]);
}

/* The spans of inputs from i on: rows of x of the tile's places, and weights of outputs from `output` on; zeros beyond
 * what there is. */
template <typename T>
__device__ void load_spans(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output, int32_t i,
                           float (*x)[SPAN + 1], float (*weights)[SPAN + 1]) {
    for (int n = threadIdx.x; n < TILE * SPAN; n += THREADS) {
        const int32_t line = n / SPAN, column = i + n % SPAN, o = output + line;
        const int64_t row = line < tile.places ? row_of_place(a, tile.first + line) : -1;
        const bool inside = column < a.inputs;
        x[line][n % SPAN] = inside && row >= 0 ? to_float(((const T *)a.x)[row * a.x_stride + column]) : 0;
        weights[line][n % SPAN] = inside && o < a.outputs ? weight_of<T>(a, tile.expert, o, column) : 0;
    }
}

template <typename T>
__device__ void store(const cpa_cuda_expert_product &p, int32_t place, int32_t output, float sum) {
    const cpa_expert_linear_args &a = p.args;
    if (p.bias) sum += to_float(((const T *)p.bias)[output]);
    if (row_of_place(a, place) < 0) sum = NAN;
    write_element(a.out, a.out_dtype, place * a.out_stride + output, sum);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) expert_linear_simple(const __grid_constant__ cpa_cuda_expert_product p) {
    __shared__ float x[TILE][SPAN + 1], weights[TILE][SPAN + 1];
    const cpa_expert_linear_args &a = p.args;
    const int32_t output = blockIdx.x * TILE, line = threadIdx.x / TILE, column = threadIdx.x % TILE;
    dependent_wait();
    dependent_allow();
    for (int64_t index = blockIdx.y;; index += gridDim.y) {
        const expert_tile tile = find_expert_tile(a.offsets, a.experts, (int32_t)a.rows, TILE, (int32_t)index);
        if (tile.expert < 0 || tile.places <= 0) return;
        float sum = 0;
        for (int32_t i = 0; i < a.inputs; i += SPAN) {
            load_spans<T>(a, tile, output, i, x, weights);
            __syncthreads();
#pragma unroll
            for (int d = 0; d < SPAN; d++) sum = fmaf(x[line][d], weights[column][d], sum);
            __syncthreads();
        }
        if (line < tile.places && output + column < a.outputs)
            store<T>(p, tile.first + line, output + column, sum);
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_simple(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    const cpa_expert_linear_args &a = product->args;
    const dim3 grid((unsigned)((a.outputs + TILE - 1) / TILE), grid_rows(most_expert_tiles(a.rows, a.experts, TILE)));
    return launch_for_elements(a.dtype, [&](auto tag) {
        return launch_early(expert_linear_simple<typename decltype(tag)::element>, grid, THREADS, *product, stream,
                            "expert_linear");
    });
}
