/* Marks on the host, the spans of a step, and the timeline of a run. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "src/trace/spans.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static void wait_ms(double ms) {
    for (double end = cpa_clock_now() + ms * 1e-3; cpa_clock_now() < end;) continue;
}

typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
} site;

static site site_open(void) {
    site s = {NULL, NULL};
    cpa_device_options options = {.size = sizeof options};
    if (cpa_device_open(&options, &s.device, NULL) || cpa_stream_create(s.device, &s.stream, NULL)) abort();
    return s;
}

static void site_close(site *s) {
    cpa_stream_destroy(s->stream);
    cpa_device_close(s->device);
}

static void a_mark_is_the_time_at_which_it_was_set_last(void) {
    site s = site_open();
    const cpa_device_table *table = s.device->table;
    cpa_events *events;
    cpa_error err;
    double seconds = -1;
    CU_ASSERT_EQUAL_FATAL(table->events_create(s.device, &events, &err), CPA_OK);
    CU_ASSERT_EQUAL(table->event_record(events, 0, s.stream), CPA_OK);
    CU_ASSERT_EQUAL(table->event_record(events, 5, s.stream), CPA_OK);
    wait_ms(2);
    CU_ASSERT_EQUAL(table->event_record(events, 5, s.stream), CPA_OK);
    CU_ASSERT_EQUAL(table->event_seconds(events, 0, 5, &seconds, &err), CPA_OK);
    CU_ASSERT(seconds >= 2e-3 && seconds < 1);
    seconds = -1;
    CU_ASSERT_EQUAL(table->event_seconds(events, 0, 3, &seconds, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(table->event_seconds(events, 0, 6, &seconds, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(seconds, -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "0 and 6"));
    table->events_destroy(events);
    site_close(&s);
}

static void only_attention_and_waiting_are_measured_without_a_timeline(void) {
    site s = site_open();
    cpa_spans spans;
    cpa_span_totals totals;
    cpa_timeline timeline = {.origin = cpa_clock_now(), .limit = 10, .step = 7};
    CU_ASSERT_EQUAL_FATAL(cpa_spans_create(&spans, s.device, NULL), CPA_OK);
    for (int kept = 0; kept < 2; kept++) {
        spans.timeline = kept ? &timeline : NULL;
        cpa_spans_start(&spans, s.stream);
        spans.layer = 3;
        int64_t outer = cpa_spans_begin(&spans, CPA_SPAN_EXCHANGE_KV, 2, s.stream);
        int64_t inner = cpa_spans_begin(&spans, CPA_SPAN_WAIT, 2, s.stream);
        wait_ms(1);
        cpa_spans_end(&spans, inner, s.stream);
        cpa_spans_end(&spans, outer, s.stream);
        CU_ASSERT_EQUAL(outer >= 0, kept);
        CU_ASSERT_EQUAL(cpa_spans_read(&spans, &totals, NULL), CPA_OK);
        CPA_ASSERT_ORDER(totals.seconds[CPA_SPAN_WAIT], >=, 1e-3);
        CU_ASSERT_EQUAL(totals.seconds[CPA_SPAN_EXCHANGE_KV] > 0, kept);
        CU_ASSERT_EQUAL(totals.seconds[CPA_SPAN_MERGE], 0);
        CU_ASSERT_EQUAL(cpa_spans_read(&spans, &totals, NULL), CPA_OK);
        CU_ASSERT_EQUAL(totals.seconds[CPA_SPAN_WAIT], 0); /* read once */
    }
    CU_ASSERT_EQUAL_FATAL(timeline.count, 2);
    const cpa_timeline_entry *exchange = &timeline.entries[0], *wait = &timeline.entries[1];
    CU_ASSERT(exchange->kind == CPA_SPAN_EXCHANGE_KV && wait->kind == CPA_SPAN_WAIT);
    CU_ASSERT(exchange->step == 7 && exchange->layer == 3 && exchange->round == 2);
    CU_ASSERT(exchange->begin_s >= 0 && exchange->begin_s <= wait->begin_s);
    CPA_ASSERT_ORDER(wait->begin_s + wait->seconds, <=, exchange->begin_s + exchange->seconds);
    cpa_timeline_destroy(&timeline);
    cpa_spans_destroy(&spans);
    site_close(&s);
}

