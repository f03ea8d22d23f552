/* sparse_attend over ordinary heads of up to 256 columns in groups of up to 16: the bytes of the keys and values that
 * lists name bound it. A CTA takes a row and a KV head, whose query heads are the rows of mma.sync. Its warps go
 * through tiles of 16 keys, each by itself: they gather the rows of tiles ahead by cp.async while they multiply one. In
 * the end their states are joined; where there are few rows, CTAs of a cluster (9.0) share the keys of one. */
#include "base/check.h"
#include "kernels/cuda/attend/cluster.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/attend/sparse.cuh"

namespace {

constexpr int ROWS = 16, KEYS = 16; /* of mma.sync; of a warp's tile */
constexpr int WARPS = 4, THREADS = 32 * WARPS, MOST_SHARES = 8;

template <typename Element, int KDim, int VDim>
struct heads_config {
    using element = Element;
    static constexpr int K_DIM = KDim, V_DIM = VDim, CTAS = KDim > 192 ? 1 : 2; /* that share a multiprocessor */
    static constexpr int STAGES = KDim > 128 ? 2 : 3;
    static constexpr int Q_BYTES = ROWS * K_DIM * 2, K_BYTES = KEYS * K_DIM * 2, V_BYTES = KEYS * V_DIM * 2;
    static constexpr int STAGE_BYTES = K_BYTES + V_BYTES, WARP_BYTES = STAGES * STAGE_BYTES;
    static constexpr int PITCH = V_DIM + 8; /* of O where a warp leaves it: rows begin in different banks */
    static_assert(ROWS * PITCH * 4 <= WARP_BYTES, "a warp's O takes the place of its tiles");
    static constexpr int TILE_ALIGNMENT = 128, SHARED_BYTES = Q_BYTES + WARPS * WARP_BYTES + TILE_ALIGNMENT;
};

/* Of each warp's rows, and behind them of the CTA's. */
struct heads_rows {
    float max[WARPS + 1][ROWS], sum[WARPS + 1][ROWS];
};
struct heads_shared {
    listed_row row;
    listed_keys keys;
    heads_rows rows;
    uint32_t shown[WARPS][4]; /* a bit a key of the tile in each stage */
};

/* ---- a warp's tiles ---- */

/* Where a key and its value lie; NULL: the list names none there. */
struct key_place {
    const char *k, *v;
};

template <typename C>
struct heads_tiles {
    const cpa_cuda_sparse_args &args;
    heads_shared &shared;
    const uint32_t stages; /* of this warp */
    const int warp, lane, kv_head;

    __device__ key_place place_at(int32_t tile) const {
        const cpa_cuda_attend_args &a = args.a[0];
        const int64_t slot = slot_at(a, args.lists[0], shared.row, shared.keys, tile * KEYS + lane % KEYS);
        if (slot < 0) return {nullptr, nullptr};
        const int64_t block = slot >> a.block_shift, token = slot & ((1 << a.block_shift) - 1);
        return {a.k + (block * a.k_block_stride + token * a.k_token_stride + kv_head * a.k_head_stride) * 2,
                a.v + (block * a.v_block_stride + token * a.v_token_stride + kv_head * a.v_head_stride) * 2};
    }
    /* Rows of DIM columns, of which `dim` are there, zeros else; each lane knows one of the rows. */
    template <int DIM>
    __device__ void copy_rows(uint32_t tile, const char *own, const char *anywhere, int dim) const {
        constexpr int CHUNKS = DIM / 8;
#pragma unroll
        for (int i = 0; i < KEYS * CHUNKS / 32; i++) {
            const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
            const char *from = (const char *)__shfl_sync(0xffffffff, (uint64_t)own, row);
            const bool is = from && chunk * 8 < dim;
            copy_async_16(tile + swizzled<DIM>(row, chunk), is ? from + chunk * 16 : anywhere, is);
        }
    }
    __device__ void copy_tile(int stage, const key_place &place) const {
        const cpa_cuda_attend_args &a = args.a[0];
        const uint32_t tile = stages + stage * C::STAGE_BYTES;
        const uint32_t shown = __ballot_sync(0xffffffff, place.k != nullptr) & ((1 << KEYS) - 1);
        if (lane == 0) shared.shown[warp][stage] = shown;
        copy_rows<C::K_DIM>(tile, place.k, a.k, a.k_dim);
        copy_rows<C::V_DIM>(tile + C::K_BYTES, place.v, a.k, a.v_dim);
    }
};

/* What a lane has of the rows lane / 4 and 8 on: O by pairs of columns, the maximum of raw scores, its columns' sum. */
template <typename C>
struct heads_state {
    float o[C::V_DIM / 8][4], max[2], sum[2];

