/* How rows of the persistent kernel see keys, and where their results go. */
#ifndef CPA_CUDA_PERSISTENT_ROWS_CUH
#define CPA_CUDA_PERSISTENT_ROWS_CUH

#include "kernels/cuda/attend/hopper_scores.cuh"
#include "kernels/cuda/attend/persistent_loads.cuh"

namespace {

/* hidden(half, at): whether a row does not see a key, by its place behind the thread's first one of the tile. */
template <int N, typename Hidden>
__device__ void hide(float (&scores)[N], Hidden hidden) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (hidden(i / 2 % 2, i / 4 * 8 + i % 2)) scores[i] = -INFINITY;
}

/* The scores of keys of the tile from `key` on that a thread's rows, `row` and 8 on, do not see. */
template <int N>
__device__ void hide_unseen(float (&s)[N], const persistent_args &args, const cpa_cuda_piece &piece, int key, int row,
                            int lane) {
    auto keys_of = [&](int half) { return keys_of_packed(args, piece, min(row + 8 * half, piece.row_end - 1)); };
    key += 2 * (lane % 4);
    const int end[] = {keys_of(0).end - key, keys_of(1).end - key};
    hide(s, [&](int half, int at) { return at >= end[half]; });
    if (args.pools.a.mask.window == 0) return;
    const int begin[] = {keys_of(0).first - key, keys_of(1).first - key};
    hide(s, [&](int half, int at) { return at < begin[half]; });
}

/* Four words that each lane of a quad has of a row, word i of lane c being columns 8 i + 2 c and the next: lane c gets
 * those of columns 8 c and on, which lie together. */
__device__ void transpose_in_quad(uint32_t (&words)[4], int lane) {
    auto exchange = [&](uint32_t &low, uint32_t &high, int distance) {
        const bool upper = lane & distance;
        const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? low : high, distance);
        if (upper) {
            low = other;
        } else {
            high = other;
        }
    };
    exchange(words[0], words[1], 1);
    exchange(words[2], words[3], 1);
    exchange(words[0], words[2], 2);
    exchange(words[1], words[3], 2);
}

/* Where a row of a piece goes. */
struct row_out {
    int64_t token, partial;
    int head;
    bool inside; /* the row is one of the piece; equal for the lanes of a quad */

    __device__ row_out(const persistent_args &args, const fetched_piece &fetched, int row) {
        const cpa_cuda_piece &piece = fetched.piece;
        token = piece.q_row + (row >> args.group_shift);
        partial = (int64_t)fetched.kv_head * args.pools.a.partial_rows + piece.partial + (row - piece.row_begin);
        head = (fetched.kv_head << args.group_shift) + (row & ((1 << args.group_shift) - 1));
        inside = row < piece.row_end;
    }
};

/* 1 / sum of a thread's two rows, less what a learned sink has of `out`; their LSEs are stored. row: the first. */
struct row_inverses {
    float of[2];
};
template <typename C>
__device__ row_inverses store_lses(const persistent_args &args, const fetched_piece &fetched,
                                   const thread_state<C> &state, int row, int lane) {
    const cpa_cuda_attend_args &a = args.pools.a;
    row_inverses inverses;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const row_out to(args, fetched, row + 8 * half);
        const float max = state.max[half], sum = counted_sum(quad_sum(state.sum[half]), max, a.scale_log2);
        const float lse = lse_of(sum, max * a.scale + logf(sum));
        inverses.of[half] = inverse_of_sum(sum);
        if (a.score.sink_logits && fetched.piece.partial < 0)
            inverses.of[half] *= sink_factor(a.score.sink_logits, to.head, lse);
        if (!to.inside || lane % 4 != 0) continue;
        if (fetched.piece.partial >= 0) {
            a.partial_lse[to.partial] = lse;
        } else if (a.lse) {
            a.lse[to.token * a.lse_row_stride + to.head * a.lse_head_stride + fetched.piece.state_shift] = lse;
        }
    }
    return inverses;
}

