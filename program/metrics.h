/* What happened to requests, in a run of the engine or as a client saw it, and their latencies, with vLLM's
 * definitions: TTFT, arrival to first token; TPOT, mean time between the tokens of one request; ITL, time between two
 * consecutive tokens of a request; E2E, arrival to last token. */
#ifndef CPA_PROGRAM_METRICS_H
#define CPA_PROGRAM_METRICS_H

#include <cpattn/engine.h>

#include "program/metrics_options.h"

/* Milliseconds; 0 where nothing was measured. */
typedef struct cpa_summary {
    int64_t count;
    double mean;
    double median;
    double std;
    double percentiles[CPA_MAX_PERCENTILES]; /* the percentiles that the options ask for */
} cpa_summary;

typedef struct cpa_samples {
    double *values;
    int64_t count, capacity;
    int64_t oldest; /* index of the oldest sample, once the window is full */
} cpa_samples;

/* A request that has ended; times in seconds on one clock. */
typedef struct cpa_request_times {
    uint64_t id;
    int64_t prompt_tokens, output_tokens;
    double start_s;        /* when the request arrived or, at a client, was sent; seconds */
    const double *token_s; /* [n_times] when output came: one token at a time, or, at a client, several */
    int64_t n_times;
    const char *error; /* NULL: it is completed */
} cpa_request_times;

/* What is kept of it. */
typedef struct cpa_request_record {
    uint64_t id;
    int64_t prompt_tokens, output_tokens;
    double start_s, ttft_s, end_s; /* seconds; without output: ttft_s 0 and end_s = start_s */
    int64_t first_gap, n_gaps;     /* samples of CPA_ITL of the request */
    char *error;                   /* NULL: it is completed */
} cpa_request_record;

/* Zeros, and the options and the window, to begin with. */
typedef struct cpa_metrics {
    cpa_metrics_options options;
    int64_t window; /* samples kept of each latency, the last ones, and no records; 0: everything is kept */
    cpa_samples samples[CPA_METRIC_COUNT];
    cpa_request_record *records; /* requests in the order in which they ended */
    int64_t n_records, records_capacity;
    int64_t completed;
    int64_t cancelled, expired, failed; /* requests that ended otherwise */
    int64_t good;                       /* completed requests within the objectives */
    int64_t input_tokens;               /* prompt tokens of completed requests */
    int64_t output_tokens;              /* output tokens of completed requests */
    int out_of_memory;                  /* not 0: samples were lost for want of memory */
} cpa_metrics;

/* The most that there was of completed requests: at once, each from its start to its end; and of their tokens in one of
 * the seconds after the first start. */
typedef struct cpa_peaks {
    int64_t requests;
    int64_t tokens_per_s;
} cpa_peaks;

/* A cpa_finish_fn-shaped collector: adds one request that has ended; its latencies count if it is completed. */
void cpa_metrics_add(cpa_metrics *metrics, const cpa_request_result *result);

/* The same for one that is completed or failed. */
void cpa_metrics_add_request(cpa_metrics *metrics, const cpa_request_times *request);

/* Mean, population standard deviation, and percentiles interpolated between the two nearest samples. */
cpa_summary cpa_metrics_summary(cpa_metrics *metrics, cpa_metric metric);

cpa_peaks cpa_metrics_peaks(cpa_metrics *metrics);

void cpa_metrics_release(cpa_metrics *metrics);

#endif
