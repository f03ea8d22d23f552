#include "launcher/output/live_page.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "launcher/output/live_page_script.h"
#include "program/chart/page.h"
#include "program/chart/rank_times.h"
#include "program/chart/shares.h"

/* ---- figures by time ---- */

/* What is drawn of a figure in a period. */
typedef enum quantity {
    VALUE = 0, /* at its end */
    A_SECOND,  /* what it has grown by, a second */
    OF_EACH,   /* the same for each request that was completed in it */
} quantity;

typedef struct line {
    const char *label; /* NULL: there is none */
    cpa_live_figure figure;
    quantity quantity;
    double factor;
} line;

typedef struct chart {
    const char *title, *y_label;
    double y_high;
    int is_whole, of_several_ranks;
    line lines[2];
} chart;

#define MIB (1.0 / (1 << 20))
static const chart by_time[] = {
    {"Requests", "requests", .is_whole = 1,
     .lines = {{"running", CPA_LIVE_RUNNING, VALUE, 1}, {"waiting", CPA_LIVE_WAITING, VALUE, 1}}},
    {"Blocks of the cache that requests have", "%", .y_high = 100, .lines = {{"taken", CPA_LIVE_CACHE, VALUE, 100}}},
    {"Tokens", "a second",
     .lines = {{"answers", CPA_LIVE_OUTPUT_TOKENS, A_SECOND, 1}, {"prompts", CPA_LIVE_PROMPT_TOKENS, A_SECOND, 1}}},
    {"Latency of requests that ended", "seconds, mean",
     .lines = {{"first token", CPA_LIVE_TTFT_S, OF_EACH, 1}, {"whole", CPA_LIVE_E2E_S, OF_EACH, 1}}},
    {"Bytes that ranks sent", "MiB a second", .of_several_ranks = 1,
     .lines = {{"sent", CPA_LIVE_BYTES_SENT, A_SECOND, MIB}}},
    {"Attention waits for messages", "% of the time", .y_high = 100, .of_several_ranks = 1,
     .lines = {{"waits", CPA_LIVE_EXPOSED_COMM_S, A_SECOND, 100}}},
    {"Results checked, and wrong", "since the start", .is_whole = 1,
     .lines = {{"checked", CPA_LIVE_VERIFY_ROWS, VALUE, 1}, {"wrong", CPA_LIVE_VIOLATIONS, VALUE, 1}}},
};
enum { BY_TIME = sizeof by_time / sizeof by_time[0], MOST_PICTURES = BY_TIME + 4 };

/* A page that is being drawn. */
typedef struct drawing {
    cpa_live_figures *figures; /* of its own */
    double age_s;              /* of the server */
    cpa_picture pictures[MOST_PICTURES];
    int64_t n;
    int failed; /* memory was lacking */
} drawing;

static cpa_picture *add_picture(drawing *d, const char *title) {
    cpa_picture *picture = &d->pictures[d->n++];
    *picture = (cpa_picture){.name = title};
    snprintf(picture->title, sizeof picture->title, "%s", title);
    return picture;
}

static double value_at(const cpa_live_figures *f, cpa_live_figure figure, int64_t period) {
    const cpa_live_sample *sample = cpa_live_figures_at(f, period);
    return sample ? sample->values[figure] : 0;
}

static double growth_in(const cpa_live_figures *f, cpa_live_figure figure, int64_t period) {
    return value_at(f, figure, period) - value_at(f, figure, period - 1);
}

/* Not finite: there is none. */
static double quantity_of(const cpa_live_figures *f, const line *l, int64_t period) {
    switch (l->quantity) {
        case VALUE: break;
        case A_SECOND: return l->factor * growth_in(f, l->figure, period) / CPA_LIVE_PERIOD_S;
        case OF_EACH: return l->factor * growth_in(f, l->figure, period) / growth_in(f, CPA_LIVE_COMPLETED, period);
    }
    return l->factor * value_at(f, l->figure, period);
}

/* A series of a line, whose label ends with its last value. What has grown is known once the period is over. */
static void add_line(const drawing *d, const line *l, cpa_series_set *set) {
    double values[CPA_LIVE_PERIODS], last = NAN;
    const int64_t now = (int64_t)(d->age_s / CPA_LIVE_PERIOD_S), end = l->quantity == VALUE ? now + 1 : now;
    const int64_t first = now + 1 > CPA_LIVE_PERIODS ? now + 1 - CPA_LIVE_PERIODS : 0;
    char label[64];
    for (int64_t p = first; p < end; p++) {
        values[p - first] = quantity_of(d->figures, l, p);
        if (isfinite(values[p - first])) last = values[p - first];
    }
    if (!isfinite(last)) return;
    snprintf(label, sizeof label, last >= 1000 ? "%s %.0f" : "%s %.3g", l->label, last);
    double drawn = NAN;
    for (int64_t p = first; p < end; p++) {
        if (!isfinite(values[p - first]) || values[p - first] == drawn) continue;
        drawn = values[p - first];
        cpa_series_add(set, label, (double)(p * CPA_LIVE_PERIOD_S) - d->age_s, drawn);
    }
    const double end_s = l->quantity == VALUE ? 0 : (double)(end * CPA_LIVE_PERIOD_S) - d->age_s;
    cpa_series_add(set, label, end_s, drawn);
}

