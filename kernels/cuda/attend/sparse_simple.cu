/* sparse_attend for any dtype, width and cache, in fp32 without tensor cores: what the other kernels do not take. A
 * warp a row and head. */
#include "kernels/cuda/attend/simple_rows.cuh"
#include "kernels/cuda/attend/sparse.cuh"

namespace {

template <int ELEMENTS>
__global__ void sparse_simple(const __grid_constant__ cpa_cuda_sparse_args args) {
    const cpa_cuda_attend_args &first = args.a[0];
    const int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    const int kv_head = blockIdx.y, lane = threadIdx.x % WARP_LANES;
    if (index >= args.rows * first.group) return;
    listed_row row;
    fill_listed_row(row, args, index / first.group);
    const int64_t of = row.piece.q_row;
    const int head = kv_head * first.group + (int)(index % first.group);
    float q[ELEMENTS], top = -INFINITY;
    row_state<ELEMENTS> state;
    clear_state(state);
    load_query(q, first, of, head, lane);
    for (int scope = 0; scope < args.n_scopes; scope++) {
        const cpa_cuda_attend_args &a = args.a[scope];
        const listed_keys keys = listed_keys_of(args.lists[scope], row, kv_head);
        for (int32_t i = 0; i < keys.count; i++) {
            const int64_t slot = slot_at(a, args.lists[scope], row, keys, i);
            if (slot < 0) continue;
            const cached_token token = token_at(a, slot >> a.block_shift, slot & ((1 << a.block_shift) - 1), kv_head);
            const float score = raw_score(a, q, token.k, lane) * a.scale;
            top = isnan(score) || score > top ? score : top;
            add_key(a, state, score, token.v, lane);
        }
    }
    store_row<true, ELEMENTS>(first, state, of, 0, false, head, lane);
    if (args.max_logits && lane == 0) args.max_logits[of * first.q_heads + head] = top;
}

} // namespace

extern "C" cpa_status cpa_cuda_sparse_simple(const cpa_cuda_sparse_args *args, cpa_stream *stream) {
    const cpa_cuda_attend_args &a = args->a[0];
    const int64_t rows = args->rows * a.group;
    const dim3 grid((unsigned)((rows + WARPS - 1) / WARPS), a.kv_heads);
    bool wide = a.k_dim > NARROW * WARP_LANES || a.v_dim > NARROW * WARP_LANES;
    for (int scope = 0; scope < args->n_scopes; scope++) wide |= has_tiles(args->a[scope].kv_dtype);
    const auto kernel = wide ? sparse_simple<WIDE> : sparse_simple<NARROW>;
    kernel<<<grid, WARPS * WARP_LANES, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "sparse_attend");
}