/* The rows go to `out`, or to the work space. */
template <typename C>
__device__ void store_rows(const persistent_args &args, const fetched_piece &fetched, const thread_state<C> &state,
                           const row_inverses &inverses, int row, int lane) {
    using element = typename C::element;
    const cpa_cuda_attend_args &a = args.pools.a;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const row_out to(args, fetched, row + 8 * half);
        auto pair = [&](int column, float (&o)[2]) {
            const int part = column / C::PART, at = column % C::PART / 2 + 2 * half;
            const float *from = part < C::PARTS ? &state.o[part][at] : &state.tail[at];
            o[0] = from[0] * inverses.of[half], o[1] = from[1] * inverses.of[half];
        };
        char *out = a.out + (to.token * a.out_row_stride + to.head * a.out_head_stride) * (int64_t)sizeof(element);
        if (C::V_DIM % 32 == 0 && a.v_dim == C::V_DIM && fetched.piece.partial < 0) {
#pragma unroll
            for (int column = 0; column < C::V_DIM; column += 32) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float o[2];
                    pair(column + 8 * i, o);
                    words[i] = pack_pair<element>(o[0], o[1]);
                }
                transpose_in_quad(words, lane);
                if (to.inside)
                    *(uint4 *)(out + (column + 8 * (lane % 4)) * sizeof(element)) =
                        make_uint4(words[0], words[1], words[2], words[3]);
            }
            continue;
        }
        float *partial = a.partial_o + to.partial * a.v_dim;
#pragma unroll
        for (int eight = 0; eight < C::V_DIM; eight += 8) {
            const int column = eight + 2 * (lane % 4);
            float o[2];
            pair(eight, o);
            if (!to.inside || column >= a.v_dim) continue;
            if (fetched.piece.partial >= 0) {
                store_floats(partial + column, o);
            } else {
                store_elements<element>(out, column, o);
            }
        }
    }
}

/* The pieces of a plan, whose packed rows are those of a group of query heads. */
template <typename C>
struct packed_work {
    /* Which steps have keys to hide, counted from the first of a piece on. */
    struct masked_steps {
        int full_first, full_end;
        __device__ masked_steps(const key_walk<C::KEYS> &walk, uint32_t begin) {
            const row_keys full = walk.full_steps();
            full_first = begin + full.first, full_end = begin + full.end;
        }
        __device__ bool operator()(uint32_t m) const { return (int)m - full_first < 0 || (int)m - full_end >= 0; }
    };
    using row_ends = row_inverses;

    static __device__ void fetch(const persistent_args &args, persistent_shared<C> &shared, int lane) {
        fetch_pieces<C>(args, shared, lane);
    }
    /* Before the scores of the i-th tile of the walk are multiplied, and when they are. */
    struct looked_up {};
    static __device__ looked_up look_up(const persistent_args &, const fetched_piece &, const key_walk<C::KEYS> &, int,
                                        int, int) {
        return {};
    }
    template <int N>
    static __device__ void hide(float (&s)[N], const persistent_args &args, const fetched_piece &fetched,
                                const key_walk<C::KEYS> &walk, const looked_up &, int i, int row, int lane) {
        hide_unseen(s, args, fetched.piece, walk.tile(i) * C::KEYS, row, lane);
    }
    /* What of a thread's rows is known when all scores are: before the values of the last tile are. */
    static __device__ row_ends end(const persistent_args &args, const fetched_piece &fetched, key_walk<C::KEYS> &,
                                   const thread_state<C> &state, int row, int lane) {
        return store_lses<C>(args, fetched, state, row, lane);
    }
    static __device__ void store(const persistent_args &args, const fetched_piece &fetched, const key_walk<C::KEYS> &,
                                 const thread_state<C> &state, const row_ends &ends, int row, int lane) {
        store_rows<C>(args, fetched, state, ends, row, lane);
    }
};

} // namespace

#endif
