/* Device memory of the benchmarks: allocation, filling, reading back, and its bandwidth. Everything waits until it is
 * done. */
#ifndef CPA_BENCH_MEMORY_H
#define CPA_BENCH_MEMORY_H

#include "bench/site.h"

/* What a benchmark fills unused memory with: all bits set, a NaN in every dtype. */
enum { CPA_BENCH_POISON = 0xff };

/* The status of an operation on the site's stream, with the stream's message. */
cpa_status cpa_bench_enqueued(const cpa_bench_site *site, cpa_status status, cpa_error *err);

/* Copies between host and device memory. */
cpa_status cpa_bench_copy(cpa_bench_site *site, void *dst, const void *src, int64_t bytes, cpa_error *err);
/* Allocates device memory with a copy of host memory. */
cpa_status cpa_bench_upload(cpa_bench_site *site, const void *src, int64_t bytes, void **out, cpa_error *err);
/* Allocates device memory full of poison. */
cpa_status cpa_bench_poisoned(cpa_bench_site *site, int64_t bytes, void **out, cpa_error *err);
/* Repeats the first `period` bytes of device memory until `bytes` are full. */
cpa_status cpa_bench_replicate(cpa_bench_site *site, void *memory, int64_t period, int64_t bytes, cpa_error *err);
/* Allocates `bytes` of device memory, whose first `period` are copied from the host and then repeated. */
cpa_status cpa_bench_upload_period(cpa_bench_site *site, const void *src, int64_t period, int64_t bytes, void **out,
                                   cpa_error *err);

/* How many copies of a tensor take turns so that each call finds it in memory, not in a cache of the device: 1 on the
 * host, where the cases are the caller's to choose. */
int64_t cpa_bench_copies(const cpa_bench_site *site, int64_t bytes);

/* Sets read_bandwidth, copy_bandwidth and launch_s of the site; its probe stays allocated until
 * cpa_bench_release_probe. */
cpa_status cpa_bench_measure_bandwidth(cpa_bench_site *site, cpa_error *err);
/* Sets link_bandwidth. */
cpa_status cpa_bench_measure_link(cpa_bench_site *site, cpa_error *err);
void cpa_bench_release_probe(cpa_bench_site *site);

#endif
