/* What the kernels of attend share on the device: which keys a row sees, which tiles of keys a piece walks through, and
 * how a row's result is stored. */
#ifndef CPA_CUDA_ATTEND_CUH
#define CPA_CUDA_ATTEND_CUH

#include <math.h>

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/state.cuh"
#include "kernels/cuda/device/element.cuh"

/* What the CTA of a prefill kernel takes: a piece, for a group of query heads that share a KV head. */
struct cta_work {
    int32_t piece, kv_group;

    __device__ cta_work(const cpa_cuda_attend_args &a, int32_t cta) {
        const bool by_head = cta < a.by_head * a.kv_heads;
        piece = by_head ? cta % a.by_head : cta / a.kv_heads;
        kv_group = by_head ? cta / a.by_head : cta % a.kv_heads;
    }
};

/* A piece of the plan becomes that of a warp, which calls it for itself. */
__device__ inline void copy_piece(cpa_cuda_piece &to, const cpa_cuda_piece &from, int lane) {
    static_assert(sizeof to % 4 == 0 && sizeof to <= 128, "a word a lane");
    __syncwarp(); /* all lanes know `from` by what is overwritten */
    if (lane < (int)sizeof to / 4) ((int32_t *)&to)[lane] = __ldg((const int32_t *)&from + lane);
    __syncwarp();
}

/* A row sees the keys [0, sinks) and [first, end) of the item, counted from k_first; sinks is the same for all rows and
 * matters only where first > 0. */
struct row_keys {
    int32_t first, end;
};

/* The token of a packed row. Mostly there is one in decode: no division then. */
__device__ inline int32_t token_of_row(const cpa_cuda_attend_args &a, int32_t row) {
    return row < a.group ? 0 : row / a.group;
}

/* How many keys of the item sit before position p. One rank that holds everything needs no division. */
__device__ inline int32_t keys_before(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int64_t p) {
    int64_t keys = p <= 0 ? 0 : a.map.cp_size == 1 ? p : cpa_tokens_before(a.map, piece.k_set, p);
    keys -= piece.k_first;
    return (int32_t)(keys < 0 ? 0 : keys > piece.k_end ? piece.k_end : keys);
}

/* The keys of a row of a piece; of a listed one if there are `rows`. */
__device__ inline row_keys keys_of_row(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t row,
                                       const cpa_cuda_listed_row *rows = nullptr) {
    const int32_t token = token_of_row(a, row);
    const int64_t local = piece.q_first + token;
    const int64_t position = rows                 ? rows[piece.q_row + token].position
                             : a.map.cp_size == 1 ? local
                                                  : cpa_token_position(a.map, piece.q_set, local);
    row_keys keys = {0, piece.k_end};
    const int64_t ahead = cpa_mask_ahead(a.mask);
    if (ahead > 0) keys.end = keys_before(a, piece, position + ahead);
    if (a.mask.window > 0) keys.first = keys_before(a, piece, position - a.mask.window + 1);
    return keys;
}

/* Positions rise with the rows of a tile, and so do both bounds: the first and the last row tell which tiles of TILE
 * keys are seen at all, and which by every row. Lies in shared memory. */
template <int TILE>
struct __align__(16) key_walk {
    /* The order and the alignment are those that leave ptxas with the best loop of the Hopper kernel: with `low` at a
     * multiple of 16 the loads of a tile wait for one another, 4% of heads of 64. */
    int32_t count;
    __align__(8) row_keys low; /* of the first row */
    row_keys high;             /* of the last one */
    int32_t sinks;
    int32_t begin, sink_tiles, rest; /* tiles begin .. begin + sink_tiles - 1, then rest .. */

