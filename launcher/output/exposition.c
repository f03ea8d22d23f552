#include "launcher/output/exposition.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/output/figures.h"
#include "program/links.h"
#include "src/text/utf8.h"

enum { MOST_BOUNDS = 22 };

/* Values by size: how many were above the bound before and up to this one; the last: above all. */
typedef struct histogram {
    int64_t counts[MOST_BOUNDS + 1];
    int64_t count;
    double sum;
} histogram;

typedef enum histogram_kind { TTFT = 0, ITL, E2E, QUEUE, ITERATION, HISTOGRAM_KINDS } histogram_kind;

#define LATENCY_BOUNDS                                                                                                 \
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,      \
        1920.0, 7680.0

/* The bounds are those of vLLM 0.11, vllm/v1/metrics/loggers.py; a 0 ends them. */
static const struct {
    const char *name, *help;
    double bounds[MOST_BOUNDS + 1];
} histograms[HISTOGRAM_KINDS] = {
    [TTFT] = {"time_to_first_token_seconds",
              "From arrival to the first token, of requests that have ended and got one.",
              {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25, 0.5,   0.75,
               1.0,   2.5,   5.0,  7.5,  10.0, 20.0, 40.0, 80.0, 160., 640.0, 2560.0}},
    [ITL] = {"inter_token_latency_seconds",
             "Between two tokens of a request that has ended.",
             {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
              80.0}},
    [E2E] = {"e2e_request_latency_seconds",
             "From arrival to the last token, of requests that have ended with length or stop.",
             {LATENCY_BOUNDS}},
    [QUEUE] = {"request_queue_time_seconds",
               "From arrival until it first ran, of requests that have ended and did run.",
               {LATENCY_BOUNDS}},
    [ITERATION] = {"iteration_tokens_total",
                   "Tokens that a step computed, of prompts and of answers.",
                   {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}},
};

enum { REASONS = CPA_FINISH_STOP + 1 };
static const char *const reasons[REASONS] = {[CPA_FINISH_LENGTH] = "length",
                                             [CPA_FINISH_CANCELLED] = "abort",
                                             [CPA_FINISH_EXPIRED] = "expired",
                                             [CPA_FINISH_FAILED] = "error",
                                             [CPA_FINISH_STOP] = "stop"};

struct cpa_exposition {
    pthread_mutex_t lock;
    char *model; /* the name of the model as it stands in a label */
    int64_t block_size;
    /* Guarded by the lock. */
    histogram of[HISTOGRAM_KINDS];
    int64_t ended[REASONS];
    char transport[32]; /* of the links */
    cpa_link_group links[CPA_LINK_KINDS];
    int n_links;
    int64_t steps, computed_tokens; /* steps and computed tokens of the engine, as of the last step that was added */
};

/* What stands between the quotes of a label for that text, whose bytes beyond ASCII are shown as '?' if they are no
 * UTF-8. NULL without memory. */
static char *escape_label(const char *text) {
    const size_t bytes = strlen(text);
    char *out = malloc(2 * bytes + 1), *at = out;
    const int keeps = cpa_utf8_valid(text, bytes) == bytes;
    if (!out) return NULL;
    for (; *text; text++) {
        if (*text == '\\' || *text == '"' || *text == '\n') *at++ = '\\';
        *at++ = *text == '\n' ? 'n' : (unsigned char)*text < 0x80 || keeps ? *text : '?';
    }
    *at = 0;
    return out;
}

cpa_exposition *cpa_exposition_create(const char *model, int64_t block_size) {
    cpa_exposition *e = calloc(1, sizeof *e);
    char *label = escape_label(model);
    if (!e || !label) {
        free(label);
        free(e);
        return NULL;
    }
    e->model = label;
    e->block_size = block_size;
    pthread_mutex_init(&e->lock, NULL);
    return e;
}

void cpa_exposition_release(cpa_exposition *e) {
    if (!e) return;
    pthread_mutex_destroy(&e->lock);
    free(e->model);
    free(e);
}

void cpa_exposition_set_links(cpa_exposition *e, const char *transport, const cpa_link *links, int32_t ranks) {
    pthread_mutex_lock(&e->lock);
    snprintf(e->transport, sizeof e->transport, "%s", transport);
    e->n_links = cpa_links_group(links, ranks, e->links);
    pthread_mutex_unlock(&e->lock);
}

static void observe(cpa_exposition *e, histogram_kind kind, double value) {
    const double *bounds = histograms[kind].bounds;
    histogram *h = &e->of[kind];
    int bucket = 0;
    while (bounds[bucket] > 0 && value > bounds[bucket]) bucket++;
    h->counts[bucket]++;
    h->count++;
    h->sum += value;
}

void cpa_exposition_add_result(cpa_exposition *e, const cpa_request_result *result) {
    const int completed = result->reason == CPA_FINISH_LENGTH || result->reason == CPA_FINISH_STOP;
    pthread_mutex_lock(&e->lock);
    e->ended[result->reason]++;
    /* One that never ran has no time but that of its end. */
    if (completed || result->scheduled_s < result->finish_s) observe(e, QUEUE, result->scheduled_s - result->arrival_s);
    if (result->output_tokens > 0) observe(e, TTFT, result->first_token_s - result->arrival_s);
    for (int64_t i = 1; i < result->output_tokens; i++) observe(e, ITL, result->token_s[i] - result->token_s[i - 1]);
    if (completed) observe(e, E2E, result->finish_s - result->arrival_s);
    pthread_mutex_unlock(&e->lock);
}

