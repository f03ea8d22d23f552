/* What a warp of the decode kernels has and does beside walking through its keys: where its queries lie, its state over
 * the keys that it met, how it leaves that to the CTA; and how the kernels are launched. C: a kernel's
 * configuration. */
#ifndef CPA_CUDA_DECODE_WARP_CUH
#define CPA_CUDA_DECODE_WARP_CUH

#include "base/dependent.cuh"
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/decode_join.cuh"
#include "kernels/cuda/attend/decode_quant.cuh"

/* Where a lane's queries lie: of its rows lane / 4 and lane / 4 + 8 of the tile that begins at row `first`; past the
 * last row that one's again. */
struct query_rows {
    const char *from[2];
    bool few; /* none of the second half */

    __device__ query_rows(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int first, int kv_group, int lane)
        : few(piece.row_end - first <= 8) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = min(first + 8 * half + lane / 4, piece.row_end - 1);
            const row_place place(a, piece.q_row, row, kv_group);
            from[half] = queries_of(a, piece) + (place.state_row * a.q_row_stride + place.head * a.q_head_stride) * 2;
        }
    }
};

/* The queries as A operands; zeros past the head's width, unless it is the WHOLE one of the kernel. */
template <typename C, bool WHOLE>
__device__ void load_queries(uint32_t (&q)[C::K_DIM / 16][4], const query_rows &rows, int k_dim, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++) q[k][half] = q[k][2 + half] = 0;
        if (half == 1 && rows.few) continue;
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int column = 16 * k + 8 * side + 2 * (lane % 4);
                if (WHOLE || column < k_dim) q[k][2 * side + half] = *(const uint32_t *)(rows.from[half] + column * 2);
            }
        }
    }
}

/* What a warp has of its rows lane / 4 and lane / 4 + 8, over its own keys. */
template <typename C>
struct warp_state {
    float o[C::V_DIM / 8][4];
    float max[2], sum[2]; /* max of raw scores; sum over this lane's columns */
    float q_scale[2];     /* quantised: see decode_quant.cuh */
    float largest;        /* scale of values so far */

    /* Over no keys yet. */
    __device__ void clear(float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; half++) max[half] = lowest_max(scale_log2), sum[half] = 0;
        largest = 1e-30f; /* below any scale that matters */
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] = 0;
    }
    /* O follows the maxima of the rows, which settle early: most runs skip this. Called by a warp. */
    __device__ void rescale(const float (&keep)[2]) {
        if (!__any_sync(0xffffffff, keep[0] != 1 || keep[1] != 1)) return;
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] *= keep[e / 2];
    }
};

/* The queries where mma takes them from: registers, or shared memory where these are needed. */
template <typename C, bool SHARED = C::Q_SHARED>
struct query_operands {
    uint32_t part[C::K_DIM / 16][4];
};
template <typename C>
struct query_operands<C, true> {
    uint32_t shared; /* address in shared memory of this lane's part of the first step */
};

/* Takes the queries of a head's rows; shared: room for those that lie there, which all gangs of the CTA write together.
 * By_chunk: as of store_query_codes. any_keys: the warp has some. */
template <typename C, bool By_chunk>
__device__ void take_queries(query_operands<C> &q, warp_state<C> &state, const cpa_cuda_attend_args &a,
                             const cpa_cuda_piece &piece, const query_rows &rows, int kv_head, bool any_keys,
                             uint32_t shared, int gang, int lane) {
    if constexpr (C::QUANTISED) {
        q.shared = shared + lane * 16;
        store_query_codes<C, By_chunk>(q.shared, state.q_scale, a, piece, kv_head, gang, lane);
        __syncthreads();
    } else if constexpr (C::Q_SHARED) {
        uint32_t part[C::K_DIM / 16][4];
        load_queries<C, false>(part, rows, a.k_dim, lane);
        q.shared = shared + lane * 16;
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++)
            if (k % C::GANGS == gang) store_shared(q.shared + k * 512, part[k]);
        __syncthreads();
    } else if (any_keys) {
        if (a.k_dim == C::K_DIM) {
            load_queries<C, true>(q.part, rows, a.k_dim, lane);
        } else {
            load_queries<C, false>(q.part, rows, a.k_dim, lane);
        }
    }
}