    /* Called by all threads of the CTA, at least three warps of them; ends with a barrier. */
    __device__ void start(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                          const cpa_cuda_listed_row *rows = nullptr) {
        if (threadIdx.x == 0) low = keys_of_row(a, piece, piece.row_begin, rows);
        if (threadIdx.x == 32) high = keys_of_row(a, piece, piece.row_end - 1, rows);
        if (threadIdx.x == 64) sinks = sink_keys(a, piece);
        __syncthreads();
        if (threadIdx.x == 0) count_tiles(piece);
        __syncthreads();
    }
    /* The same by one warp, for itself. */
    __device__ void start_warp(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int lane) {
        if (lane < 2) (lane == 0 ? low : high) = keys_of_row(a, piece, lane == 0 ? piece.row_begin : piece.row_end - 1);
        if (lane == 2) sinks = sink_keys(a, piece);
        __syncwarp();
        if (lane == 0) count_tiles(piece);
        __syncwarp();
    }
    static __device__ int32_t sink_keys(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece) {
        return a.mask.window > 0 ? keys_before(a, piece, a.mask.sinks) : 0;
    }
    __device__ void count_tiles(const cpa_cuda_piece &piece) {
        const int32_t end = (high.end + TILE - 1) / TILE;
        const int32_t sinks_end = low.first > 0 ? min((sinks + TILE - 1) / TILE, end) : 0;
        begin = piece.k_begin / TILE;
        sink_tiles = max(sinks_end - begin, 0);
        rest = max(low.first / TILE, begin + sink_tiles);
        count = sink_tiles + max(end - rest, 0);
    }
    /* The i-th tile. */
    __device__ int32_t tile(int32_t i) const { return i < sink_tiles ? begin + i : rest + i - sink_tiles; }
    /* Whether some row does not see some key of the tile. */
    __device__ bool masked(int32_t tile) const {
        int32_t from = tile * TILE, to = from + TILE;
        return to > low.end || (from < high.first && to > sinks);
    }
    /* Walking backwards, from tile count - 1 on: the steps [first, end) come to tiles that every row sees all of. Sinks
     * that lie apart are left out. */
    __device__ row_keys full_steps() const {
        const int32_t last = count - 1 + rest - sink_tiles; /* the step of tile t is last - t, but for sinks */
        return {last + 1 - low.end / TILE, last + 1 - (high.first + TILE - 1) / TILE};
    }
    /* The keys of a row of the piece. */
    __device__ row_keys keys_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t row,
                                const cpa_cuda_listed_row *rows = nullptr) const {
        const bool same = low.first == high.first && low.end == high.end;
        return same ? low : keys_of_row(a, piece, min(row, piece.row_end - 1), rows);
    }
};

__device__ inline bool sees(row_keys keys, int32_t sinks, int32_t key) {
    return key < keys.end && (key >= keys.first || key < sinks);
}

/* Where the scale of a row of keys, or of values, lies. */
__device__ inline const char *scale_word_at(const cpa_cuda_attend_args &a, const char *pool, int64_t block_stride,
                                            int64_t words_at, int64_t block, int head, int64_t token) {
    return pool + block * block_stride + words_at + (((int64_t)head << a.block_shift) + token) * 4;
}

/* Row `row` of a piece: its query, its place in the state and in the work space. */
struct row_place {
    int64_t state_row;
    int32_t head;

    __device__ row_place(const cpa_cuda_attend_args &a, int64_t q_row, int32_t row, int32_t kv_group) {
        const int32_t token = token_of_row(a, row);
        state_row = q_row + token;
        head = kv_group * a.group + (row - token * a.group);
    }
};

/* The last item that begins at or before a packed row of all items. */
__device__ inline const cpa_cuda_item *item_of_row(const cpa_cuda_attend_args &a, int64_t row) {
    int64_t low = 0, high = a.n_items;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a.items[middle].begin <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &a.items[low];
}

/* The queries that a decode piece's rows index. */
__device__ inline const char *queries_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece) {
    return piece.ready ? a.ready_q : a.q;
}

/* +inf counts as -inf. */
__device__ inline float state_lse(float lse) {
    return lse == INFINITY ? -INFINITY : lse;
}

/* The weights of two states in their merge: O = a O_a + b O_b; an O of zero weight is not to be read. If either LSE is
 * NaN all is, whatever there is to weigh. */
struct merge_weights {
    float a, b, lse;

    __device__ merge_weights(float lse_a, float lse_b) {
        lse_a = state_lse(lse_a);
        lse_b = state_lse(lse_b);
        if (isnan(lse_a) || isnan(lse_b)) {
            a = 0;
            b = lse = NAN;
            return;
        }
        float max = fmaxf(lse_a, lse_b);
        if (max == -INFINITY) {
            a = b = 0;
            lse = max;
            return;
        }
        float w_a = expf(lse_a - max), w_b = expf(lse_b - max), sum = w_a + w_b;
        lse = max + logf(sum);
        a = w_a / sum;
        b = w_b / sum;
    }
    /* Weights of what comes where nothing is. */
    __device__ explicit merge_weights(float lse_b) : a(0), b(isnan(lse_b) ? NAN : lse_b > -INFINITY), lse(lse_b) {}
};

