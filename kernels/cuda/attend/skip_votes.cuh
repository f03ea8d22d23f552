/* The votes of warpgroups on tiles of keys that may be left out, between their warps and the one that loads values. */
#ifndef CPA_CUDA_SKIP_VOTES_CUH
#define CPA_CUDA_SKIP_VOTES_CUH

#include "kernels/cuda/attend/hopper_loads.cuh"

namespace {

/* Votes that are kept: the loader is never so many behind. */
constexpr int VOTES = 8;
/* Values are loaded before the votes on their tile are known if a warpgroup has kept so many tiles, of those up to two
 * before it, without leaving one out. */
constexpr uint32_t STREAK = 2;
/* A warpgroup leaves tiles out where that saves more than it costs: of the next SPAN tiles, if of the last WINDOW it
 * could have left out LEAST or more; and of the first SPAN. Of the others it only looks which it could have. */
constexpr int SPAN = 8, WINDOW = 16, LEAST = 2;

/* Those of a warpgroup on its tiles. A warp knows what the others have voted when they meet at their turn of the next
 * tile, and the loader when there is a stage for the values two tiles later. */
struct group_votes {
    uint64_t voted[VOTES];
    uint32_t keeps[VOTES];              /* a byte of each warp: whether it keeps the tile */
    uint32_t before[2][WARPGROUP / 32]; /* for spans to come, of each warp: which tiles it could have left out */
    uint32_t skipped;                   /* tiles of the piece */

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
    /* Behind the i-th tile: which of the last ones a warp could have left out, a bit each, as far as each of its
     * threads knows. */
    __device__ void tell(int i, int thread, uint32_t of_thread) {
        if (i % SPAN != SPAN - 2) return;
        const uint32_t of_warp = __reduce_and_sync(0xffffffff, of_thread);
        if (thread % 32 == 0) before[(i + 2) / SPAN % 2][thread / 32] = of_warp;
    }
    /* Whether tiles are left out of the span from the i-th on, which is not the first. */
    __device__ bool leaves_out_from(int i) {
        uint32_t of_all = (uint32_t)((1ull << WINDOW) - 1);
#pragma unroll
        for (int warp = 0; warp < WARPGROUP / 32; warp++) of_all &= before[i / SPAN % 2][warp];
        return __popc(same_in_warp(of_all)) >= LEAST;
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
