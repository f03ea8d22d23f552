/* The requests of a run or of a client in a result file, under the keys of vLLM's benchmarks (vllm bench serve
 * --save-result --save-detailed). */
#ifndef CPA_PROGRAM_METRICS_JSON_H
#define CPA_PROGRAM_METRICS_JSON_H

#include <jansson.h>

#include "program/metrics.h"

/* So long the arrays of single requests may be: a file stays below some 50 MB. */
#define CPA_DETAILED_REQUESTS ((int64_t)1 << 16)
#define CPA_DETAILED_TOKENS ((int64_t)1 << 20)

/* Puts into `root` what is known without single requests: totals, throughputs, and the latencies. As below. */
int cpa_metrics_put_figures(json_t *root, cpa_metrics *metrics, int64_t requests, double duration_s, int timed);

/* Puts into `root`: num_prompts (`requests`), completed, failed, duration, totals, throughputs, request_goodput (null
 * without objectives), max_concurrent_requests, max_output_tokens_per_s, mean, median, standard deviation and
 * percentiles of each metric, and an entry for each request that has ended, by its start, in start_times, input_lens,
 * output_lens, ttfts, itls (seconds; 0 and none if it failed) and errors ("" if it is completed); null if there are
 * more of them than above, or none are kept. What was not measured is null; all of it is if not `timed`. 0, or -1
 * without memory. */
int cpa_metrics_put(json_t *root, cpa_metrics *metrics, int64_t requests, double duration_s, int timed);

#endif