static int warnings;
static void count_warnings(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx, (void)line;
    warnings += level == CPA_LOG_WARN;
}

static void a_full_timeline_says_so_once(void) {
    cpa_timeline timeline = {.limit = 3};
    warnings = 0;
    cpa_log_set(count_warnings, NULL, CPA_LOG_WARN);
    for (int i = 0; i < 10; i++) cpa_timeline_add(&timeline, CPA_SPAN_PLAN, -1, 0, i, 1);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(warnings, 1);
    CU_ASSERT_EQUAL(timeline.count, 3);
    CU_ASSERT_EQUAL(timeline.dropped, 7);
    CU_ASSERT_EQUAL(timeline.entries[2].begin_s, 2);
    cpa_timeline_destroy(&timeline);
}

/* What the callback saw of a run. */
typedef struct seen {
    int64_t spans, of_rank[8], exchanges, schedules, of_requests;
    double attention; /* attend, merge and wait, of rank 0 */
    double end;       /* of the last, rank 0 */
    int good;
} seen;

static void see(void *ctx, const cpa_span *span) {
    seen *s = ctx;
    const char *n = span->name;
    if (span->of_request) {
        s->of_requests++;
        return;
    }
    s->spans++;
    s->of_rank[span->rank]++;
    if (!(span->begin_s >= 0 && span->seconds >= 0 && span->step >= 0)) s->good = 0;
    const int of_no_layer =
        strcmp(n, "replayed step") == 0 || strcmp(n, "begin step") == 0 || strcmp(n, "end step") == 0;
    if (strcmp(n, "hash") == 0 && span->layer == -1) return; /* of all layers of a step with few rows */
    if (strcmp(span->row, "compute") == 0 && (of_no_layer ? span->layer != -1 : span->layer < 0 || span->layer > 1))
        s->good = 0;
    if (span->rank == 0 && span->begin_s + span->seconds > s->end) s->end = span->begin_s + span->seconds;
    if (strncmp(span->row, "exchange", 8) == 0) s->exchanges++;
    if (strcmp(n, "schedule") == 0) s->schedules += span->rank == 0 ? 1 : -1000;
    if (span->rank == 0 && (strncmp(n, "attend", 6) == 0 || strcmp(n, "merge") == 0 || strcmp(n, "wait") == 0))
        s->attention += span->seconds;
}

/* As a graph that is launched: one span from the first event on. */
static void a_step_may_be_one_span(void) {
    site s = site_open();
    cpa_spans spans;
    cpa_span_totals totals;
    CU_ASSERT_EQUAL_FATAL(cpa_spans_create(&spans, s.device, NULL), CPA_OK);
    for (int step = 0; step < 2; step++) {
        int64_t span = cpa_spans_start_as(&spans, CPA_SPAN_GRAPH, s.stream);
        cpa_spans_end(&spans, span, s.stream);
        CU_ASSERT_EQUAL(spans.count, 1);
        CU_ASSERT_EQUAL(spans.n_events, 2);
        CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_spans_read(&spans, &totals, NULL), CPA_OK);
        CPA_ASSERT_ORDER(totals.seconds[CPA_SPAN_GRAPH], >=, 0);
        CU_ASSERT_EQUAL(totals.seconds[CPA_SPAN_MERGE], 0);
    }
    spans.disabled = 1;
    CU_ASSERT_EQUAL(cpa_spans_begin(&spans, CPA_SPAN_MERGE, 0, s.stream), -1);
    CU_ASSERT_EQUAL(spans.n_events, 0);
    cpa_spans_destroy(&spans);
    site_close(&s);
}

