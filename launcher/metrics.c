#include "launcher/metrics.h"

#include <math.h>
#include <stdlib.h>

#include "base/array.h"

#define MS_PER_S 1e3

static void add_sample(cpa_metrics *metrics, cpa_metric metric, double seconds) {
    cpa_samples *samples = &metrics->samples[metric];
    if (!cpa_array_reserve(&samples->values, &samples->capacity, samples->count + 1, sizeof *samples->values)) {
        metrics->out_of_memory = 1;
        return;
    }
    samples->values[samples->count++] = seconds * MS_PER_S;
}

void cpa_metrics_add(cpa_metrics *metrics, const cpa_request_result *result) {
    switch (result->reason) {
        case CPA_FINISH_CANCELLED: metrics->cancelled++; return;
        case CPA_FINISH_EXPIRED: metrics->expired++; return;
        case CPA_FINISH_FAILED: metrics->failed++; return;
        default: break;
    }
    metrics->completed++;
    metrics->input_tokens += result->prompt_tokens;
    metrics->output_tokens += result->output_tokens;
    add_sample(metrics, CPA_TTFT, result->first_token_s - result->arrival_s);
    add_sample(metrics, CPA_E2E, result->finish_s - result->arrival_s);
    if (result->output_tokens < 2) return;
    add_sample(metrics, CPA_TPOT, (result->finish_s - result->first_token_s) / (double)(result->output_tokens - 1));
    for (int64_t i = 1; i < result->output_tokens; i++) {
        add_sample(metrics, CPA_ITL, result->token_s[i] - result->token_s[i - 1]);
    }
}

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return left < right ? -1 : left > right ? 1 : 0;
}

static double percentile(const cpa_samples *sorted, double fraction) {
    double place = fraction * (double)(sorted->count - 1);
    int64_t below = (int64_t)place;
    int64_t above = below + 1 < sorted->count ? below + 1 : below;
    return sorted->values[below] + (place - (double)below) * (sorted->values[above] - sorted->values[below]);
}

cpa_summary cpa_metrics_summary(cpa_metrics *metrics, cpa_metric metric) {
    cpa_samples *samples = &metrics->samples[metric];
    cpa_summary summary = {.count = samples->count};
    if (samples->count == 0) return summary;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < samples->count; i++) sum += samples->values[i];
    summary.mean = sum / (double)samples->count;
    for (int64_t i = 0; i < samples->count; i++) {
        double off = samples->values[i] - summary.mean;
        squares += off * off;
    }
    summary.std = sqrt(squares / (double)samples->count);
    qsort(samples->values, (size_t)samples->count, sizeof *samples->values, ascending);
    summary.median = percentile(samples, 0.5);
    summary.p99 = percentile(samples, 0.99);
    return summary;
}

void cpa_metrics_release(cpa_metrics *metrics) {
    for (int m = 0; m < CPA_METRIC_COUNT; m++) free(metrics->samples[m].values);
    *metrics = (cpa_metrics){0};
}
