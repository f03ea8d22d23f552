/* `cp_attn bench`: measures one operation at a time. A benchmark is one filled cpa_bench, run by one engine (bench.c);
 * docs/PERFORMANCE.md derives every column that it prints. */
#ifndef CPA_LAUNCHER_BENCH_H
#define CPA_LAUNCHER_BENCH_H

#include <stdbool.h>

#include <cpattn/device.h>

#include "base/hash.h"
#include "bench/options.h"
#include "comm/comm.h"
#include "launcher/placement.h"

/* Runs `cp_attn bench NAME [options]`; argv[0] is "bench". Collective over `comm`. Chooses the device of the placement. Prints on rank 0; returns the exit code, the same on
 * every rank. */
int cpa_bench_main(cpa_comm *comm, int argc, char **argv, cpa_rank_placement *placement);

/* What a benchmark runs on. */
typedef struct cpa_bench_site {
    cpa_bench_options options; /* of the case that runs */
    cpa_control control;
    cpa_backend backend;
    cpa_device *device;
    cpa_stream *stream;
    const cpa_transport_table *transport; /* that the program would use here; set where a benchmark needs it */
    double read_bandwidth;                /* bytes/s of reading device memory, measured in this run */
    double copy_bandwidth;                /* bytes/s of copying it, read and written */
    double launch_s;                      /* a kernel's that does nothing, in a batch of them; 0 on the host */
    void *probe;                          /* memory of the two measurements, kept to the end (bench_memory.c) */
    int64_t memory_bytes;                 /* that were free at the start */
} cpa_bench_site;

/* One line of the table. `prepare` and `check` fill it, the engine adds the time. Work and bytes are those of one rank
 * and one call; a negative number has no meaning for the case and prints as "-". */
typedef struct cpa_bench_row {
    double flops;
    double bytes;
    double time_s;    /* of a call: median over batches of the slowest rank */
    double enqueue_s; /* of a call: what the host needed to start it, in the median batch of the slowest rank */
    int64_t iterations;
    int64_t checked; /* results compared with their reference, and how many failed; sums over ranks */
    int64_t wrong;
} cpa_bench_row;

/* What the bytes per second of a benchmark are measured against. */
typedef enum cpa_bench_floor { CPA_BENCH_NO_FLOOR = 0, CPA_BENCH_READ, CPA_BENCH_COPY } cpa_bench_floor;

/* A benchmark. Of each case the engine calls prepare, run (repeatedly), check and release, on every rank. */
typedef struct cpa_bench {
    const char *name;
    const char *dims;        /* the names of a shape's numbers, as in "rows x states" */
    int n_dims;              /* at most CPA_BENCH_MAX_DIMS */
    const char *shapes_host; /* the cases without --shapes, on the host and on a device */
    const char *shapes_cuda;
    const char *checked; /* what `checked` counts */
    int32_t min_ranks;
    cpa_bench_floor floor;
    /* Allocates and fills the tensors of one case and describes it; *state is released even if this fails. */
    cpa_status (*prepare)(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state, cpa_error *err);
    /* Enqueues one call; `call` counts them, so that they may take turns over several buffers. */
    cpa_status (*run)(void *state, int64_t call, cpa_error *err);
    /* Waits for all calls; NULL: cpa_stream_sync. */
    cpa_status (*wait)(void *state, cpa_error *err);
    /* Compares the results of a call with a reference computed in another way. */
    cpa_status (*check)(void *state, cpa_bench_row *row, cpa_error *err);
    void (*release)(void *state);
} cpa_bench;

extern const cpa_bench cpa_bench_attend;
extern const cpa_bench cpa_bench_varlen;
extern const cpa_bench cpa_bench_merge;
extern const cpa_bench cpa_bench_kv_write;
extern const cpa_bench cpa_bench_kv_pack;
extern const cpa_bench cpa_bench_exchange;

/* A well-mixed 64-bit number from a counter (splitmix64; Steele, Lea and Flood, 2014). */
static inline uint64_t cpa_bench_hash(uint64_t counter) {
    return cpa_mix64(counter + CPA_GOLDEN);
}

/* A number of mean 0 and variance 1 from 64 random bits: the sum of four uniform ones, which is nearly normal. */
static inline float cpa_bench_normal(uint64_t bits) {
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff) +
                  (int32_t)(bits >> 48);
    return ((float)sum - 131070.0f) * (1.7320508f / 65536.0f);
}

#endif