/* Of ten minutes; of a younger server of its life. */
static void draw_chart(drawing *d, const chart *c) {
    static const double least_s = 60;
    cpa_series_set set = {.n = 0};
    const cpa_lines_style style = {
        .x_label = "seconds from now",
        .y_label = c->y_label,
        .is_step = 1,
        .y_is_whole = c->is_whole,
        .height = 110,
        .x_low = -fmin(fmax(d->age_s, least_s), CPA_LIVE_PERIODS * CPA_LIVE_PERIOD_S),
        .y_high = c->y_high,
    };
    if (c->of_several_ranks && d->figures->n_ranks < 2) return;
    for (int i = 0; i < 2 && c->lines[i].label; i++) add_line(d, &c->lines[i], &set);
    cpa_lines_draw(add_picture(d, c->title), &set, &style);
    cpa_series_release(&set);
}

/* ---- latencies ---- */

static void draw_latencies(drawing *d, const char *title, cpa_live_latencies *latencies, const char *of) {
    char label[64], y_label[64];
    const int64_t n = latencies->added < CPA_LIVE_LATENCIES ? latencies->added : CPA_LIVE_LATENCIES;
    cpa_series_set set = {.n = 0};
    if (n == 0) return;
    snprintf(label, sizeof label, "the last %lld %s", (long long)n, of);
    snprintf(y_label, sizeof y_label, "share of %s", of);
    const cpa_lines_style style = {.x_label = "ms", .y_label = y_label, .x_is_log = 1, .height = 160};
    cpa_shares_add(&set, label, latencies->ms, n);
    cpa_lines_draw(add_picture(d, title), &set, &style);
    cpa_series_release(&set);
}

/* ---- ranks ---- */

/* A step from `origin_s` on. */
static void add_step(cpa_rank_times *times, int32_t rank, const cpa_live_step *step, double origin_s) {
    const struct {
        cpa_activity activity;
        double seconds;
    } parts[] = {{CPA_ACTIVITY_ATTEND, step->attend_s},
                 {CPA_ACTIVITY_WAIT, step->wait_s},
                 {CPA_ACTIVITY_GRAPH, step->graph_s},
                 {CPA_ACTIVITY_OTHER, step->end_s - step->begin_s}};
    double begin_s = step->begin_s;
    for (int i = 0; i < 4 && begin_s < step->end_s; i++) {
        const double end_s = fmin(begin_s + parts[i].seconds, step->end_s), from_s = fmax(begin_s, origin_s);
        if (end_s > from_s) cpa_rank_times_add(times, rank, parts[i].activity, from_s - origin_s, end_s - from_s);
        begin_s = end_s;
    }
}

/* The last steps, of LAST_S seconds at most. */
static void draw_ranks(drawing *d) {
    static const double last_s = 10;
    const cpa_live_figures *f = d->figures;
    double begin_s = INFINITY, end_s = 0;
    cpa_rank_times times = {.ranks = f->n_ranks};
    for (int32_t rank = 0; rank < f->n_ranks; rank++) {
        const cpa_live_rank *of = &f->ranks[rank];
        if (of->told == 0) continue;
        const int64_t oldest = of->told > CPA_LIVE_STEPS ? of->told % CPA_LIVE_STEPS : 0;
        begin_s = fmin(begin_s, of->steps[oldest].begin_s);
        end_s = fmax(end_s, of->last.step_end_s);
    }
    if (!isfinite(begin_s)) return;
    begin_s = fmax(begin_s, end_s - last_s);
    for (int32_t rank = 0; rank < f->n_ranks; rank++)
        for (int64_t i = 0; i < CPA_LIVE_STEPS && i < f->ranks[rank].told; i++)
            add_step(&times, rank, &f->ranks[rank].steps[i], begin_s);
    cpa_picture *picture = add_picture(d, "Ranks by time: the last steps");
    picture->note =
        "Of each step of a rank its attention, its waiting and its graph stand one behind another, whatever their "
        "order was; exchanges are not measured. --timeline records both.";
    cpa_rank_times_draw(picture, &times);
    cpa_rank_times_release(&times);
}

static void draw_pairs(drawing *d) {
    if (d->figures->n_ranks > 1)
        cpa_pairs_draw(add_picture(d, "Bytes between ranks since the start"), d->figures->bytes, d->figures->n_ranks);
}

/* ---- the page ---- */

static void draw(drawing *d) {
    enum { BEFORE_LATENCIES = 4 };
    for (int i = 0; i < BEFORE_LATENCIES; i++) draw_chart(d, &by_time[i]);
    draw_latencies(d, "Time to the first token (TTFT)", &d->figures->ttft, "requests");
    draw_latencies(d, "Time between two tokens of a request (ITL)", &d->figures->itl, "tokens");
    draw_ranks(d);
    draw_pairs(d);
    for (int i = BEFORE_LATENCIES; i < BY_TIME; i++) draw_chart(d, &by_time[i]);
    for (int64_t i = 0; i < d->n; i++) d->failed |= d->pictures[i].failed;
}

/* NULL without memory. */
static char *put(const cpa_page *page) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return NULL;
    cpa_page_put(page, out);
    const int failed = ferror(out);
    if (fclose(out) == 0 && !failed) return text;
    free(text);
    return NULL;
}

char *cpa_live_page_render(cpa_live_history *history, const char *title, double now_s) {
    drawing d = {.figures = cpa_live_history_copy(history)};
    if (!d.figures) return NULL;
    d.age_s = fmax(now_s - d.figures->start_s, 0);
    draw(&d);
    const cpa_page page = {.title = title,
                           .pictures = d.pictures,
                           .n = d.n,
                           .script = cpa_live_page_script,
                           .script_bytes = cpa_live_page_script_bytes};
    char *text = d.failed ? NULL : put(&page);
    for (int64_t i = 0; i < d.n; i++) cpa_picture_release(&d.pictures[i]);
    free(d.figures);
    return text;
}
