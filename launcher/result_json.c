#include "launcher/result_json.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "launcher/output_file.h"
#include "launcher/signals.h"

static int put_int(json_t *object, const char *key, int64_t value) {
    return json_object_set_new(object, key, json_integer(value));
}

/* JSON has no infinity and no NaN; they become null. */
static int put_real(json_t *object, const char *key, double value) {
    return json_object_set_new(object, key, isfinite(value) ? json_real(value) : json_null());
}

/* Text that is no UTF-8 is shown as far as it is printable ASCII. */
static int put_text(json_t *object, const char *key, const char *value) {
    char printable[CPA_TEXT_BYTES];
    json_t *text = json_string(value);
    if (!text) {
        cpa_text_quote(value, strlen(value), printable, sizeof printable);
        text = json_string(printable);
    }
    return json_object_set_new(object, key, text);
}

/* No rate where nothing was computed. */
static double per_second(const cpa_outcome *outcome, int64_t count) {
    if (outcome->settings->dry_run) return NAN;
    return outcome->stats.duration_s > 0 ? (double)count / outcome->stats.duration_s : 0;
}

static int add_totals(json_t *root, const cpa_outcome *outcome) {
    const cpa_metrics *done = outcome->metrics;
    return put_int(root, "completed", done->completed) |
           put_int(root, "failed", outcome->workload->count - done->completed) |
           put_int(root, "failed_alone", done->failed) | put_int(root, "cancelled", done->cancelled) |
           put_int(root, "expired", done->expired) | put_real(root, "duration", outcome->stats.duration_s) |
           put_int(root, "total_input_tokens", done->input_tokens) |
           put_int(root, "total_output_tokens", done->output_tokens) |
           put_real(root, "request_throughput", per_second(outcome, done->completed)) |
           put_real(root, "output_throughput", per_second(outcome, done->output_tokens)) |
           put_real(root, "total_token_throughput", per_second(outcome, done->input_tokens + done->output_tokens));
}

static int add_latencies(json_t *root, cpa_metrics *metrics) {
    static const char *const names[CPA_METRIC_COUNT] = {"ttft", "tpot", "itl", "e2el"};
    static const char *const kinds[] = {"mean", "median", "std", "p99"};
    int bad = 0;
    for (int m = 0; m < CPA_METRIC_COUNT; m++) {
        cpa_summary summary = cpa_metrics_summary(metrics, (cpa_metric)m);
        double values[] = {summary.mean, summary.median, summary.std, summary.p99};
        for (int k = 0; summary.count == 0 && k < 4; k++) values[k] = NAN;
        for (int k = 0; k < 4; k++) {
            char key[32];
            snprintf(key, sizeof key, "%s_%s_ms", kinds[k], names[m]);
            bad |= put_real(root, key, values[k]);
        }
    }
    return bad;
}

static int fill_verify(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    return put_int(object, "rows", stats->verify_rows) | put_int(object, "violations", stats->verify_violations) |
           put_int(object, "undecided", stats->verify_undecided) |
           put_real(object, "max_error", stats->verify_max_error) | put_real(object, "seconds", stats->verify_s);
}

static int fill_logits(json_t *object, const cpa_outcome *outcome) {
    const cpa_logits_verdict *logits = &outcome->logits;
    return put_int(object, "tokens", logits->tokens) | put_int(object, "violations", logits->violations) |
           put_real(object, "max_error", logits->max_error);
}

/* How many rows, and the first. */
static int fill_nonfinite(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    json_t *first = stats->nonfinite_rows > 0 ? json_object() : json_null();
    int bad = put_int(object, "rows", stats->nonfinite_rows);
    if (stats->nonfinite_rows > 0)
        bad |= put_int(first, "request", (int64_t)stats->nonfinite_request) |
               put_int(first, "token", stats->nonfinite_position) | put_int(first, "layer", stats->nonfinite_layer);
    return bad | json_object_set_new(object, "first", first);
}

static int fill_cp(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    return put_int(object, "size", outcome->cp_size) | put_int(object, "steps", stats->steps) |
           put_int(object, "graph_steps", stats->graph_steps) | put_real(object, "graph_s", stats->graph_s) |
           put_int(object, "pass_kv", stats->chunks_pass_kv) | put_int(object, "pass_q", stats->chunks_pass_q) |
           put_int(object, "bytes_sent", stats->bytes_sent) |
           put_real(object, "exposed_comm_ms", stats->exposed_comm_s * 1e3) |
           put_real(object, "imbalance", stats->imbalance) | put_int(object, "staging_bytes", stats->staging_bytes) |
           put_real(object, "flops", stats->planner_flops) | put_real(object, "bandwidth", stats->planner_bandwidth) |
           put_real(object, "memory_bandwidth", stats->planner_memory_bandwidth) |
           put_real(object, "exchange_us", stats->planner_exchange_s * 1e6) |
           put_int(object, "rank_local", stats->rank_local) |
           put_real(object, "overlap_tokens", stats->overlap_tokens) |
           put_real(object, "predicted_attend_s", stats->predicted_attend_s) |
           put_real(object, "actual_attend_s", stats->actual_attend_s);
}

