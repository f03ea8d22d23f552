/* Where a consuming warpgroup of the Hopper kernels leaves the states of its rows. */
#ifndef CPA_CUDA_HOPPER_ROWS_CUH
#define CPA_CUDA_HOPPER_ROWS_CUH

#include "kernels/cuda/attend/hopper_scores.cuh"

namespace {

/* Where a row goes. */
__device__ row_sink sink_at(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int row, int kv_group,
                            float lse) {
    return a.rows ? row_sink(a, piece, row, kv_group, lse, a.rows) : row_sink(a, piece, row, kv_group, lse);
}

/* Columns of a row of a thread, in pairs, whose old values are loaded together. */
constexpr int PAIRS_AT_ONCE = 16;

template <typename C>
__device__ void store_state(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group,
                            const thread_state<C> &state, int row, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = row + 8 * half;
        float scale = a.scale;
        if constexpr (C::RULED) scale = state.rules.scale[half];
        const float max = state.max[half], sum = counted_sum(quad_sum(state.sum[half]), max, scale * (float)M_LOG2E);
        const float inverse = inverse_of_sum(sum), lse = lse_of(sum, max * scale + logf(sum));
        if (at < piece.row_end) {
            const row_sink sink = sink_at(a, piece, at, kv_group, lse);
            const auto column_of = [&](int n) { return 8 * n + 2 * (lane % 4); };
#pragma unroll
            for (int first = 0; first < C::V_DIM / 8; first += PAIRS_AT_ONCE) {
                float old[PAIRS_AT_ONCE][2];
#pragma unroll
                for (int n = first; n < first + PAIRS_AT_ONCE && n < C::V_DIM / 8; n++)
                    if (column_of(n) < a.v_dim) sink.load_old(column_of(n), old[n - first]);
#pragma unroll
                for (int n = first; n < first + PAIRS_AT_ONCE && n < C::V_DIM / 8; n++) {
                    const int part = 8 * n / C::PART, i = 4 * (n % (C::PART / 8)) + 2 * half;
                    const float *from = part < C::PARTS ? &state.o[part][i] : &state.tail[i];
                    const float o[2] = {from[0] * inverse, from[1] * inverse};
                    if (column_of(n) < a.v_dim)
                        sink.template store<typename C::element>(column_of(n), o, old[n - first]);
                }
            }
            __syncwarp(0xfu << (lane & ~3)); /* the quad of the row */
            if (lane % 4 == 0) sink.store_lse();
        }
    }
}

} // namespace

#endif