/* The scales of this lane's keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9; or of those that are in their place. */
template <bool REORDERED>
__device__ void read_words(uint32_t (&words)[4], uint32_t address, int lane) {
    if constexpr (REORDERED) {
        load_shared(words, address + lane % 4 * 16);
    } else {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t pair[2];
            load_shared(pair, address + (8 * n + 2 * (lane % 4)) * 4);
            words[2 * n] = pair[0], words[2 * n + 1] = pair[1];
        }
    }
}

/* The factors of the probabilities of this lane's KEYS keys; what was accumulated follows the largest scale. */
template <typename C, int KEYS>
__device__ void weigh_scales(float (&weight)[KEYS], warp_state<C> &state, const uint32_t (&words)[KEYS]) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) weight[i] = C::codes::scale(words[i]), top = fmaxf(top, weight[i]);
    top = quad_max(top);
    if (top > state.largest) { /* the same for all lanes; scales settle early */
        const float shrink = state.largest / top;
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) state.o[n][e] *= shrink;
        state.largest = top;
    }
    const float inverse = __fdividef(DECODE_P_SCALE, state.largest);
#pragma unroll
    for (int i = 0; i < KEYS; i++) weight[i] *= inverse;
}

/* Leaves a warp's rows, `rows` of them, where join_warps takes them from. values_scale: of the head, beside those of
 * rows or of the tensor. */
template <typename C>
__device__ void leave_state(const warp_state<C> &state, int rows, float values_scale, warp_states<C> &states, float *o,
                            int warp, int lane) {
    o += states.rows_of(warp);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 8 * half + lane / 4;
        const float total = quad_sum(state.sum[half]);
        if (row >= rows) continue;
        if (lane % 4 == 0) states.max[warp][row] = state.max[half], states.sum[warp][row] = total;
        if constexpr (C::QUANTISED && !C::RUNS) {
            store_code_columns<C>(o + row * states.PITCH, state.o, half,
                                  state.largest / DECODE_P_SCALE * values_scale, lane);
        } else {
#pragma unroll
            for (int n = 0; n < C::V_DIM / 8; n++) {
                float pair[2] = {state.o[n][2 * half], state.o[n][2 * half + 1]};
                if constexpr (C::QUANTISED) {
                    const float factor = state.largest / DECODE_P_SCALE * values_scale;
                    pair[0] *= factor, pair[1] *= factor;
                }
                store_floats(o + row * states.PITCH + 8 * n + 2 * (lane % 4), pair);
            }
        }
    }
}

/* Launches a kernel of decode: a CTA for each C::HEADS heads and share of the plan. */
template <typename C>
cpa_status launch_decode(void (*kernel)(cpa_cuda_attend_args), uint64_t *prepared, const cpa_cuda_attend_launch *l,
                         cpa_stream *stream) {
    if (l->count == 0)
        return cpa_cuda_fits(stream, (const void *)kernel, C::SHARED_BYTES) ? CPA_OK : CPA_UNSUPPORTED;
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)kernel, C::SHARED_BYTES, prepared);
    if (status != CPA_OK) return status;
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    cpa_cuda_attend_args a = *l->args;
    const dim3 grid(a.kv_heads / C::HEADS, l->count);
    /* Else half of the device is left to what waits for other devices. */
    const bool few = 2 * (int64_t)grid.x * grid.y <= C::CTAS * device->multiprocessors;
    a.early = a.early && (a.alone || few || a.beside_shared);
    return cpa_cuda_check(
        &stream->error,
        launch_dependent(kernel, grid, C::THREADS, a, a.early, cpa_cuda_handle(stream), C::SHARED_BYTES), "attend");
}

#endif
