/* attend over few rows of queries and whole tokens of a cache of CPA_TQ_: the rows of eight KV heads lie side by side
 * (attend_tokens.h), and come to shared memory by bulk copies, as they lie. Rows that a warp copies one by one take
 * twice their bytes from the L2 cache: they begin and end within sectors, which the next head's warp reads again.
 *
 * A warp has a head, and two gangs of eight warps take tiles of 32 tokens in turn. The warp of a gang that is the last
 * to be done with a tile has its stage filled again. What a warp does with its rows is that of decode_packed.cuh. */
#ifndef CPA_CUDA_DECODE_TOKENS_CUH
#define CPA_CUDA_DECODE_TOKENS_CUH

#include "kernels/cuda/attend/attend_tokens.h"
#include "kernels/cuda/attend/decode_packed.cuh"
#include "kernels/cuda/attend/hopper.cuh"

namespace {

/* Rows of heads side by side; or pairs of a key and a value, of so many bytes. */
template <int Pair>
struct token_layout {
    template <int Bytes>
    using rows = token_rows<Bytes, Pair == 0 ? Bytes : Pair, CPA_CUDA_TOKEN_HEADS>;
};

template <typename Element, int KeyBits, int ValueBits, bool Paired>
struct token_config {
    using element = Element;
    static constexpr int KEY_BYTES = turboquant_keys<KeyBits>::BYTES, VALUE_BYTES = turboquant_values<ValueBits>::BYTES;
    static constexpr bool PAIRED = Paired;
    using layout = token_layout<Paired ? KEY_BYTES + VALUE_BYTES : 0>;
    using keys = turboquant_keys<KeyBits, layout::template rows>;
    using values = turboquant_values<ValueBits, layout::template rows>;
    using sums = packed_sums<values>;
    using ends = turboquant_ends<keys, values>;
    using k_rows = typename keys::rows;
    using v_rows = typename values::rows;
    static constexpr int K_DIM = PACKED_DIM, V_DIM = PACKED_DIM, STAGES = 4;
    static constexpr int HEADS = CPA_CUDA_TOKEN_HEADS, TILES = 1, GANGS = 2, WARPS = GANGS * HEADS;
    static constexpr int CTAS = 1, THREADS = 32 * WARPS;
    static constexpr int K_BYTES = Paired ? 0 : RUNS * k_rows::RUN_BYTES; /* of keys alone */
    static constexpr int STAGE_BYTES = K_BYTES + RUNS * v_rows::RUN_BYTES;
    static constexpr int WORDS_AT = STAGE_BYTES; /* there are none */
    /* What a warp leaves lies where the stages were. */
    static constexpr int WARP_BYTES = CPA_CUDA_DECODE_ROWS * (V_DIM + 8) * 4, STAGES_AT = CENTROID_PAIRS_BYTES;
    static constexpr int LEFT_BYTES = WARPS * WARP_BYTES, IN_STAGES = STAGES * STAGE_BYTES;
    static constexpr int SHARED_BYTES = STAGES_AT + (LEFT_BYTES > IN_STAGES ? LEFT_BYTES : IN_STAGES);
    static constexpr int AT_ONCE = sums::TILES <= 8 ? RUNS : 1; /* more would make registers spill */
    static_assert(STAGES % GANGS == 0, "a stage is one gang's");
};

/* Barriers of the stages: full when a tile is there, empty when all warps of the gang are done with it. */
template <typename C>
struct token_stages {
    uint64_t full[C::STAGES], empty[C::STAGES];

    __device__ void init() {
        for (int i = 0; i < C::STAGES; i++) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), C::HEADS);
        }
        barrier_init_fence();
    }
    /* Arrives for a warp that is done with the stage; whether it is the last one. */
    __device__ bool is_last(int stage, int lane) {
        uint32_t pending = 0;
        __syncwarp();
        if (lane == 0)
            asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%1]; "
                         "mbarrier.pending_count.b64 %0, state; }"
                         : "=r"(pending)
                         : "r"(shared_address(&empty[stage]))
                         : "memory");
        return __shfl_sync(0xffffffff, pending, 0) == 1;
    }
};

/* A CTA's way through the tokens of a piece, and where a warp finds its head in a stage. */
template <typename C>
struct token_feed {
    static constexpr bool LEAVES_TAILS = true;
    static constexpr int K_BYTES = C::k_rows::PITCH, V_BYTES = C::v_rows::PITCH; /* of a token's eight heads */
    uint32_t k_at, v_at, k_phase, v_phase;
    int k_end;

    __device__ token_feed(const cpa_cuda_piece &piece, int head) : k_end(piece.k_end) {
        const uint32_t key = head * C::k_rows::STEP, value = head * C::v_rows::STEP + (C::PAIRED ? C::KEY_BYTES : 0);
        k_phase = key % CHUNK, v_phase = value % CHUNK;
        k_at = key - k_phase, v_at = value - v_phase;
    }
    __device__ uint32_t keys_at(uint32_t stage) const { return stage + k_at; }
    __device__ uint32_t values_at(uint32_t stage) const { return stage + C::K_BYTES + v_at; }