void cpa_exposition_add_step(cpa_exposition *e, const cpa_engine_stats *stats) {
    pthread_mutex_lock(&e->lock);
    if (stats->steps > e->steps) {
        observe(e, ITERATION, (double)(stats->computed_tokens - e->computed_tokens));
        e->steps = stats->steps;
        e->computed_tokens = stats->computed_tokens;
    }
    pthread_mutex_unlock(&e->lock);
}

/* What comes before the samples of a metric. */
static void put_head(FILE *out, const char *name, const char *type, const char *help) {
    fprintf(out, "# HELP cpattn_%s %s\n# TYPE cpattn_%s %s\n", name, help, name, type);
}

static void put_histogram(FILE *out, const cpa_exposition *e, histogram_kind kind) {
    const char *name = histograms[kind].name;
    const double *bounds = histograms[kind].bounds;
    const histogram *h = &e->of[kind];
    int64_t up_to = 0;
    put_head(out, name, "histogram", histograms[kind].help);
    for (int i = 0; bounds[i] > 0; i++) {
        up_to += h->counts[i];
        fprintf(out, "cpattn_%s_bucket{model_name=\"%s\",le=\"%g\"} %" PRId64 "\n", name, e->model, bounds[i], up_to);
    }
    fprintf(out, "cpattn_%s_bucket{model_name=\"%s\",le=\"+Inf\"} %" PRId64 "\n", name, e->model, h->count);
    fprintf(out, "cpattn_%s_sum{model_name=\"%s\"} %.15g\n", name, e->model, h->sum);
    fprintf(out, "cpattn_%s_count{model_name=\"%s\"} %" PRId64 "\n", name, e->model, h->count);
}

/* What a metric is where the engine has `value`. */
static double in_unit(const cpa_exposition *e, const cpa_engine_stats *s, cpa_metric_unit unit, double value) {
    switch (unit) {
        case CPA_METRIC_AS_IT_IS: break;
        case CPA_METRIC_TOKENS_OF_BLOCKS: return value * (double)e->block_size;
        case CPA_METRIC_SHARE_OF_BLOCKS: return cpa_figure_share_of_blocks(s);
    }
    return value;
}

/* Metrics of one sample each, which the engine counts. */
static void put_figures(FILE *out, const cpa_exposition *e, const cpa_engine_stats *s) {
    for (int i = 0; i < cpa_n_figures; i++) {
        const cpa_figure *f = &cpa_figures[i];
        if (!f->metric) continue;
        put_head(out, f->metric, f->type, f->help);
        fprintf(out, "cpattn_%s{model_name=\"%s\"} %.15g\n", f->metric, e->model,
                in_unit(e, s, f->unit, cpa_figure_value(f, s)));
    }
}

static void put_reasons(FILE *out, const cpa_exposition *e) {
    static const char name[] = "request_success_total";
    put_head(
        out, name, "counter",
        "Requests that have ended, by why: length and stop with all their tokens, abort cancelled, expired at their "
        "deadline, error by a fault of their own.");
    for (int i = 0; i < REASONS; i++)
        fprintf(out, "cpattn_%s{model_name=\"%s\",finished_reason=\"%s\"} %" PRId64 "\n", name, e->model, reasons[i],
                e->ended[i]);
}

static void put_chunks(FILE *out, const cpa_exposition *e, const cpa_engine_stats *s) {
    static const char name[] = "chunks_total";
    const struct {
        const char *algorithm;
        int64_t value;
    } rows[] = {{"pass-kv", s->planned_pass_kv}, {"pass-q", s->planned_pass_q}, {"none", s->planned_local}};
    put_head(
        out, name, "counter",
        "Chunks of sequences that were planned, by how the ranks exchange: keys and values, queries, or nothing as "
        "one rank has it all.");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        fprintf(out, "cpattn_%s{model_name=\"%s\",algorithm=\"%s\"} %" PRId64 "\n", name, e->model, rows[i].algorithm,
                rows[i].value);
}

static void put_link(FILE *out, const cpa_exposition *e, const char *name, const cpa_link_group *link, double value) {
    fprintf(out, "cpattn_%s{model_name=\"%s\",transport=\"%s\",link=\"%s\"} %.15g\n", name, e->model, e->transport,
            cpa_link_kind_name(link->kind), value);
}

static void put_links(FILE *out, const cpa_exposition *e) {
    static const char pairs[] = "link_pairs", slowest[] = "link_slowest_bytes_per_second";
    put_head(out, pairs, "gauge", "Pairs of ranks, by what joins them.");
    for (int i = 0; i < e->n_links; i++) put_link(out, e, pairs, &e->links[i], e->links[i].pairs);
    put_head(out, slowest, "gauge",
             "What the slowest of these pairs exchanges each way, as measured at start-up while others did too.");
    for (int i = 0; i < e->n_links; i++)
        if (e->links[i].least > 0) put_link(out, e, slowest, &e->links[i], e->links[i].least);
}

char *cpa_exposition_render(cpa_exposition *e, const cpa_engine_stats *stats) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return NULL;
    put_figures(out, e, stats);
    put_chunks(out, e, stats);
    pthread_mutex_lock(&e->lock);
    put_links(out, e);
    put_reasons(out, e);
    for (int kind = 0; kind < HISTOGRAM_KINDS; kind++) put_histogram(out, e, (histogram_kind)kind);
    pthread_mutex_unlock(&e->lock);
    const int failed = ferror(out);
    if (fclose(out) == 0 && !failed) return text;
    free(text);
    return NULL;
}