static int fill_kv(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    return put_int(object, "blocks", stats->kv_blocks) | put_int(object, "peak", stats->kv_peak) |
           put_int(object, "preemptions", stats->preemptions) |
           put_int(object, "prefix_queries", stats->prefix_queries) |
           put_int(object, "prefix_hits", stats->prefix_hits) | put_int(object, "evictions", stats->evictions) |
           put_int(object, "swapped_in", stats->swapped_in) | put_int(object, "swapped_out", stats->swapped_out) |
           put_int(object, "swap_failures", stats->swap_failures) | put_int(object, "cow_copies", stats->cow_copies) |
           put_int(object, "block_bytes", outcome->block_bytes) |
           put_text(object, "dtype", cpa_dtype_name(outcome->model->shape.attention.kv_dtype));
}

static int fill_model(json_t *object, const cpa_outcome *outcome) {
    const cpa_model_shape *shape = &outcome->model->shape;
    return put_text(object, "name", outcome->model->name) | put_int(object, "layers", shape->layers) |
           put_int(object, "q_heads", shape->attention.q_heads) |
           put_int(object, "kv_heads", shape->attention.kv_heads) |
           put_int(object, "head_dim", shape->attention.k_dim) | put_int(object, "v_head_dim", shape->attention.v_dim) |
           put_text(object, "dtype", cpa_dtype_name(shape->attention.dtype)) |
           json_object_set_new(object, "causal", json_boolean(shape->mask.causal)) |
           put_int(object, "window", shape->mask.window) | put_int(object, "sinks", shape->mask.sinks);
}

/* Every setting as it was in effect, as text. */
static int fill_settings(json_t *object, const cpa_outcome *outcome) {
    int n_fields, bad = 0;
    const cpa_field *table = cpa_settings_table(&n_fields);
    for (int f = 0; f < n_fields; f++) {
        char text[CPA_TEXT_BYTES];
        if (cpa_setting_is_action(&table[f])) continue;
        cpa_field_format(&table[f], outcome->settings, text, sizeof text);
        if (table[f].secret && text[0]) snprintf(text, sizeof text, "(not shown)");
        bad |= put_text(object, table[f].name, text);
    }
    return bad;
}

/* Everything in one object; NULL when memory runs out. */
static json_t *pack(const cpa_outcome *outcome) {
    static const struct {
        const char *key;
        int (*fill)(json_t *object, const cpa_outcome *outcome);
        int known; /* also of a run that was given up */
    } parts[] = {{"verify", fill_verify, 0}, {"nonfinite", fill_nonfinite, 0}, {"cp", fill_cp, 0},
                 {"kv", fill_kv, 0},         {"model", fill_model, 1},         {"settings", fill_settings, 1}};
    char date[32], digest[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    snprintf(digest, sizeof digest, "%016" PRIx64, outcome->stats.output_digest);

    json_t *root = json_object();
    int bad = add_totals(root, outcome) | add_latencies(root, outcome->metrics);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        int known = parts[i].known || !outcome->given_up;
        json_t *object = known ? json_object() : json_null();
        if (known) bad |= parts[i].fill(object, outcome);
        bad |= json_object_set_new(root, parts[i].key, object);
    }
    if (outcome->checked_logits) {
        json_t *logits = json_object();
        bad |= fill_logits(logits, outcome) | json_object_set_new(root, "logits", logits);
    }
    bad |= outcome->stopped_by ? put_text(root, "stopped_by", cpa_signals_name(outcome->stopped_by))
                               : json_object_set_new(root, "stopped_by", json_null());
    bad |= outcome->given_up ? json_object_set_new(root, "output_digest", json_null())
                             : put_text(root, "output_digest", digest);
    bad |= put_text(root, "device", outcome->device) |
           json_object_set_new(root, "dry_run", json_boolean(outcome->settings->dry_run)) |
           put_text(root, "version", cpa_version()) | put_text(root, "date", date);
    if (!bad) return root;
    json_decref(root);
    return NULL;
}

cpa_status cpa_result_json_write(const char *path, const cpa_outcome *outcome, cpa_error *err) {
    cpa_output_file output;
    json_t *root = pack(outcome);
    if (!root) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the results", path);
    cpa_status status = cpa_output_open(path, &output, err);
    if (status == CPA_OK) {
        int whole = json_dumpf(root, output.file, JSON_INDENT(2)) == 0 && fputc('\n', output.file) != EOF;
        status = cpa_output_close(&output, whole, err);
    }
    json_decref(root);
    return status;
}
