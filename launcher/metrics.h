/* Latencies of a run from what happened to its requests, with vLLM's definitions:
 * TTFT, arrival to first token; TPOT, mean time between the tokens of one request; ITL, time between two consecutive
 * tokens of a request; E2E, arrival to last token. */
#ifndef CPA_LAUNCHER_METRICS_H
#define CPA_LAUNCHER_METRICS_H

#include <cpattn/engine.h>

typedef enum cpa_metric { CPA_TTFT = 0, CPA_TPOT, CPA_ITL, CPA_E2E, CPA_METRIC_COUNT } cpa_metric;

/* Milliseconds; 0 where nothing was measured. */
typedef struct cpa_summary {
    int64_t count;
    double mean;
    double median;
    double std;
    double p99;
} cpa_summary;

typedef struct cpa_samples {
    double *values;
    int64_t count, capacity;
} cpa_samples;

typedef struct cpa_metrics {
    cpa_samples samples[CPA_METRIC_COUNT];
    int64_t completed;
    int64_t cancelled, expired, failed; /* requests that ended otherwise */
    int64_t input_tokens;               /* of completed requests */
    int64_t output_tokens;
    int out_of_memory; /* samples were lost */
} cpa_metrics;

/* A cpa_finish_fn-shaped collector: adds one request that has ended; its latencies count if it is completed. */
void cpa_metrics_add(cpa_metrics *metrics, const cpa_request_result *result);

/* Mean, population standard deviation, and percentiles interpolated between the two nearest samples. Sorts them. */
cpa_summary cpa_metrics_summary(cpa_metrics *metrics, cpa_metric metric);

void cpa_metrics_release(cpa_metrics *metrics);

#endif
