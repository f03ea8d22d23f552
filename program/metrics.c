#include "program/metrics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"

#define MS_PER_S 1e3

static void add_sample(cpa_metrics *metrics, cpa_metric metric, double ms) {
    cpa_samples *samples = &metrics->samples[metric];
    if (metrics->window > 0 && samples->count == metrics->window) {
        samples->values[samples->oldest] = ms;
        samples->oldest = (samples->oldest + 1) % metrics->window;
        return;
    }
    if (!cpa_array_reserve(&samples->values, &samples->capacity, samples->count + 1, sizeof *samples->values)) {
        metrics->out_of_memory = 1;
        return;
    }
    samples->values[samples->count++] = ms;
}

/* A new record, with what is known however the request ended; NULL without memory, or if none are kept. */
static cpa_request_record *add_record(cpa_metrics *metrics, const cpa_request_times *request) {
    if (metrics->window > 0) return NULL;
    char *error = request->error ? strdup(request->error) : NULL;
    if ((request->error && !error) || !cpa_array_reserve(&metrics->records, &metrics->records_capacity,
                                                         metrics->n_records + 1, sizeof *metrics->records)) {
        free(error);
        metrics->out_of_memory = 1;
        return NULL;
    }
    cpa_request_record *record = &metrics->records[metrics->n_records++];
    *record = (cpa_request_record){.id = request->id,
                                   .prompt_tokens = request->prompt_tokens,
                                   .output_tokens = request->output_tokens,
                                   .start_s = request->start_s,
                                   .end_s = request->start_s,
                                   .first_gap = metrics->samples[CPA_ITL].count,
                                   .error = error};
    return record;
}

static void add_latencies(cpa_metrics *metrics, const cpa_request_times *request, cpa_request_record *record) {
    double ms[CPA_METRIC_COUNT] = {0};
    const int64_t n = request->n_times;
    if (n > 0) {
        const double first = request->token_s[0], last = request->token_s[n - 1];
        ms[CPA_TTFT] = (first - request->start_s) * MS_PER_S;
        ms[CPA_E2E] = (last - request->start_s) * MS_PER_S;
        add_sample(metrics, CPA_TTFT, ms[CPA_TTFT]);
        add_sample(metrics, CPA_E2E, ms[CPA_E2E]);
        if (request->output_tokens > 1) {
            ms[CPA_TPOT] = (last - first) / (double)(request->output_tokens - 1) * MS_PER_S;
            add_sample(metrics, CPA_TPOT, ms[CPA_TPOT]);
        }
        for (int64_t i = 1; i < n; i++)
            add_sample(metrics, CPA_ITL, (request->token_s[i] - request->token_s[i - 1]) * MS_PER_S);
        if (record) {
            record->ttft_s = first - request->start_s;
            record->end_s = last;
            record->n_gaps = metrics->samples[CPA_ITL].count - record->first_gap;
        }
    }
    int good = metrics->options.has_goodput;
    for (int m = 0; m < CPA_METRIC_COUNT; m++) {
        const double most = metrics->options.goodput_ms[m];
        good &= most == 0 || ms[m] <= most;
    }
    metrics->good += good;
}

void cpa_metrics_add_request(cpa_metrics *metrics, const cpa_request_times *request) {
    cpa_request_record *record = add_record(metrics, request);
    if (request->error) {
        metrics->failed++;
        return;
    }
    metrics->completed++;
    metrics->input_tokens += request->prompt_tokens;
    metrics->output_tokens += request->output_tokens;
    add_latencies(metrics, request, record);
}

void cpa_metrics_add(cpa_metrics *metrics, const cpa_request_result *result) {
    cpa_request_times times = {.id = result->id,
                               .prompt_tokens = result->prompt_tokens,
                               .output_tokens = result->output_tokens,
                               .start_s = result->arrival_s,
                               .token_s = result->token_s,
                               .n_times = result->output_tokens};
    switch (result->reason) {
        case CPA_FINISH_CANCELLED:
            times.error = "cancelled";
            metrics->cancelled++;
            add_record(metrics, &times);
            return;
        case CPA_FINISH_EXPIRED:
            times.error = "expired";
            metrics->expired++;
            add_record(metrics, &times);
            return;
        case CPA_FINISH_FAILED: times.error = result->error; break;
        default: break;
    }
    cpa_metrics_add_request(metrics, &times);
}

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return left < right ? -1 : left > right ? 1 : 0;
}