/* Where a row's normalised O and its LSE go: the state, joined with what is there if the call resumes it; or `out`, and
 * the state if there is one that is not resumed; or the work space. The sink of a head has its share of `out` alone.
 * Everyone who stores O of a row does so before one of them stores the LSE, since the weights follow from the LSE that
 * is there. */
struct row_sink {
    float *o, *lse;
    char *out;
    bool codes;            /* `out` holds codes; false: elements */
    float inverse;         /* 1 / the scale of the codes; any number where `out` holds elements */
    merge_weights weights; /* weights of the state that is there, and of what comes */
    float kept;            /* share of `out` that the sink of the head leaves */
    bool resume;

    __device__ row_sink(const cpa_cuda_attend_args &a, int64_t q_row, int64_t state_shift, int32_t row,
                        int32_t kv_group, float lse_new)
        : weights(lse_new) {
        row_place place(a, q_row, row, kv_group);
        lse = a.lse ? a.lse + place.state_row * a.lse_row_stride + place.head * a.lse_head_stride + state_shift : NULL;
        o = a.o ? a.o + place.state_row * a.o_row_stride + (int64_t)place.head * a.v_dim + state_shift : NULL;
        codes = HAS_CODES && a.out_scale;
        if (codes) inverse = __frcp_rn(__ldg(a.out_scale));
        const int64_t bytes = codes ? 1 : element_bytes(a.q_dtype);
        out = a.out ? a.out + (place.state_row * a.out_row_stride + place.head * a.out_head_stride) * bytes : NULL;
        resume = a.resume;
        if (resume) weights = merge_weights(*lse, lse_new);
        kept = out && a.score.sink_logits ? sink_factor(a.score.sink_logits, place.head, weights.lse) : 1;
    }
    /* Of a row of a piece: into the state and `out`, or into the work space if the piece is one of several of its
     * tile. */
    __device__ row_sink(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t row, int32_t kv_group,
                        float lse_new)
        : row_sink(a, piece.q_row, piece.state_shift, row, kv_group, lse_new) {
        if (piece.partial < 0) return;
        place_in_work_space(a, kv_group * a.partial_rows + piece.partial + (row - piece.row_begin), lse_new);
    }
    /* Of a listed row, whose LSE is in base 2, as the decode kernel joins it. It has no place in the state: what lies
     * there for the row of that number among those of the piece is left alone. */
    __device__ row_sink(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t row, int32_t kv_group,
                        float lse_new, const cpa_cuda_listed_row *rows)
        : row_sink(a, 0, 0, row, kv_group, lse_new) {
        const int32_t token = token_of_row(a, row);
        const cpa_cuda_listed_row &listed = rows[piece.q_row + token];
        const int64_t states = (int64_t)piece.partial * listed.stride;
        place_in_work_space(a, kv_group * a.partial_rows + listed.partial + states + (row - token * a.group),
                            lse_new * (float)M_LOG2E);
    }

    __device__ void place_in_work_space(const cpa_cuda_attend_args &a, int64_t at, float lse_new) {
        o = a.partial_o + at * a.v_dim;
        lse = a.partial_lse + at;
        out = NULL;
        resume = false;
        weights = merge_weights(lse_new);
    }

    __device__ bool adds_to_old() const { return o && resume && weights.a > 0; }
    /* What is there, as far as it counts. Many columns are better loaded before any is stored: no load moves up past a
     * store. */
    template <int N>
    __device__ void load_old(int32_t column, float (&old)[N]) const {
        if (adds_to_old()) load_floats(o + column, old);
    }
    template <typename T, int N>
    __device__ void store(int32_t column, const float (&value)[N], const float (&old)[N]) const {
        float result[N];
        for (int i = 0; i < N; i++) result[i] = weights.b != 0 ? weights.b * value[i] : 0;
        if (adds_to_old())
            for (int i = 0; i < N; i++) result[i] += weights.a * old[i];
        if (o && !(resume && out)) store_floats(o + column, result);
        if (!out) return;
        for (int i = 0; i < N; i++) result[i] *= kept;
        if (codes) {
            store_codes(out, column, result, inverse);
        } else {
            store_elements<T>(out, column, result);
        }
    }
    template <typename T, int N>
    __device__ void store(int32_t column, const float (&value)[N]) const {
        float old[N];
        load_old(column, old);
        store<T>(column, value, old);
    }
    __device__ void store_lse() const {
        if (lse) *lse = weights.lse;
    }
};

#endif
