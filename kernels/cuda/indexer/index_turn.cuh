/* The rotation of rows of an indexer (index_row.cuh): x cosine + y sine, y the partner. */
#ifndef CPA_CUDA_INDEX_TURN_CUH
#define CPA_CUDA_INDEX_TURN_CUH

#include "kernels/cuda/indexer/index_row.cuh"

namespace {

/* Where partners are: nowhere, beside each other, in the same part of the lane `apart` away, in the other part of the
 * lane, anywhere. Of all but the last a part is rotated as a whole or not at all, and its angles lie side by side. */
enum turn_kind { TURN_NONE, TURN_PAIRS, TURN_LANES, TURN_PARTS, TURN_ANY };
struct row_turn {
    turn_kind kind;
    int32_t apart;
};

template <int LANES>
row_turn turn_of(const cpa_rope &rope) {
    const int32_t half = rope.dim / 2, apart = half / PART;
    if (!rope.table) return {TURN_NONE, 0};
    if (cpa_rope_streams(&rope) != 1 || (uintptr_t)rope.table % 16 || rope.first % PART || rope.dim % PART)
        return {TURN_ANY, 0};
    if (rope.interleaved) return {TURN_PAIRS, 0};
    if (half % PART || apart & (apart - 1) || rope.first % rope.dim || apart > LANES) return {TURN_ANY, 0};
    return {apart == LANES ? TURN_PARTS : TURN_LANES, apart};
}

/* What the rotation does to the elements of a lane, for all rows of a token; of TURN_ANY only whether it can. */
template <int LANES>
struct row_angles {
    lane_row cosine, sine;
    bool turns[PARTS], inside;

    /* `here`: there is such a token; `position`: its first one. */
    __device__ row_angles(row_turn turn, const cpa_rope &rope, const int64_t *positions, int64_t tokens, int64_t token,
                          bool here, int64_t position)
        : turns{}, inside(true) {
        if (turn.kind == TURN_NONE || !here) return;
        inside = turn.kind == TURN_ANY ? cpa_rope_is_in_table(&rope, positions, tokens, token)
                                       : position >= 0 && position < rope.max_position;
        if (!inside || turn.kind == TURN_ANY) return;
        const float *table = rope.table + position * rope.dim;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int32_t at = part_first<LANES>(p) - rope.first;
            turns[p] = at >= 0 && at < rope.dim;
            if (!turns[p]) continue;
            if (turn.kind == TURN_PAIRS)
                load_pairs(cosine[p], sine[p], table + at / 2, rope);
            else
                load_half(cosine[p], sine[p], table, at, rope);
        }
    }

    __device__ static void load_pairs(float (&cosines)[PART], float (&sines)[PART], const float *from,
                                      const cpa_rope &rope) {
        const float second = rope.inverse ? -1 : 1;
        float c[PART / 2], s[PART / 2];
        load_floats(from, c);
        load_floats(from + rope.dim / 2, s);
#pragma unroll
        for (int e = 0; e < PART; e++) {
            cosines[e] = c[e / 2];
            sines[e] = s[e / 2] * (e % 2 ? second : -second);
        }
    }

    __device__ static void load_half(float (&cosines)[PART], float (&sines)[PART], const float *table, int32_t at,
                                     const cpa_rope &rope) {
        const int32_t half = rope.dim / 2;
        const float *from = table + (at < half ? at : at - half);
        const float sign = (at < half) != (rope.inverse != 0) ? -1 : 1;
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
            float c[4], s[4];
            load_floats(from + i, c);
            load_floats(from + half + i, s);
#pragma unroll
            for (int e = 0; e < 4; e++) cosines[i + e] = c[e], sines[i + e] = s[e] * sign;
        }
    }

    __device__ void turn_part(lane_row &x, int p, const float (&partner)[PART]) const {
#pragma unroll
        for (int e = 0; e < PART; e++)
            if (turns[p]) x[p][e] = x[p][e] * cosine[p][e] + partner[e] * sine[p][e];
    }

    /* Where partners are not anywhere. */
    __device__ void apply(lane_row &x, row_turn turn) const {
        float partner[PARTS][PART];
        if (turn.kind == TURN_PARTS) {
#pragma unroll
            for (int e = 0; e < PART; e++) partner[0][e] = x[1][e], partner[1][e] = x[0][e];
            turn_part(x, 0, partner[0]);
            turn_part(x, 1, partner[1]);
            return;
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            if (!__any_sync(0xffffffff, turns[p])) continue;
            if (turn.kind == TURN_PAIRS) {
#pragma unroll
                for (int e = 0; e < PART; e++) partner[p][e] = x[p][e ^ 1];
            } else {
#pragma unroll
                for (int e = 0; e < PART; e++) partner[p][e] = __shfl_xor_sync(0xffffffff, x[p][e], turn.apart);
            }
            turn_part(x, p, partner[p]);
        }
    }
};

/* Rotates a row whose partners are anywhere, of a token whose positions are in the table, in memory of this warp: the
 * lane of the first element of a pair does both. All lanes of the warp come here. */
template <int LANES>
__device__ void turn_anywhere(lane_row &x, const cpa_rope &rope, const int64_t *positions, int64_t tokens,
                              int64_t token, bool here, float *shared) {
    const int32_t half = rope.dim / 2, apart = rope.interleaved ? 1 : half;
    float *row = shared + (int32_t)threadIdx.x % WARP_LANES / LANES * LANES * PARTS * PART;
    __syncwarp();
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) row[part_first<LANES>(p) + e] = x[p][e];
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < PARTS * PART; i++) {
        const int32_t column = part_first<LANES>(i / PART) + i % PART, at = column - rope.first;
        const bool is_first = rope.interleaved ? at % 2 == 0 : at < half;
        if (!here || at < 0 || at >= rope.dim || !is_first) continue;
        const int32_t pair = rope.interleaved ? at / 2 : at;
        const float *from = rope.table + positions[cpa_rope_stream_of(&rope, pair) * tokens + token] * rope.dim + pair;
        const float a = row[column], b = row[column + apart];
        const float cosine = from[0], sine = rope.inverse ? -from[half] : from[half];
        row[column] = a * cosine - b * sine;
        row[column + apart] = b * cosine + a * sine;
    }
    __syncwarp();
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) x[p][e] = row[part_first<LANES>(p) + e];
    }
}

/* Rotates a row of that token; NaN where its position is outside the table. */
template <int LANES>
__device__ void turn_row(lane_row &x, row_turn turn, const row_angles<LANES> &angles, const cpa_rope &rope,
                         const int64_t *positions, int64_t tokens, int64_t token, bool here, float *shared) {
    if (turn.kind == TURN_NONE) return;
    if (turn.kind == TURN_ANY)
        turn_anywhere<LANES>(x, rope, positions, tokens, token, here && angles.inside, shared);
    else
        angles.apply(x, turn);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++)
            if (!angles.inside) x[p][e] = NAN;
    }
}

} // namespace

#endif
