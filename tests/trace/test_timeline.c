/* Marks on the host, the spans of a step, and the timeline of a run. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "src/trace/spans.h"
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
        CU_ASSERT(totals.seconds[CPA_SPAN_WAIT] >= 1e-3);
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
    CU_ASSERT(wait->begin_s + wait->seconds <= exchange->begin_s + exchange->seconds);
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
    int64_t spans, of_rank[8], exchanges, schedules;
    double attention; /* attend, merge and wait, of rank 0 */
    double end;       /* of the last, rank 0 */
    int good;
} seen;

static void see(void *ctx, const cpa_span *span) {
    seen *s = ctx;
    const char *n = span->name;
    s->spans++;
    s->of_rank[span->rank]++;
    if (!(span->begin_s >= 0 && span->seconds >= 0 && span->step >= 0)) s->good = 0;
    const int of_no_layer =
        strcmp(n, "replayed step") == 0 || strcmp(n, "begin step") == 0 || strcmp(n, "end step") == 0;
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
        CU_ASSERT(totals.seconds[CPA_SPAN_GRAPH] >= 0);
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
        if (rank == 0 && kept) {
            CU_ASSERT(s.good);
            CU_ASSERT(s.end <= stats.duration_s + 1e-3);
            CU_ASSERT(s.schedules >= stats.steps);
            CU_ASSERT_EQUAL(s.exchanges > 0, size > 1);
            for (int r = 0; r < size; r++) CU_ASSERT(s.of_rank[r] >= (stats.steps - stats.graph_steps) * 2 * 3);
            /* The engine reports the rank with the most. */
            CU_ASSERT(s.attention > 0 && s.attention <= stats.actual_attend_s + 1e-9);
            if (size == 1) CU_ASSERT_DOUBLE_EQUAL(s.attention, stats.actual_attend_s, 1e-9);
        }
        cpa_engine_destroy(engine);
    }
}

static const cpa_test tests[] = {
    {"a step may be one span", a_step_may_be_one_span},
    {"a mark is the time at which it was set last", a_mark_is_the_time_at_which_it_was_set_last},
    {"only attention and waiting are measured without a timeline",
     only_attention_and_waiting_are_measured_without_a_timeline},
    {"a full timeline says so once", a_full_timeline_says_so_once},
    {"the spans of a run add up to its statistics", the_spans_of_a_run_add_up_to_its_statistics},
};
CPA_MPI_TEST_MAIN("timeline", tests)