static void the_spans_of_a_run_add_up_to_its_statistics(void) {
    cpa_engine_options options = {.size = sizeof options,
                                  .model = {.layers = 2,
                                            .attention.q_heads = 4,
                                            .attention.kv_heads = 2,
                                            .attention.k_dim = 16,
                                            .attention.dtype = CPA_F32,
                                            .mask = {.causal = 1}},
                                  .num_blocks = 64,
                                  .max_num_batched_tokens = 64,
                                  .skip_self_test = 1,
                                  .verify = 0.01};
    enum { N_REQUESTS = 4 };
    cpa_request requests[N_REQUESTS];
    for (int64_t i = 0; i < N_REQUESTS; i++) {
        requests[i] = (cpa_request){
            .size = sizeof requests[i], .id = (uint64_t)i, .prompt_tokens = 40 + 50 * i, .output_tokens = 5};
    }
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int kept = 0; kept < 2; kept++) {
        cpa_engine_stats stats;
        seen s = {.good = 1};
        options.timeline_spans = kept ? 100000 : 0;
        cpa_engine *engine = cpa_test_engine(&options, requests, N_REQUESTS);
        CU_ASSERT_PTR_NOT_NULL(engine);
        if (!engine) return;
        CU_ASSERT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_engine_timeline(engine, see, &s), CPA_OK);
        cpa_engine_get_stats(engine, &stats, sizeof stats);
        if (rank != 0 || !kept) CU_ASSERT_EQUAL(s.spans, 0);
        CU_ASSERT_EQUAL(s.of_requests, rank == 0 && kept ? N_REQUESTS * 3 : 0); /* waiting, prefill, decode */
        if (rank == 0 && kept) {
            CU_ASSERT(s.good);
            CPA_ASSERT_ORDER(s.end, <=, stats.duration_s + 1e-3);
            CPA_ASSERT_ORDER(s.schedules, >=, stats.steps);
            CU_ASSERT_EQUAL(s.exchanges > 0, size > 1);
            for (int r = 0; r < size; r++)
                CPA_ASSERT_ORDER(s.of_rank[r], >=, (stats.steps - stats.graph_steps) * 2 * 3);
            /* The engine reports the rank with the most. */
            CU_ASSERT(s.attention > 0 && s.attention <= stats.actual_attend_s + 1e-9);
            if (size == 1) CU_ASSERT_DOUBLE_EQUAL(s.attention, stats.actual_attend_s, 1e-9);
        }
        cpa_engine_destroy(engine);
    }
}

enum { CROWD = 5 };

/* What the timeline says of each request, in its order. */
typedef struct request_row {
    char names[256]; /* with ';' between them */
    double begin_s, end_s;
    int good; /* each span begins where the one before ends */
} request_row;

typedef struct request_rows {
    request_row of[CROWD];
    cpa_request_result results[CROWD];
    int64_t spans, preempted;
    cpa_engine *engine;
} request_rows;

static void see_request(void *ctx, const cpa_span *span) {
    request_rows *rows = ctx;
    if (!span->of_request) return;
    request_row *row = &rows->of[span->request];
    rows->spans++;
    rows->preempted += strcmp(span->name, "preempted") == 0;
    if (row->names[0] && fabs(span->begin_s - row->end_s) > 1e-9) row->good = 0;
    if (!row->names[0]) row->begin_s = span->begin_s;
    row->end_s = span->begin_s + span->seconds;
    if (strcmp(span->row, "requests") != 0 || span->rank != 0 || span->layer != -1) row->good = 0;
    strcat(strcat(row->names, span->name), ";");
}

static void note_result(void *ctx, const cpa_request_result *result) {
    request_rows *rows = ctx;
    rows->results[result->id] = *result;
}

/* Cancels the last request, and stops the run in its middle. */
static void disturb(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    request_rows *rows = ctx;
    cpa_engine_stats stats;
    (void)tokens, (void)requests, (void)elapsed_s;
    cpa_engine_get_stats(rows->engine, &stats, sizeof stats);
    if (stats.steps == 8) CU_ASSERT_EQUAL(cpa_engine_cancel(rows->engine, CROWD - 1), CPA_OK);
    if (stats.steps == 12) cpa_engine_stop(rows->engine);
}

