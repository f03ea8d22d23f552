/* attend for any dtype, width and block size, in fp32 without tensor cores: what the other kernels do not take, and
 * what tests compare them with. A warp a row and head. */
#include "kernels/cuda/attend/attend_blocks.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/score.cuh"
#include "kernels/cuda/attend/simple_rows.cuh"

namespace {

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
    const cached_token of = token_at(a, block, token, kv_head);
    float score = raw_score(a, q, of.k, lane);
    if constexpr (RULED) {
        score = ruled_score(a, rules, score, a.score.indexed ? relative(key_index(a, piece, key), rules.origin) : 0);
    } else {
        score *= a.scale;
    }
    add_key(a, state, score, of.v, lane);
}

/* A row of an item, by a warp. */
template <bool RULED, int ELEMENTS>
__device__ void attend_row(const cpa_cuda_attend_args &a, const selected_keys &selected, const cpa_cuda_item *found,
                           int row, int kv_group, int lane) {
    const cpa_attend_item item = found->item;
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
    row_state<ELEMENTS> state;
    clear_state(state);
    load_query(q, a, place.state_row, place.head, lane);
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

template <bool RULED, int ELEMENTS>
__global__ void attend_simple(const __grid_constant__ cpa_cuda_attend_args a,
                              const __grid_constant__ selected_keys selected, int64_t rows) {
    const int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    const int kv_group = blockIdx.y, lane = threadIdx.x % WARP_LANES;
    if (index >= rows) return;
    const cpa_cuda_item *found = item_of_row(a, index);
    const int row = (int)(index - found->begin);
    /* Items that fill a padded plan up have none; those of a reserved one may begin behind rows that are nobody's. */
    if (row < 0 || row >= found->item.q_count * a.group) return;
    attend_row<RULED, ELEMENTS>(a, selected, found, row, kv_group, lane);
}

/* The rows that select blocks, or all, of items of few rows: a CTA an item and KV head. */
template <int ELEMENTS>
__global__ void attend_few(const __grid_constant__ cpa_cuda_attend_args a,
                           const __grid_constant__ selected_keys selected, cpa_cuda_few_by_blocks few) {
    const cpa_cuda_item *found = a.items + blockIdx.x;
    const int kv_group = blockIdx.y, lane = threadIdx.x % WARP_LANES;
    const cpa_key_blocks &blocks = selected.blocks;
    if (found->item.q_count > few.rows) return;
    for (int row = threadIdx.x / WARP_LANES; row < found->item.q_count * a.group; row += WARPS) {
        const int64_t at = row_place(a, found->item.q_row, row, kv_group).state_row;
        if (few.all || blocks.row_word[blocks.row_map ? blocks.row_map[at] : at] >= 0)
            attend_row<true, ELEMENTS>(a, selected, found, row, kv_group, lane);
    }
}

bool is_wide(const cpa_cuda_attend_args &a) {
    return a.k_dim > NARROW * WARP_LANES || a.v_dim > NARROW * WARP_LANES || has_tiles(a.kv_dtype);
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
    const auto kernel = is_wide(*args) ? (ruled ? attend_simple<true, WIDE> : attend_simple<false, WIDE>)
                                       : (ruled ? attend_simple<true, NARROW> : attend_simple<false, NARROW>);
    kernel<<<grid, WARPS * WARP_LANES, 0, cpa_cuda_handle(stream)>>>(*args, selected, rows);
    return cpa_cuda_launched(stream, "attend");
}

extern "C" cpa_status cpa_cuda_attend_few_by_blocks(const cpa_cuda_attend_args *args, const cpa_key_blocks *blocks,
                                                    cpa_cuda_few_by_blocks few, cpa_stream *stream) {
    const dim3 grid((unsigned)args->n_items, args->kv_heads);
    selected_keys selected = {};
    selected.blocks = *blocks;
    const auto kernel = is_wide(*args) ? attend_few<WIDE> : attend_few<NARROW>;
    kernel<<<grid, WARPS * WARP_LANES, 0, cpa_cuda_handle(stream)>>>(*args, selected, few);
    return cpa_cuda_launched(stream, "attend");
}