    __device__ explicit heads_state(float scale_log2) {
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
        max[0] = max[1] = lowest_max(scale_log2);
        sum[0] = sum[1] = 0;
    }

    /* Scores of a tile become probabilities, as the operand of their product with the values. */
    __device__ void soften(float (&s)[2][4], uint32_t (&p)[4], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *const of[] = {&s[0][2 * half], &s[0][2 * half + 1], &s[1][2 * half], &s[1][2 * half + 1]};
            const float most =
                fmaxf(max[half], quad_max(fmaxf(fmaxf(*of[0], *of[1]), fmaxf(*of[2], *of[3]))));
            const float keep = worth_of(max[half], most, scale_log2), base = most * scale_log2;
            max[half] = most;
            sum[half] *= keep;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *of[i] = exp2_fast(*of[i] * scale_log2 - base);
                sum[half] += *of[i];
            }
            if (__any_sync(0xffffffff, keep != 1)) {
#pragma unroll
                for (int n = 0; n < C::V_DIM / 8; n++) o[n][2 * half] *= keep, o[n][2 * half + 1] *= keep;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = pack_pair<typename C::element>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
    }

    __device__ void take_tile(uint32_t q, uint32_t tile, uint32_t shown, float scale_log2, int lane) {
        const uint32_t q_at = a_base<C::K_DIM>(q, 0, lane), k_at = keys_base<C::K_DIM>(tile, lane);
        const uint32_t v_at = values_base<C::V_DIM>(tile + C::K_BYTES, lane);
        float s[2][4] = {};
        uint32_t p[4];
#pragma unroll
        for (int step = 0; step < C::K_DIM / 16; step++) {
            uint32_t a[4], b[4];
            load_matrices(a, at_pair<C::K_DIM>(q_at, step));
            load_matrices(b, at_pair<C::K_DIM>(k_at, step));
            mma<typename C::element>(s[0], a, b[0], b[1]);
            mma<typename C::element>(s[1], a, b[2], b[3]);
        }
        if (shown != (1 << KEYS) - 1) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!(shown >> (i / 4 * 8 + 2 * (lane % 4) + i % 2) & 1)) s[i / 4][i % 4] = -INFINITY;
        }
        soften(s, p, scale_log2);
#pragma unroll
        for (int pair = 0; pair < C::V_DIM / 16; pair++) {
            uint32_t b[4];
            load_matrices_transposed(b, at_pair<C::V_DIM>(v_at, pair));
            mma<typename C::element>(o[2 * pair], p, b[0], b[1]);
            mma<typename C::element>(o[2 * pair + 1], p, b[2], b[3]);
        }
    }

    /* Where the warp's tiles were. */
    __device__ void leave(heads_rows &rows, uint32_t to, int warp, int lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = lane / 4 + 8 * half;
            const float whole = quad_sum(sum[half]);
#pragma unroll
            for (int n = 0; n < C::V_DIM / 8; n++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (row * C::PITCH + 8 * n + lane % 4 * 2) * 4),
                             "f"(o[n][2 * half]), "f"(o[n][2 * half + 1])
                             : "memory");
            if (lane % 4 == 0) rows.max[warp][row] = max[half], rows.sum[warp][row] = whole;
        }
    }
};

/* The tiles of the CTA from first + warp on, every WARPS-th: STAGES - 1 are on their way. */
template <typename C>
__device__ void take_tiles(const heads_tiles<C> &tiles, heads_state<C> &state, uint32_t q, int32_t first, int32_t end) {
    const float scale_log2 = tiles.args.a[0].scale_log2;
    int32_t ahead = first + tiles.warp;
    key_place next = tiles.place_at(ahead);
    int stage = 0, stage_ahead = 0;
    const auto copy_next = [&] {
        if (ahead < end) {
            const key_place place = next;
            ahead += WARPS;
            next = tiles.place_at(ahead); /* before the copies, which follow what was looked up last time */
            tiles.copy_tile(stage_ahead, place);
        }
        copy_async_commit();
        stage_ahead = stage_ahead + 1 == C::STAGES ? 0 : stage_ahead + 1;
    };
#pragma unroll
    for (int i = 0; i < C::STAGES - 1; i++) copy_next();
    for (int32_t tile = first + tiles.warp; tile < end; tile += WARPS) {
        copy_async_wait<C::STAGES - 2>();
        __syncwarp(); /* all lanes' copies of this tile are there, and all are done with the one before */
        copy_next();
        state.take_tile(q, tiles.stages + stage * C::STAGE_BYTES, tiles.shared.shown[tiles.warp][stage], scale_log2,
                        tiles.lane);
        stage = stage + 1 == C::STAGES ? 0 : stage + 1;
    }
    copy_async_wait<0>();
}

/* ---- joins ---- */

