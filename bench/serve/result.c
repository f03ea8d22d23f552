#include "bench/serve/result.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "program/json_put.h"
#include "program/metrics_json.h"
#include "program/metrics_report.h"
#include "program/output_file.h"
#include "program/report_line.h"

/* ---- the report ---- */

void cpa_serve_print_preamble(const cpa_serve_result *result, FILE *out) {
    const cpa_serve_options *options = result->target->options;
    char model[128], how[160];
    cpa_text_quote(result->target->model, strlen(result->target->model), model, sizeof model);
    int used = options->time_scale > 0 ? snprintf(how, sizeof how, "at their times, scaled by %g", options->time_scale)
               : isinf(options->request_rate)
                   ? snprintf(how, sizeof how, "all at once")
                   : snprintf(how, sizeof how, "%g a second, at random", options->request_rate);
    if (options->max_concurrency > 0)
        snprintf(how + used, sizeof how - (size_t)used, "; at most %" PRId64 " under way", options->max_concurrency);
    fprintf(out, "cp_attn %s bench serve\n", cpa_version());
    cpa_report_line(out, "server", "%s, model %s", result->target->completions, model);
    cpa_report_line(out, "run", "%s, sent %s", result->workload->title, how);
    cpa_report_line(out, "", "%" PRId64 " prompt and %" PRId64 " output tokens", result->workload->prompt_tokens,
                    result->workload->output_tokens);
}

void cpa_serve_print_report(const cpa_serve_result *result, FILE *out) {
    cpa_metrics *done = result->metrics;
    const cpa_peaks peaks = cpa_metrics_peaks(done);
    fputc('\n', out);
    cpa_report_line(out, "requests", "%" PRId64 " of %" PRId64 " completed in %.2f s", done->completed,
                    result->workload->count, result->duration_s);
    cpa_report_line(out, "tokens", "%" PRId64 " of prompts, %" PRId64 " of output", done->input_tokens,
                    done->output_tokens);
    cpa_metrics_print_throughput(done, result->duration_s, out);
    cpa_report_line(out, "peak", "%" PRId64 " requests at once, %" PRId64 " output tokens in a second", peaks.requests,
                    peaks.tokens_per_s);
    cpa_metrics_print_latencies(done, out);
    cpa_serve_tenants_print(result->tenants, result->duration_s, out);
}

/* A reason, and how many requests failed for it. */
typedef struct failure {
    const char *reason;
    int64_t count;
} failure;

static int most_first(const void *a, const void *b) {
    const failure *left = a, *right = b;
    if (left->count != right->count) return left->count < right->count ? 1 : -1;
    return strcmp(left->reason, right->reason);
}

void cpa_serve_print_failures(const cpa_metrics *metrics, FILE *out) {
    enum { MOST_REASONS = 8 };
    failure failures[MOST_REASONS];
    int64_t others = 0;
    int n = 0;
    for (int64_t i = 0; i < metrics->n_records; i++) {
        const char *reason = metrics->records[i].error;
        int k = 0;
        if (!reason) continue;
        while (k < n && strcmp(failures[k].reason, reason) != 0) k++;
        if (k == MOST_REASONS) {
            others++;
            continue;
        }
        if (k == n) failures[n++] = (failure){.reason = reason};
        failures[k].count++;
    }
    qsort(failures, (size_t)n, sizeof *failures, most_first);
    for (int k = 0; k < n; k++)
        fprintf(out, "cp_attn: %" PRId64 " request%s failed: %s\n", failures[k].count,
                failures[k].count == 1 ? "" : "s", failures[k].reason);
    if (others > 0) fprintf(out, "cp_attn: %" PRId64 " failed for other reasons\n", others);
}

/* ---- the file ---- */

static int put_settings(json_t *root, const cpa_serve_options *options) {
    int n_fields, bad = 0;
    const cpa_field *table = cpa_serve_options_table(&n_fields);
    json_t *object = json_object();
    for (int f = 0; f < n_fields; f++) {
        if (strcmp(table[f].name, "help") != 0) bad |= cpa_json_put_field(object, &table[f], options);
    }
    return bad | json_object_set_new(root, "settings", object);
}

static json_t *pack(const cpa_serve_result *result) {
    const cpa_serve_options *options = result->target->options;
    const char *backend = options->endpoint == CPA_SERVE_CHAT ? "openai-chat" : "openai";
    const char *stop = result->stopped_by == SIGINT ? "SIGINT" : result->stopped_by ? "SIGTERM" : NULL;
    char date[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_t *root = json_object();
    int bad = cpa_json_put_text(root, "date", date) | cpa_json_put_text(root, "endpoint_type", backend) |
              cpa_json_put_text(root, "backend", backend) | cpa_json_put_text(root, "model_id", result->target->model) |
              cpa_json_put_text(root, "tokenizer_id", result->target->model);
    bad |= isinf(options->request_rate) ? cpa_json_put_text(root, "request_rate", "inf")
                                        : cpa_json_put_real(root, "request_rate", options->request_rate);
    bad |= cpa_json_put_real(root, "burstiness", 1); /* a Poisson process */
    bad |= json_object_set_new(root, "max_concurrency",
                               options->max_concurrency ? json_integer(options->max_concurrency) : json_null());
    bad |= cpa_metrics_put(root, result->metrics, result->workload->count, result->duration_s, 1);
    bad |= cpa_serve_tenants_put(root, result->tenants, result->duration_s);
    bad |= put_settings(root, options);
    bad |= json_object_set_new(root, "stopped_by", stop ? json_string(stop) : json_null());
    bad |= cpa_json_put_text(root, "version", cpa_version());
    if (!bad) return root;
    json_decref(root);
    return NULL;
}

cpa_status cpa_serve_write_json(const cpa_serve_result *result, const char *path, cpa_error *err) {
    json_t *root = pack(result);
    if (!root) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the results", path);
    cpa_status status = cpa_json_write(path, root, err);
    json_decref(root);
    return status;
}
