/* The votes of warpgroups on tiles of keys that may be left out, between their warps and the one that loads values. */
#ifndef CPA_CUDA_SKIP_VOTES_CUH
#define CPA_CUDA_SKIP_VOTES_CUH

#include "kernels/cuda/attend/hopper_loads.cuh"

namespace {

/* Values are loaded before the votes on their tile are known if a warpgroup has kept so many tiles, of those up to two
 * before it, without leaving one out. */
constexpr uint32_t STREAK = 2;
/* A warpgroup leaves tiles out where that saves more than it costs: of the first SPAN of a piece, and of as many again
 * if it has left LEAST or more out. Else it takes the next REST spans as they are, and tries again. */
constexpr int SPAN = 8, REST = 4, LEAST = 1;
constexpr int VOTES = SPAN; /* that are kept: the loader is never so many behind */

/* Those of a warpgroup on its tiles. A warp knows what the others have voted when they meet at their turn of the next
 * tile, and the loader when there is a stage for the values two tiles later. */
struct group_votes {
    uint64_t voted[VOTES];
    uint32_t keeps[VOTES]; /* a byte of each warp: whether it keeps the tile */

    /* Called by one thread. */
    __device__ void start() {
        for (int i = 0; i < VOTES; i++) barrier_init(shared_address(&voted[i]), WARPGROUP / 32);
    }
    /* Called by one thread of each warp. */
    __device__ void vote(uint32_t n, int warp, bool keep) {
        ((uint8_t *)&keeps[n % VOTES])[warp] = keep;
        barrier_arrive(shared_address(&voted[n % VOTES]));
    }
    /* Whether some warp keeps the tile, when all have voted. */
    __device__ bool kept(uint32_t n) { return same_in_warp(keeps[n % VOTES]) != 0; }
    /* The same, waiting for that. */
    __device__ bool hear(uint32_t n) {
        barrier_wait(shared_address(&voted[n % VOTES]), phase_of<VOTES>(n));
        return kept(n);
    }
    /* Before the n-th tile, with which a span begins: whether LEAST tiles of the last one were left out, of those up to
     * two before, on which all have voted. */
    __device__ bool have_left_out(uint32_t n) const {
        int left_out = 0;
#pragma unroll
        for (int back = 2; back < SPAN; back++) left_out += keeps[(n - back) % VOTES] == 0;
        return same_in_warp(left_out) >= LEAST;
    }
};

/* What the loader knows of the votes of two warpgroups. */
struct heard_votes {
    group_votes (&votes)[2];
    uint32_t streaks[2]; /* tiles that each has kept since it left one out */

    /* Whether the values of the n-th of `count` tiles are wanted, when there is a stage for them. The first and the
     * last are. */
    __device__ bool wants(int n, int count) {
#pragma unroll
        for (int of = 0; of < 2; of++) streaks[of] = n < 3 ? STREAK : votes[of].kept(n - 2) ? streaks[of] + 1 : 0;
        if (n == 0 || n + 1 == count || streaks[0] >= STREAK || streaks[1] >= STREAK) return true;
        return votes[0].hear(n) || votes[1].hear(n);
    }
};

} // namespace

#endif
