/* Queries, keys and values of the benchmarks, by `synthesize`: peaky, and the same whenever they are asked for. */
#ifndef CPA_BENCH_INPUTS_H
#define CPA_BENCH_INPUTS_H

#include "bench/site.h"
#include "kernels/operators.h"

/* Rows of one tensor for tokens of one sequence, at positions[n], to dst [n, heads, dim] on the device, in the dtype of
 * queries or of what is written to the cache: its own, or that of queries if it is quantised. Waits. */
cpa_status cpa_bench_synthesize(cpa_bench_site *site, cpa_synth_tensor tensor, int64_t sequence,
                                const int64_t *positions, int64_t n, void *dst, cpa_error *err);

/* An array of first, first + 1, ..., to be freed; NULL without memory. */
int64_t *cpa_bench_positions(int64_t first, int64_t n);

/* Keys and values of the positions [first, first + n) of a sequence as a cache of their own holds them, in order, on
 * the host; out->k and out->v are to be freed. What is not quantised comes from synthesize, not from a cache. */
cpa_status cpa_bench_recall(cpa_bench_site *site, int64_t sequence, int64_t first, int64_t n, cpa_kv_view *out,
                            cpa_error *err);
/* The key or the value of token i and a head of that, as floats. */
void cpa_bench_recalled_row(const cpa_kv_view *kv, cpa_synth_tensor tensor, int64_t i, int64_t head, float *dst);

/* Bytes of one block of keys or of values in the cache. */
int64_t cpa_bench_block_bytes(const cpa_bench_options *options, cpa_synth_tensor tensor);

/* A poisoned cache of that many blocks in the shape and cache dtype of the options; free k and v. */
cpa_status cpa_bench_make_cache(cpa_bench_site *site, int64_t blocks, cpa_kv_view *out, cpa_error *err);

/* Writes keys and values of tokens of a sequence, at positions[n] ascending, to the cache by kv_write; table holds the
 * blocks of the tokens 0..n-1. */
cpa_status cpa_bench_fill_cache(cpa_bench_site *site, int64_t sequence, const int64_t *positions, int64_t n,
                                const int32_t *table, const cpa_kv_view *kv, cpa_error *err);

/* The numbers 0..n-1 in the order of --pages, to be freed. */
cpa_status cpa_bench_block_order(const cpa_bench_options *options, int64_t n, int32_t **out, cpa_error *err);

#endif
