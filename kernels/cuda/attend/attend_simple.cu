/* attend for any dtype, width and block size, in fp32 without tensor cores: what the other kernels do not take, and
 * what tests compare them with. A warp a row and head; the lanes share the elements of a head. */
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/score.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/cache/tiles.cuh"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int WARPS = 4;
/* Elements of a head, a lane: of most heads; and of wide ones and rows of latents with scales of tiles, which take more
 * registers. */
constexpr int NARROW = 256 / WARP_LANES, WIDE = CPA_MAX_HEAD_DIM / WARP_LANES;

/* The last item that begins at or before the packed row. */
__device__ const cpa_cuda_item *item_of(const cpa_cuda_attend_args &a, int64_t row) {
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

/* A key or a value of the cache. */
struct cached_row {
    const char *pool;
    int64_t at; /* element of the pool with which the row begins */
    int32_t run_shift;
    int64_t run_stride;
    uint32_t word; /* of the row, if it is quantised */
    const uint8_t *bytes; /* scales of a row of CPA_FP8_T64 */

    template <int ELEMENTS>
    __device__ float read(const cpa_cuda_attend_args &a, int32_t column) const {
        if constexpr (ELEMENTS == WIDE) {
            if (has_tiles(a.kv_dtype)) return read_tiled(pool + at, bytes, a.kv_dtype, a.k_dim, column);
        }
        const int64_t i = at + (column >> run_shift) * run_stride + (column & ((1 << run_shift) - 1));
        return a.kv_dtype >= CPA_DTYPE_COUNT ? read_code(pool, a.kv_dtype, i, word) : read_element(pool, a.kv_dtype, i);
    }
};

/* The scale word of a row, or that of the tensor. */
__device__ uint32_t word_of(const cpa_cuda_attend_args &a, const char *pool, int64_t block_stride, int64_t words_at,
                            float tensor_scale, int64_t block, int head, int64_t token) {
    if (!words_at || has_tiles(a.kv_dtype)) return __float_as_uint(tensor_scale);
    return *(const uint32_t *)scale_word_at(a, pool, block_stride, words_at, block, head, token);
}

/* Lists and blocks of keys (cpattn/selection.h); unit 0 and bits NULL: none. */
struct selected_keys {
    cpa_key_indices lists;
    cpa_key_blocks blocks;
};

/* Those of a row and head, whose keys are asked for in ascending order of their indices. */
struct row_selection {
    const int32_t *list;
    const uint32_t *bits;
    int32_t next, n; /* first entry that is not below the keys to come, and entries; n negative: all keys */
    int32_t unit, block, n_blocks;

    __device__ void start(const selected_keys &selected, int64_t row, int head, int kv_head) {
        const cpa_key_indices &lists = selected.lists;
        const cpa_key_blocks &blocks = selected.blocks;
        bits = NULL;
        next = 0;
        n = -1;
        if (lists.unit > 0) {
            const int64_t entry = lists.row_map ? lists.row_map[row] : row;
            n = lists.counts ? min(lists.counts[entry], lists.width) : lists.width;
            unit = lists.unit;
            list = lists.indices + entry * lists.row_stride + kv_head * lists.head_stride;
        }
        if (blocks.bits) {
            const int64_t entry = blocks.row_map ? blocks.row_map[row] : row, word = blocks.row_word[entry];
            if (word >= 0) bits = blocks.bits + word + head * blocks.head_stride;
            block = blocks.block;
            n_blocks = blocks.width;
        }
    }
    __device__ bool takes(int64_t index) {
        if (n >= 0) {
            const int64_t entry = index / unit;
            while (next < n && list[next] >= 0 && list[next] < entry) next++;
            if (next >= n || list[next] != entry) return false;
        }
        if (!bits) return true;
        const int64_t at = index / block;
        return at < n_blocks && bits[at / 32] >> (at % 32) & 1;
    }
};

template <int ELEMENTS>
struct row_state {
    float o[ELEMENTS], max, sum; /* max of scaled scores; O not yet divided by the sum */
    float o_lost[ELEMENTS], sum_lost;
};

/* Adds x to a sum and keeps what rounding lost (Kahan, 1965): a plain sum over a hundred thousand keys would be off by
 * more than the tolerance of fp32. Of an infinite sum nothing is lost: inf - inf would make it NaN. */
__device__ void add(float &sum, float &lost, float x) {
    const float corrected = x - lost, next = sum + corrected;
    lost = isinf(next) ? 0 : (next - sum) - corrected;
    sum = next;
}

/* The score of a key at the index t, relative to that of the query, from a raw one. */
__device__ float ruled_score(const cpa_cuda_attend_args &a, const row_score &row, float raw, int32_t t) {
    const cpa_cuda_score &rules = a.score;
    float score = raw * a.scale;
    if (rules.transforms) {
        score = (rules.softcap > 0 ? tanhf(raw * (rules.pre_scale / rules.softcap)) : raw) * row.factor;
        score += row.slope * (float)(t - row.index);
        if (row.bias) score += bias_at(rules.bias, row.bias, t - row.bias_first);
    }
    return row.bits && !(seen_keys(row, a.mask.causal, t) & 1) ? -INFINITY : score;
}

template <bool RULED, int ELEMENTS>
__device__ void attend_key(const cpa_cuda_attend_args &a, row_state<ELEMENTS> &state, const float (&q)[ELEMENTS],
                           const cpa_attend_item &item, const row_score &rules, const cpa_cuda_piece &piece, int kv_head,
                           int key, int lane) {
    const int64_t block = a.tables[item.table + (key >> a.block_shift)], token = key & ((1 << a.block_shift) - 1);
    const int64_t k_at = block * a.k_block_stride + token * a.k_token_stride + kv_head * a.k_head_stride;
    const int64_t v_at = block * a.v_block_stride + token * a.v_token_stride + kv_head * a.v_head_stride;
    const float k_scale = head_scale(a.k_scale, a.k_head_scales, a.head_scale_step, kv_head);
    const float v_scale = head_scale(a.v_scale, a.v_head_scales, a.head_scale_step, kv_head);
    const uint8_t *bytes = (const uint8_t *)a.k + block * a.k_block_stride + a.k_words_at + token * POWER_SCALES;
    const cached_row k = {a.k, k_at, a.k_run_shift, a.k_run_stride,
                          word_of(a, a.k, a.k_block_stride, a.k_words_at, k_scale, block, kv_head, token), bytes};
    const cached_row v = {a.v, v_at, a.v_run_shift, a.v_run_stride,
                          word_of(a, a.v, a.v_block_stride, a.v_words_at, v_scale, block, kv_head, token), bytes};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        if (d < a.k_dim) dot += q[i] * k.read<ELEMENTS>(a, d);
    }
    float score = warp_sum(dot);
    if constexpr (RULED) {
        score = ruled_score(a, rules, score, a.score.indexed ? relative(key_index(a, piece, key), rules.origin) : 0);
    } else {
        score *= a.scale;
    }
    const float max = fmaxf(state.max, score);
    if (score == -INFINITY) return; /* weighs nothing, whatever its value holds */
    const float keep = expf(state.max - max), p = expf(score - max);
    state.max = max;
    state.sum *= keep;
    state.sum_lost *= keep;
    add(state.sum, state.sum_lost, p);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        if (d >= a.v_dim) continue;
        state.o[i] *= keep;
        state.o_lost[i] *= keep;
        add(state.o[i], state.o_lost[i], p * v.read<ELEMENTS>(a, d));
    }
}

