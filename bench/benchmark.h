/* A benchmark: one filled cpa_bench, which the engine (bench/bench.c) runs; docs/PERFORMANCE.md derives every column
 * that it prints. */
#ifndef CPA_BENCH_BENCHMARK_H
#define CPA_BENCH_BENCHMARK_H

#include "bench/site.h"

enum { CPA_BENCH_MOST_KERNELS = 3 };

/* One line of the table. `prepare` and `check` fill it, the engine adds the time. Work and bytes are those of one rank
 * and one call; a benchmark without one of them leaves it negative in
 * every case, and its table has no such column. */
typedef struct cpa_bench_row {
    double flops;
    double bytes;
    double time_s;    /* time of a call: median over batches of the slowest rank */
    double enqueue_s; /* what the host needed to start a call, in the median batch of the slowest rank */
    int64_t iterations;
    int64_t checked; /* results compared with their reference, and how many failed; sums over ranks */
    int64_t wrong;
    /* The kernels that attend ran, that of few rows before that of more, and why the fastest did not run: names that
     * live as long as the library, or NULL for none. A benchmark has a first name in every case, or in none. */
    const char *kernels[CPA_BENCH_MOST_KERNELS], *why;
    int64_t tiles[2]; /* tile_counts of attend over all calls, where tiles are left out */
} cpa_bench_row;

/* What the bytes per second of a benchmark are measured against. */
typedef enum cpa_bench_floor { CPA_BENCH_NO_FLOOR = 0, CPA_BENCH_READ, CPA_BENCH_COPY, CPA_BENCH_LINK } cpa_bench_floor;

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
    /* 1: each rank sends its bytes in equal parts to the others. The table has their rate, and that of what a rank has
     * for all, itself included, as nccl-tests do for all-to-all: busbw and algbw; and the average of the former. */
    int has_bus_bandwidth;
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
extern const cpa_bench cpa_bench_offload;
extern const cpa_bench cpa_bench_varlen_attend;
extern const cpa_bench cpa_bench_sparse;
extern const cpa_bench cpa_bench_xattn;
extern const cpa_bench cpa_bench_xattn_estimate;
extern const cpa_bench cpa_bench_attend_blocks;
extern const cpa_bench cpa_bench_attend_beside;
extern const cpa_bench cpa_bench_merge;
extern const cpa_bench cpa_bench_kv_write;
extern const cpa_bench cpa_bench_kv_pack;
extern const cpa_bench cpa_bench_kv_convert;
extern const cpa_bench cpa_bench_linear;
extern const cpa_bench cpa_bench_expert_linear;
extern const cpa_bench cpa_bench_index_write;
extern const cpa_bench cpa_bench_index_q;
extern const cpa_bench cpa_bench_index_logits;
extern const cpa_bench cpa_bench_rmsnorm;
extern const cpa_bench cpa_bench_swiglu;
extern const cpa_bench cpa_bench_qk_norm_rope;
extern const cpa_bench cpa_bench_rmsnorm_codes;
extern const cpa_bench cpa_bench_rmsnorm2;
extern const cpa_bench cpa_bench_rotate;
extern const cpa_bench cpa_bench_latent_norm_rope;
extern const cpa_bench cpa_bench_q_norm_rope_kv_write;
extern const cpa_bench cpa_bench_inverse_rope_quant;
extern const cpa_bench cpa_bench_compress_write;
extern const cpa_bench cpa_bench_sample;
extern const cpa_bench cpa_bench_topk;
extern const cpa_bench cpa_bench_exchange;
extern const cpa_bench cpa_bench_step;

#endif