/* States of one row and where they are: of the warps of a CTA, or of the CTAs of a cluster. */
struct joined_states {
    float max, sum;
    float value[4]; /* columns of O, times the sum */

    template <typename MaxOf, typename SumOf, typename FourOf>
    __device__ joined_states(int states, float scale_log2, MaxOf max_of, SumOf sum_of, FourOf four_of)
        : max(-FLT_MAX), sum(0), value() {
        for (int i = 0; i < states; i++) max = fmaxf(max, max_of(i));
        for (int i = 0; i < states; i++) {
            const float worth = worth_of(max_of(i), max, scale_log2);
            sum += worth * sum_of(i);
            if (worth == 0) continue;
            const float4 four = four_of(i);
            value[0] += worth * four.x, value[1] += worth * four.y;
            value[2] += worth * four.z, value[3] += worth * four.w;
        }
    }
};

/* Joins the warps' states to that of the CTA, which takes the place of the first warp's. */
template <typename C>
__device__ void join_warps(heads_rows &rows, char *tiles, float scale_log2) {
    constexpr int FOURS = C::V_DIM / 4;
    for (int i = threadIdx.x; i < ROWS * FOURS; i += THREADS) {
        const int row = i / FOURS, column = i % FOURS * 4;
        const auto at = [&](int warp) {
            return (float4 *)(tiles + warp * C::WARP_BYTES + (row * C::PITCH + column) * 4);
        };
        const joined_states joined(
            WARPS, scale_log2, [&](int warp) { return rows.max[warp][row]; },
            [&](int warp) { return rows.sum[warp][row]; }, [&](int warp) { return *at(warp); });
        *at(0) = make_float4(joined.value[0], joined.value[1], joined.value[2], joined.value[3]);
        if (column == 0) rows.max[WARPS][row] = joined.max, rows.sum[WARPS][row] = joined.sum;
    }
}

/* Joins the CTAs' states of this CTA's share of the rows, and stores them. */
template <typename C>
__device__ void store_rows(const cpa_cuda_sparse_args &args, const heads_shared &shared, uint32_t tiles, int kv_head,
                           int share, int shares) {
    constexpr int FOURS = C::V_DIM / 4, EACH = (ROWS * FOURS + THREADS - 1) / THREADS;
    const cpa_cuda_attend_args &a = args.a[0];
    const cpa_cuda_piece &piece = shared.row.piece;
    const uint32_t max_at = shared_address(shared.rows.max[WARPS]), sum_at = shared_address(shared.rows.sum[WARPS]);
    const int first = share * (ROWS / shares), end = min(first + ROWS / shares, a.group);
    float *lse_at[EACH], lses[EACH];
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = threadIdx.x + n * THREADS, row = first + i / FOURS, column = i % FOURS * 4;
        lse_at[n] = nullptr;
        if (row >= end || column >= a.v_dim) continue;
        const joined_states joined(
            shares, a.scale_log2, [&](int cta) { return read_in(max_at + row * 4, cta); },
            [&](int cta) { return read_in(sum_at + row * 4, cta); },
            [&](int cta) { return read_four_in(tiles + (row * C::PITCH + column) * 4, cta); });
        const float sum = counted_sum(joined.sum, joined.max, a.scale_log2), inverse = inverse_of_sum(sum);
        const float lse = piece.refused ? NAN : lse_of(sum, joined.max * a.scale + logf(sum));
        const row_sink sink(a, piece, row, kv_head, lse);
        float value[4];
#pragma unroll
        for (int e = 0; e < 4; e++) value[e] = joined.value[e] * inverse;
        sink.template store<typename C::element>(column, value);
        if (column > 0) continue;
        lse_at[n] = sink.lse, lses[n] = sink.weights.lse;
        if (args.max_logits)
            args.max_logits[piece.q_row * a.q_heads + kv_head * a.group + row] =
                sum == 0 ? -INFINITY : joined.max * a.scale;
    }
    __syncthreads(); /* all have read the LSEs that are there */
#pragma unroll
    for (int n = 0; n < EACH; n++)
        if (lse_at[n]) *lse_at[n] = lses[n];
}

/* ---- the kernel ---- */

template <typename C>
__device__ void load_heads(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_head, uint32_t q) {
    constexpr int CHUNKS = C::K_DIM / 8;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool is = row < a.group && chunk * 8 < a.k_dim;
        const int64_t at = piece.q_row * a.q_row_stride + (kv_head * a.group + row) * a.q_head_stride + chunk * 8;
        copy_async_16(q + swizzled<C::K_DIM>(row, chunk), is ? a.q + at * 2 : a.q, is);
    }
    copy_async_commit();
    copy_async_wait<0>();
}