static double percentile(const double *sorted, int64_t count, double fraction) {
    double place = fraction * (double)(count - 1);
    int64_t below = (int64_t)place;
    int64_t above = below + 1 < count ? below + 1 : below;
    return sorted[below] + (place - (double)below) * (sorted[above] - sorted[below]);
}

cpa_summary cpa_metrics_summary(cpa_metrics *metrics, cpa_metric metric) {
    const cpa_samples *samples = &metrics->samples[metric];
    const int64_t count = samples->count;
    cpa_summary summary = {.count = 0};
    if (count == 0) return summary;
    double *sorted = malloc((size_t)count * sizeof *sorted);
    if (!sorted) {
        metrics->out_of_memory = 1;
        return summary;
    }
    memcpy(sorted, samples->values, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, ascending);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) sum += sorted[i];
    summary.count = count;
    summary.mean = sum / (double)count;
    for (int64_t i = 0; i < count; i++) squares += (sorted[i] - summary.mean) * (sorted[i] - summary.mean);
    summary.std = sqrt(squares / (double)count);
    summary.median = percentile(sorted, count, 0.5);
    for (int p = 0; p < metrics->options.n_percentiles; p++)
        summary.percentiles[p] = percentile(sorted, count, metrics->options.percentiles[p] / 100);
    free(sorted);
    return summary;
}

/* ---- peaks ---- */

/* The most intervals [starts[i], ends[i]) that overlap; sorts both. */
static int64_t most_at_once(double *starts, double *ends, int64_t n) {
    int64_t most = 0, ended = 0;
    qsort(starts, (size_t)n, sizeof *starts, ascending);
    qsort(ends, (size_t)n, sizeof *ends, ascending);
    for (int64_t begun = 1; begun <= n; begun++) {
        while (ends[ended] <= starts[begun - 1] && ended < begun - 1) ended++;
        if (begun - ended > most) most = begun - ended;
    }
    return most;
}

/* Adds the tokens of a request to the seconds in which they came. */
static void count_tokens(const cpa_metrics *metrics, const cpa_request_record *record, double origin, int64_t *seconds,
                         int64_t n_seconds) {
    double at = record->start_s + record->ttft_s - origin;
    for (int64_t i = 0; i <= record->n_gaps; i++) {
        if (at >= 0 && (int64_t)at < n_seconds) seconds[(int64_t)at]++;
        if (i < record->n_gaps) at += metrics->samples[CPA_ITL].values[record->first_gap + i] / MS_PER_S;
    }
}

static int64_t most_tokens_a_second(cpa_metrics *metrics, double first, double last) {
    static const double longest_s = 1e7;
    const int64_t n = last - first < longest_s ? (int64_t)(last - first) + 1 : 0;
    int64_t *seconds = n > 0 ? calloc((size_t)n, sizeof *seconds) : NULL, most = 0;
    if (!seconds) return 0;
    for (int64_t i = 0; i < metrics->n_records; i++) {
        const cpa_request_record *record = &metrics->records[i];
        if (!record->error && record->end_s > record->start_s) count_tokens(metrics, record, first, seconds, n);
    }
    for (int64_t i = 0; i < n; i++) most = seconds[i] > most ? seconds[i] : most;
    free(seconds);
    return most;
}

cpa_peaks cpa_metrics_peaks(cpa_metrics *metrics) {
    cpa_peaks peaks = {0};
    double *starts = malloc(2 * (size_t)(metrics->n_records + 1) * sizeof *starts);
    double *ends = starts ? starts + metrics->n_records : NULL;
    int64_t n = 0;
    if (!starts) {
        metrics->out_of_memory = 1;
        return peaks;
    }
    for (int64_t i = 0; i < metrics->n_records; i++) {
        if (metrics->records[i].error) continue;
        starts[n] = metrics->records[i].start_s;
        ends[n++] = metrics->records[i].end_s;
    }
    if (n > 0) {
        peaks.requests = most_at_once(starts, ends, n);
        peaks.tokens_per_s = most_tokens_a_second(metrics, starts[0], ends[n - 1]);
    }
    free(starts);
    return peaks;
}

void cpa_metrics_release(cpa_metrics *metrics) {
    for (int m = 0; m < CPA_METRIC_COUNT; m++) free(metrics->samples[m].values);
    for (int64_t i = 0; i < metrics->n_records; i++) free(metrics->records[i].error);
    free(metrics->records);
    *metrics = (cpa_metrics){0};
}
