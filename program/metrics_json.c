#include "program/metrics_json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "program/json_put.h"

static double per_second(int64_t count, double duration_s, int timed) {
    if (!timed) return NAN;
    return duration_s > 0 ? (double)count / duration_s : 0;
}

static int put_totals(json_t *root, const cpa_metrics *m, int64_t requests, double duration_s, int timed) {
    return cpa_json_put_int(root, "num_prompts", requests) | cpa_json_put_int(root, "completed", m->completed) |
           cpa_json_put_int(root, "failed", requests - m->completed) | cpa_json_put_real(root, "duration", duration_s) |
           cpa_json_put_int(root, "total_input_tokens", m->input_tokens) |
           cpa_json_put_int(root, "total_output_tokens", m->output_tokens) |
           cpa_json_put_real(root, "request_throughput", per_second(m->completed, duration_s, timed)) |
           cpa_json_put_real(root, "request_goodput",
                             m->options.has_goodput ? per_second(m->good, duration_s, timed) : NAN) |
           cpa_json_put_real(root, "output_throughput", per_second(m->output_tokens, duration_s, timed)) |
           cpa_json_put_real(root, "total_token_throughput",
                             per_second(m->input_tokens + m->output_tokens, duration_s, timed));
}

static int put_peaks(json_t *root, cpa_metrics *metrics, int is_recorded) {
    const cpa_peaks peaks = cpa_metrics_peaks(metrics);
    json_t *requests = is_recorded ? json_integer(peaks.requests) : json_null();
    json_t *tokens = is_recorded ? json_real((double)peaks.tokens_per_s) : json_null();
    return json_object_set_new(root, "max_concurrent_requests", requests) |
           json_object_set_new(root, "max_output_tokens_per_s", tokens);
}

static int put_latency(json_t *root, const char *kind, cpa_metric metric, double value) {
    char key[64];
    snprintf(key, sizeof key, "%s_%s_ms", kind, cpa_metric_names[metric]);
    return cpa_json_put_real(root, key, value);
}

static int put_latencies(json_t *root, cpa_metrics *metrics) {
    int bad = 0;
    for (int m = 0; m < CPA_METRIC_COUNT; m++) {
        const cpa_summary summary = cpa_metrics_summary(metrics, (cpa_metric)m);
        const double unknown = summary.count > 0 ? 0 : NAN; /* 0 adds nothing */
        bad |= put_latency(root, "mean", (cpa_metric)m, summary.mean + unknown) |
               put_latency(root, "median", (cpa_metric)m, summary.median + unknown) |
               put_latency(root, "std", (cpa_metric)m, summary.std + unknown);
        for (int p = 0; p < metrics->options.n_percentiles; p++) {
            char kind[32];
            snprintf(kind, sizeof kind, "p%g", metrics->options.percentiles[p]);
            bad |= put_latency(root, kind, (cpa_metric)m, summary.percentiles[p] + unknown);
        }
    }
    return bad;
}

/* ---- single requests ---- */

static int by_start(const void *a, const void *b) {
    const cpa_request_record *left = *(const cpa_request_record *const *)a;
    const cpa_request_record *right = *(const cpa_request_record *const *)b;
    if (left->start_s != right->start_s) return left->start_s < right->start_s ? -1 : 1;
    return (left->id > right->id) - (left->id < right->id);
}

static json_t *gaps_of(const cpa_metrics *metrics, const cpa_request_record *record) {
    json_t *gaps = json_array();
    for (int64_t i = 0; i < record->n_gaps; i++)
        json_array_append_new(gaps, json_real(metrics->samples[CPA_ITL].values[record->first_gap + i] * 1e-3));
    return gaps;
}

/* The records in the order of the arrays; NULL if they are not to be written. */
static const cpa_request_record **sorted_records(const cpa_metrics *metrics) {
    const int64_t n = metrics->n_records;
    if (n > CPA_DETAILED_REQUESTS || metrics->samples[CPA_ITL].count > CPA_DETAILED_TOKENS) return NULL;
    const cpa_request_record **sorted = malloc((size_t)(n + 1) * sizeof *sorted);
    if (!sorted) return NULL;
    for (int64_t i = 0; i < n; i++) sorted[i] = &metrics->records[i];
    qsort(sorted, (size_t)n, sizeof *sorted, by_start);
    return sorted;
}

static int put_requests(json_t *root, const cpa_metrics *metrics, int is_recorded) {
    enum { STARTS = 0, INPUTS, OUTPUTS, TTFTS, ITLS, ERRORS, N_ARRAYS };
    static const char *const keys[N_ARRAYS] = {"start_times", "input_lens", "output_lens", "ttfts", "itls", "errors"};
    json_t *arrays[N_ARRAYS];
    const cpa_request_record **sorted = is_recorded ? sorted_records(metrics) : NULL;
    int bad = 0;
    for (int a = 0; a < N_ARRAYS; a++) arrays[a] = sorted ? json_array() : json_null();
    for (int64_t i = 0; sorted && i < metrics->n_records; i++) {
        const cpa_request_record *record = sorted[i];
        json_t *error = record->error ? json_string(record->error) : json_string("");
        bad |= json_array_append_new(arrays[STARTS], json_real(record->start_s)) |
               json_array_append_new(arrays[INPUTS], json_integer(record->prompt_tokens)) |
               json_array_append_new(arrays[OUTPUTS], json_integer(record->output_tokens)) |
               json_array_append_new(arrays[TTFTS], json_real(record->ttft_s)) |
               json_array_append_new(arrays[ITLS], gaps_of(metrics, record)) |
               json_array_append_new(arrays[ERRORS], error ? error : json_string("failed"));
    }
    for (int a = 0; a < N_ARRAYS; a++) bad |= json_object_set_new(root, keys[a], arrays[a]);
    free(sorted);
    return bad;
}

int cpa_metrics_put_figures(json_t *root, cpa_metrics *metrics, int64_t requests, double duration_s, int timed) {
    return put_totals(root, metrics, requests, duration_s, timed) | put_latencies(root, metrics);
}

int cpa_metrics_put(json_t *root, cpa_metrics *metrics, int64_t requests, double duration_s, int timed) {
    const int is_recorded = timed && metrics->window == 0;
    return cpa_metrics_put_figures(root, metrics, requests, duration_s, timed) | put_peaks(root, metrics, is_recorded) |
           put_requests(root, metrics, is_recorded);
}