/* Stores a row, joined with the state that is there if the call resumes it. */
template <bool RULED, int ELEMENTS>
__device__ void store_row(const cpa_cuda_attend_args &a, const row_state<ELEMENTS> &state, int64_t row,
                          int64_t state_shift, bool refused, int head, int lane) {
    float *o = a.o ? a.o + row * a.o_row_stride + (int64_t)head * a.v_dim + state_shift : NULL;
    float *lse_at = a.lse ? a.lse + row * a.lse_row_stride + head * a.lse_head_stride + state_shift : NULL;
    const float seen = state.sum == 0 ? -INFINITY : state.max + logf(state.sum); /* NaN if the sum is */
    const float lse = refused ? NAN : seen;
    const merge_weights weights(a.resume ? *lse_at : -INFINITY, lse);
    const float kept = RULED && a.score.sink_logits ? sink_factor(a.score.sink_logits, head, weights.lse) : 1;
    __syncwarp(); /* all lanes have read the LSE that is there */
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        if (d >= a.v_dim) continue;
        float value = weights.b != 0 ? weights.b * (state.o[i] / state.sum) : 0;
        if (weights.a > 0) value += weights.a * o[d];
        if (o) o[d] = value;
        if (RULED) value *= kept;
        const int64_t at = row * a.out_row_stride + head * a.out_head_stride + d;
        if (!a.out) continue;
        if (a.out_scale) {
            a.out[at] = (char)e4m3_code(value * __fdiv_rn(1, __ldg(a.out_scale)));
        } else {
            write_element(a.out, a.q_dtype, at, value);
        }
    }
    if (lse_at && lane == 0) *lse_at = weights.lse;
}