    /* A lane copies a run of tokens where these lie side by side as well, or a token; its first one in a tile. */
    static __device__ bool abut(const cpa_cuda_attend_args &a) {
        return a.k_token_stride == K_BYTES && a.v_token_stride == V_BYTES;
    }
    static __device__ int first_of(const cpa_cuda_attend_args &a, int lane) { return abut(a) ? lane * RUN : lane; }
    /* The block of it, in the tile that begins at `key`. */
    __device__ int32_t block_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int key, int lane) const {
        const int token = min(key + first_of(a, lane) % KEYS, k_end - 1);
        return __ldg(a.tables + piece.table + (token >> a.block_shift));
    }
    /* Has the tile that begins at `key` copied to a stage, with what lies behind its last key. Called by a warp. */
    static __device__ void fill(const cpa_cuda_attend_args &a, int kv_group, int key, int64_t block, uint32_t stage,
                                uint32_t full, int lane) {
        if (lane == 0) barrier_expect(full, C::STAGE_BYTES);
        __syncwarp();
        const int first = first_of(a, lane), tokens = abut(a) ? RUN : 1;
        const int64_t token = (key + first) & ((1 << a.block_shift) - 1);
        if (first >= KEYS) return;
        copy_row(stage + first * K_BYTES,
                 a.k + kv_group * a.k_head_stride + block * a.k_block_stride + token * a.k_token_stride,
                 tokens * K_BYTES, full);
        if (!C::PAIRED)
            copy_row(stage + C::K_BYTES + first * V_BYTES,
                     a.v + kv_group * a.v_head_stride + block * a.v_block_stride + token * a.v_token_stride,
                     tokens * V_BYTES, full);
    }
};

/* The tiles of a piece that a warp takes, for its head; `phases`: of the stages, a bit each. */
template <typename C>
__device__ void attend_tokens(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const token_feed<C> &feed,
                              const key_walk<KEYS> &walk, const packed_query_rows<CPA_CUDA_TOKEN_ROWS> &queries,
                              column_state<C, 1> &state, token_stages<C> &stages, uint32_t first_stage,
                              uint32_t &phases, int gang, int lane) {
    const query_columns<C, 1> q(queries, feed.k_phase, lane);
    const typename C::keys keys(feed.k_phase, lane);
    const typename C::sums sums(feed.v_phase, lane);
    for (int i = gang; i < walk.count; i += C::GANGS) {
        const int tile = walk.tile(i), stage = i % C::STAGES;
        const bool refills = i + C::STAGES < walk.count;
        const int32_t block = refills ? feed.block_of(a, piece, walk.tile(i + C::STAGES) * KEYS, lane) : 0;
        const uint32_t at = first_stage + stage * C::STAGE_BYTES;
        barrier_wait(shared_address(&stages.full[stage]), phases >> stage & 1);
        phases ^= 1u << stage;
#pragma unroll 1
        for (int first = 0; first < RUNS; first += C::AT_ONCE)
            attend_packed<C, 1, C::AT_ONCE>(a, state, q, queries, keys, sums, feed, at, first, walk.masked(tile),
                                            walk.sinks, tile * KEYS, lane);
        if (refills && stages.is_last(stage, lane))
            feed.fill(a, blockIdx.x * C::HEADS, walk.tile(i + C::STAGES) * KEYS, block, at,
                      shared_address(&stages.full[stage]), lane);
    }
}

/* The thread, and what follows from it, found again rather than kept: registers are few. */
__device__ inline int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* Leaves what the warps have where stages were, and stores the rows of the piece. */
template <typename C>
__device__ void leave_tokens(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                             const column_state<C, 1> &state, warp_states<C> &states, float *left) {
    const int thread = thread_again(), warp = thread / 32, lane = thread % 32;
    const int head = warp % C::HEADS, kv_group = blockIdx.x * C::HEADS;
    const typename C::sums sums(token_feed<C>(piece, head).v_phase, lane);
    leave_columns<C, 1>(state, sums, a, kv_group + head, piece.row_end - piece.row_begin, states, left, warp, lane);
    async_proxy_fence(); /* before copies to where that lies */
    store_rows<C>(a, piece, kv_group, states, left, warp, lane);
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    attend_decode_tokens(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ cpa_cuda_piece piece;
    __shared__ int next;
    __shared__ key_walk<KEYS> walk;
    __shared__ token_stages<C> stages;
    __shared__ warp_states<C> states;
    __shared__ __align__(16) packed_query_rows<CPA_CUDA_TOKEN_ROWS> queries[C::HEADS];
    const int kv_group = blockIdx.x * C::HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int gang = warp / C::HEADS, head = warp % C::HEADS;
    float *const left = (float *)(shared + C::STAGES_AT);
    const uint32_t first_stage = shared_address(left);
    uint32_t phases = 0;
    if (threadIdx.x == 0) stages.init();
    for (int at = blockIdx.y; at >= 0; at = next) {
        if (warp == 0) copy_piece(piece, a.pieces[at], lane);
        __syncthreads();
        walk.start(a, piece);
        if (threadIdx.x == 0) next = piece.next; /* before that is overwritten */
        const token_feed<C> feed(piece, head);
        if (!piece.ready && !a.beside_shared) { /* only the plan, and what is ready, has been read so far */
            dependent_wait();
            dependent_allow();
        }
#pragma unroll 1
        for (int i = 0; i < C::STAGES && i < walk.count && warp == 0; i++) {
            const int key = walk.tile(i) * KEYS;
            feed.fill(a, kv_group, key, feed.block_of(a, piece, key, lane), first_stage + i * C::STAGE_BYTES,
                      shared_address(&stages.full[i]), lane);
        }
        if (at == (int)blockIdx.y) /* while the first tiles come */
            fill_centroid_pairs<C::keys::BITS>(shared, thread_again(), C::THREADS);
        take_packed_queries<C>(queries, a, piece, piece.row_begin, walk, kv_group, warp, lane);
        column_state<C, 1> state;
        attend_tokens<C>(a, piece, feed, walk, queries[head], state, stages, first_stage, phases, gang, lane);
        __syncthreads(); /* all are done with the stages */
        leave_tokens<C>(a, piece, state, states, left);
    }
    dependent_wait(); /* what comes behind takes this kernel's end for that of the one before it */
    dependent_allow();
}

} // namespace

#endif