/* A cache that is too small for the requests together, so that some give way and compute their prompts again; one does
 * not run before it is cancelled. */
static cpa_engine_options crowded_options(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.num_blocks = 12;
    options.interleave = options.block_size;
    options.max_num_seqs = CROWD - 1;
    options.verify = 0;
    options.timeline_spans = 1000;
    options.no_prefix_caching = 1;
    return options;
}

static void crowd(request_rows *rows, const cpa_engine_options *options) {
    cpa_request requests[CROWD];
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (uint64_t i = 0; i < CROWD; i++) {
        requests[i] =
            (cpa_request){.size = sizeof requests[i], .id = i, .prompt_tokens = 33 * size, .output_tokens = 40 * size};
        rows->of[i].good = 1;
    }
    rows->engine = cpa_test_engine(options, requests, CROWD);
    CU_ASSERT_PTR_NOT_NULL_FATAL(rows->engine);
    CU_ASSERT_EQUAL(cpa_engine_run(rows->engine, note_result, disturb, rows), CPA_STOPPED);
    CU_ASSERT_EQUAL(cpa_engine_run(rows->engine, note_result, NULL, rows), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_timeline(rows->engine, see_request, rows), CPA_OK);
}

static void the_row_of_a_request_tells_its_life(void) {
    const cpa_engine_options options = crowded_options();
    request_rows rows = {.spans = 0};
    cpa_engine_stats stats;
    crowd(&rows, &options);
    cpa_engine_get_stats(rows.engine, &stats, sizeof stats);
    for (int i = 0; i < CROWD && cpa_test_rank() == 0; i++) {
        const request_row *row = &rows.of[i];
        CU_ASSERT(row->good);
        CU_ASSERT_DOUBLE_EQUAL(row->begin_s, rows.results[i].arrival_s, 1e-9);
        CU_ASSERT_DOUBLE_EQUAL(row->end_s, rows.results[i].finish_s, 1e-9);
        CU_ASSERT_EQUAL(strncmp(row->names, "waiting;", 8), 0);
        /* What each did when the run was stopped is told up to there. */
        if (i < CROWD - 1) CU_ASSERT_PTR_NOT_NULL(strstr(row->names, "waiting;prefill;decode;decode;"));
        if (strstr(row->names, "preempted")) CU_ASSERT_PTR_NOT_NULL(strstr(row->names, "preempted;prefill;decode;"));
    }
    if (cpa_test_rank() == 0) {
        CPA_ASSERT_ORDER(stats.preemptions, >, 0);
        CU_ASSERT(rows.preempted >= stats.preemptions && rows.preempted <= stats.preemptions + CROWD);
        CU_ASSERT_STRING_EQUAL(rows.of[CROWD - 1].names, "waiting;");
    }
    cpa_engine_destroy(rows.engine);
}

static void rows_of_requests_are_bounded(void) {
    cpa_engine_options options = crowded_options();
    options.timeline_spans = 5;
    request_rows rows = {.spans = 0};
    warnings = 0;
    cpa_log_set(count_warnings, NULL, CPA_LOG_WARN);
    crowd(&rows, &options);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(rows.spans, cpa_test_rank() == 0 ? 5 : 0);
    CU_ASSERT_EQUAL(warnings, cpa_test_rank() == 0 ? 2 : 1);
    cpa_engine_destroy(rows.engine);
}

static const cpa_test tests[] = {
    {"a step may be one span", a_step_may_be_one_span},
    {"a mark is the time at which it was set last", a_mark_is_the_time_at_which_it_was_set_last},
    {"only attention and waiting are measured without a timeline",
     only_attention_and_waiting_are_measured_without_a_timeline},
    {"a full timeline says so once", a_full_timeline_says_so_once},
    {"the spans of a run add up to its statistics", the_spans_of_a_run_add_up_to_its_statistics},
    {"the row of a request tells its life", the_row_of_a_request_tells_its_life},
    {"rows of requests are bounded", rows_of_requests_are_bounded},
};
CPA_MPI_TEST_MAIN("timeline", tests)