template <bool RULED, int ELEMENTS>
__global__ void attend_simple(const __grid_constant__ cpa_cuda_attend_args a,
                              const __grid_constant__ selected_keys selected, int64_t rows) {
    const int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    const int kv_group = blockIdx.y, lane = threadIdx.x % WARP_LANES;
    if (index >= rows) return;
    const cpa_cuda_item *found = item_of(a, index);
    const cpa_attend_item item = found->item;
    const int row = (int)(index - found->begin);
    const cpa_cuda_piece piece = {.q_row = item.q_row,
                                  .q_first = item.q_first,
                                  .k_first = item.k_first,
                                  .table = item.table,
                                  .row_begin = 0,
                                  .row_end = row + 1,
                                  .k_begin = 0,
                                  .k_end = (int32_t)item.k_count,
                                  .q_set = item.q_set,
                                  .k_set = item.k_set,
                                  .partial = -1};
    /* Items that fill a padded plan up have none; those of a reserved one may begin behind rows that are nobody's. */
    if (row < 0 || row >= item.q_count * a.group) return;
    const row_place place(a, item.q_row, row, kv_group);
    row_keys keys = keys_of_row(a, piece, row);
    row_score rules;
    if constexpr (RULED) {
        const int token = token_of_row(a, row);
        keys = keys_of_token(a, piece, token).keys;
        fill_row_score(rules, a, piece, row, kv_group, query_index(a, piece, token));
    }
    const int sinks = keys.first > 0 ? keys_before(a, piece, a.mask.sinks) : 0;
    float q[ELEMENTS];
    row_state<ELEMENTS> state = {{0}, CPA_LOWEST_EXPONENT * (float)M_LN2, 0, {0}, 0};
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        int64_t at = place.state_row * a.q_row_stride + place.head * a.q_head_stride + d;
        q[i] = d < a.k_dim ? read_element(a.q, a.q_dtype, at) : 0;
    }
    row_selection selection;
    if constexpr (RULED) selection.start(selected, place.state_row, place.head, kv_group);
    const auto take = [&](int begin, int end) {
        for (int key = begin; key < end; key++) {
            if constexpr (RULED) {
                if (!selection.takes(key_index(a, piece, key))) continue;
            }
            attend_key<RULED, ELEMENTS>(a, state, q, item, rules, piece, kv_group, key, lane);
        }
    };
    take(0, min(sinks, keys.end));
    take(max(keys.first, sinks), keys.end);
    store_row<RULED, ELEMENTS>(a, state, place.state_row, found->state_shift, found->refused, place.head, lane);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_simple(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_cuda_attend_args *args = launch->args;
    const int64_t rows = launch->plan->rows;
    dim3 grid((unsigned)((rows + WARPS - 1) / WARPS), args->kv_heads);
    const cpa_key_selection *selection = launch->selection;
    selected_keys selected = {};
    if (selection && selection->indices) {
        selected.lists = *selection->indices;
        if (selected.lists.unit == 0) selected.lists.unit = 1;
    }
    if (selection && selection->blocks) selected.blocks = *selection->blocks;
    const bool ruled = args->score.any || args->score.sink_logits || selected.lists.unit > 0 || selected.blocks.bits;
    const bool wide = args->k_dim > NARROW * WARP_LANES || args->v_dim > NARROW * WARP_LANES ||
                      has_tiles(args->kv_dtype);
    const auto kernel = wide ? (ruled ? attend_simple<true, WIDE> : attend_simple<false, WIDE>)
                             : (ruled ? attend_simple<true, NARROW> : attend_simple<false, NARROW>);
    kernel<<<grid, WARPS * WARP_LANES, 0, cpa_cuda_handle(stream)>>>(*args, selected, rows);
    return cpa_cuda_launched(stream, "attend");
}
