/* `cp_attn bench`: measures one operation at a time. A benchmark is one filled cpa_bench, run by one engine (bench.c);
 * docs/PERFORMANCE.md derives every column that it prints. */
#ifndef CPA_LAUNCHER_BENCH_H
#define CPA_LAUNCHER_BENCH_H

#include <stdbool.h>

#include <cpattn/device.h>

#include "comm/comm.h"
#include "launcher/bench_options.h"
#include "launcher/placement.h"

/* Runs `cp_attn bench attend|merge|exchange [options]`; argv[0] is "bench". Collective over MPI_COMM_WORLD, which the
 * caller has initialised and finalises. Prints on rank 0; returns the exit code, the same on every rank. */
int cpa_bench_main(int argc, char **argv, const cpa_placement *placement);

/* What a benchmark runs on. */
typedef struct cpa_bench_site {
    cpa_bench_options options;
    cpa_control control;
    cpa_device *device;
    cpa_stream *stream;
} cpa_bench_site;

/* One line of the table. `prepare` and `check` fill it, the engine adds the time. Work and bytes are those of one rank
 * and one iteration; a negative number has no meaning for the case and prints as "-". */
typedef struct cpa_bench_row {
    double flops;
    double bytes;
    double read_bandwidth; /* bytes/s that one thread can read, measured beside the case */
    double time_s;         /* median over iterations of the slowest rank */
    int64_t iterations;
    int64_t checked; /* results compared with their reference, and how many failed; sums over ranks */
    int64_t wrong;
} cpa_bench_row;

/* A benchmark. Of each case the engine calls prepare, run (repeatedly), check and release, on every rank. */
typedef struct cpa_bench {
    const char *name;
    const char *dims;           /* the names of a shape's numbers, as in "rows x states" */
    int n_dims;                 /* at most CPA_BENCH_MAX_DIMS */
    const char *default_shapes; /* as for --shapes */
    const char *checked;        /* what `checked` counts */
    int32_t min_ranks;
    /* Allocates and fills the tensors of one case and describes it; *state is released even if this fails. */
    cpa_status (*prepare)(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state, cpa_error *err);
    cpa_status (*run)(void *state, cpa_error *err);
    /* Compares the results of the last run with a reference computed in another way. */
    cpa_status (*check)(void *state, cpa_bench_row *row, cpa_error *err);
    void (*release)(void *state);
} cpa_bench;

extern const cpa_bench cpa_bench_attend;
extern const cpa_bench cpa_bench_merge;
extern const cpa_bench cpa_bench_exchange;

/* A well-mixed 64-bit number from a counter (splitmix64; Steele, Lea and Flood, 2014). */
static inline uint64_t cpa_bench_hash(uint64_t counter) {
    uint64_t z = counter + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A number of mean 0 and variance 1 from 64 random bits: the sum of four uniform ones, which is nearly normal. */
static inline float cpa_bench_normal(uint64_t bits) {
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff) +
                  (int32_t)(bits >> 48);
    return ((float)sum - 131070.0f) * (1.7320508f / 65536.0f);
}

#endif