template <typename C>
__global__ void __launch_bounds__(THREADS, C::CTAS) sparse_heads(const __grid_constant__ cpa_cuda_sparse_args args) {
    extern __shared__ char memory[];
    __shared__ heads_shared shared;
    const cpa_cuda_attend_args &a = args.a[0];
    char *q = memory + (C::TILE_ALIGNMENT - shared_address(memory) % C::TILE_ALIGNMENT) % C::TILE_ALIGNMENT;
    char *tiles = q + C::Q_BYTES;
    const int share = cluster_cta(), shares = cluster_ctas();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = blockIdx.x / shares, kv_head = unit % a.kv_heads;
    if (threadIdx.x == 0) {
        fill_listed_row(shared.row, args, unit / a.kv_heads);
        shared.keys = listed_keys_of(args.lists[0], shared.row, kv_head);
    }
    __syncthreads();
    if (!shared.row.any) return; /* none of the cluster has a row */
    load_heads<C>(a, shared.row.piece, kv_head, shared_address(q));
    __syncthreads();
    const int64_t all = (shared.keys.count + KEYS - 1) / KEYS;
    const heads_tiles<C> of = {args, shared, shared_address(tiles) + warp * C::WARP_BYTES, warp, lane, kv_head};
    heads_state<C> state(a.scale_log2);
    take_tiles<C>(of, state, shared_address(q), (int32_t)(all * share / shares), (int32_t)(all * (share + 1) / shares));
    __syncwarp();
    state.leave(shared.rows, of.stages, warp, lane);
    __syncthreads();
    join_warps<C>(shared.rows, tiles, a.scale_log2);
    __syncthreads();
    if (shares > 1) join_cluster();
    store_rows<C>(args, shared, shared_address(tiles), kv_head, share, shares);
    if (shares > 1) join_cluster(); /* nobody reads what is this CTA's any more */
}

/* CTAs that share a row's keys: as many as fill the device, as long as each warp has several tiles. */
template <typename C>
int shares_of(const cpa_cuda_sparse_args &args, const cpa_cuda_device *device) {
    constexpr int LEAST_KEYS = 4 * KEYS * WARPS; /* of a CTA */
    const int64_t keys = (int64_t)args.lists[0].width * args.lists[0].unit, units = args.rows * args.a[0].kv_heads;
    int shares = 1;
    if (device->path != CPA_CUDA_HOPPER) return 1;
    while (shares < MOST_SHARES && units * shares * 2 <= device->multiprocessors * C::CTAS &&
           keys >= (int64_t)LEAST_KEYS * 2 * shares)
        shares *= 2;
    return shares;
}

template <typename C>
cpa_status launch(const cpa_cuda_sparse_args &args, cpa_stream *stream) {
    static uint64_t prepared;
    const auto kernel = sparse_heads<C>;
    const int shares = shares_of<C>(args, cpa_cuda_device_of(stream));
    CPA_TRY(cpa_cuda_shared_memory(stream, (const void *)kernel, C::SHARED_BYTES, &prepared));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {(unsigned)shares, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(args.rows * args.a[0].kv_heads * shares));
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = C::SHARED_BYTES;
    config.stream = cpa_cuda_handle(stream);
    config.attrs = &attribute;
    config.numAttrs = shares > 1;
    return cpa_cuda_check(&stream->error, cudaLaunchKernelEx(&config, kernel, args), "sparse_attend");
}

template <typename C>
bool fits(const cpa_stream *stream) {
    return cpa_cuda_fits(stream, (const void *)sparse_heads<C>, C::SHARED_BYTES);
}

/* run(config) for the narrowest that is wide enough. */
template <typename Element, typename Run>
auto for_width(int32_t k_dim, int32_t v_dim, const Run &run) {
    switch (cpa_cuda_width_of(k_dim, v_dim)) {
    case CPA_CUDA_64: return run(heads_config<Element, 64, 64>());
    case CPA_CUDA_128: return run(heads_config<Element, 128, 128>());
    case CPA_CUDA_192_128: return run(heads_config<Element, 192, 128>());
    default: return run(heads_config<Element, 256, 256>());
    }
}

} // namespace

extern "C" int cpa_cuda_sparse_heads_fit(const cpa_attention_shape *shape, cpa_stream *stream) {
    return for_width<__half>(shape->k_dim, shape->v_dim, [&](auto config) { return fits<decltype(config)>(stream); });
}

extern "C" cpa_status cpa_cuda_sparse_heads(const cpa_cuda_sparse_args *args, cpa_stream *stream) {
    const cpa_cuda_attend_args &a = args->a[0];
    const auto run = [&](auto config) { return launch<decltype(config)>(*args, stream); };
    return a.q_dtype == CPA_BF16 ? for_width<__nv_bfloat16>(a.k_dim, a.v_dim, run)
                                 : for_width<__half>(a.k_dim, a.v_dim, run);
}
