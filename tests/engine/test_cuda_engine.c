/* The clock and the graphs of a CUDA device, alone and through the engine: what is captured and replayed has the bits
 * of what is launched operation by operation. Several ranks may share a device. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/graph.h"
#include "kernels/operators.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { ROWS = 4096, HEADS = 8, DIM = 64 };

/* A device with a stream, and work for it: keys of ROWS tokens. */
typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_events *events;
    cpa_synth_args work;
} site;

static void site_open(site *s) {
    uint32_t tokens[ROWS];
    int64_t positions[ROWS];
    cpa_error err = {CPA_OK, ""};
    void *out;
    for (int i = 0; i < ROWS; i++) tokens[i] = (uint32_t)i, positions[i] = i;
    cpa_test_device_open(1, &s->device, &s->stream);
    if (cpa_device_alloc(s->device, (int64_t)ROWS * HEADS * DIM * 2, &out, &err)) {
        printf("%s\n", err.message);
        abort();
    }
    s->work = (cpa_synth_args){.tensor = CPA_SYNTH_K,
                               .heads = HEADS,
                               .kv_heads = HEADS,
                               .dim = DIM,
                               .rows = ROWS,
                               .tokens = cpa_test_upload(s->stream, tokens, sizeof tokens),
                               .positions = cpa_test_upload(s->stream, positions, sizeof positions),
                               .dtype = CPA_BF16,
                               .out = out};
    CU_ASSERT_EQUAL(s->device->table->events_create(s->device, &s->events, NULL), CPA_OK);
}

static void site_close(site *s) {
    s->device->table->events_destroy(s->events);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->work.tokens);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->work.positions);
    cpa_test_free(s->stream, s->work.out);
    cpa_test_device_close(s->device, s->stream);
}

static void work_between_marks(site *s, int32_t first, int repeats) {
    CU_ASSERT_EQUAL(s->device->table->event_record(s->events, first, s->stream), CPA_OK);
    for (int i = 0; i < repeats; i++) CU_ASSERT_EQUAL(s->device->operators->synthesize(&s->work, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(s->device->table->event_record(s->events, first + 1, s->stream), CPA_OK);
}

static double seconds_between(const site *s, int32_t from, int32_t to) {
    double seconds = -1;
    CU_ASSERT_EQUAL(s->device->table->event_seconds(s->events, from, to, &seconds, NULL), CPA_OK);
    return seconds;
}

/* Another program may share the device: the shortest of a few counts. */
static double seconds_of_one(site *s) {
    double least = INFINITY;
    for (int i = 0; i < 5; i++) {
        work_between_marks(s, 0, 1);
        CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
        least = fmin(least, seconds_between(s, 0, 1));
    }
    return least;
}

static void marks_measure_the_work_between_them(void) {
    site s;
    site_open(&s);
    const double one = seconds_of_one(&s);
    double begin = cpa_clock_now();
    work_between_marks(&s, 0, 1);
    work_between_marks(&s, 2, 100);
    CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
    double elapsed = cpa_clock_now() - begin, first = seconds_between(&s, 0, 1), many = seconds_between(&s, 2, 3);
    CU_ASSERT(one > 0 && many > 10 * one && many < elapsed);
    CU_ASSERT(seconds_between(&s, 0, 3) >= first + many && seconds_between(&s, 0, 3) < elapsed);
    double unset;
    CU_ASSERT_NOT_EQUAL(s.device->table->event_seconds(s.events, 0, 9, &unset, NULL), CPA_OK);
    CU_ASSERT(s.device->table->event_reached(s.events, 3) && s.device->table->event_reached(s.events, 9));
    site_close(&s);
}

static void a_graph_sets_its_marks_at_each_launch(void) {
    site s;
    cpa_graph *graph = NULL;
    site_open(&s);
    work_between_marks(&s, 1, 1);
    CU_ASSERT_EQUAL(s.device->graphs->begin(s.stream), CPA_OK);
    work_between_marks(&s, 1, 50);
    CU_ASSERT_EQUAL(s.device->graphs->end(s.stream, &graph), CPA_OK);
    double before = 0;
    for (int launch = 0; graph && launch < 3; launch++) {
        CU_ASSERT_EQUAL(s.device->table->event_record(s.events, 0, s.stream), CPA_OK);
        /* What is in memory at the launch counts: more work before the graph moves its events. */
        for (int i = 0; i < launch * 200; i++)
            CU_ASSERT_EQUAL(s.device->operators->synthesize(&s.work, s.stream), CPA_OK);
        CU_ASSERT_EQUAL(s.device->graphs->launch(graph, s.stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
        double from_base = seconds_between(&s, 0, 1);
        CPA_ASSERT_ORDER(seconds_between(&s, 1, 2), >, 0);
        CU_ASSERT(launch == 0 || from_base > before);
        before = from_base;
    }
    CU_ASSERT_PTR_NOT_NULL(graph);
    s.device->graphs->destroy(graph);
    site_close(&s);
}

static void a_capture_that_failed_leaves_the_stream_in_order(void) {
    site s;
    site_open(&s);
    CU_ASSERT_EQUAL(s.device->graphs->begin(s.stream), CPA_OK);
    CU_ASSERT_EQUAL(s.device->operators->synthesize(&s.work, s.stream), CPA_OK);
    CU_ASSERT_EQUAL(s.device->graphs->end(s.stream, NULL), CPA_OK);
    work_between_marks(&s, 0, 1);
    CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
    CPA_ASSERT_ORDER(seconds_between(&s, 0, 1), >, 0);
    site_close(&s);
}

/* ---- the engine ---- */

enum { REQUESTS = 12 };

static cpa_engine_options engine_options(cpa_dtype dtype) {
    return (cpa_engine_options){.size = sizeof(cpa_engine_options),
                                .device = cpa_test_device_options(0),
                                .model = {.layers = 3,
                                          .attention.q_heads = 8,
                                          .attention.kv_heads = 2,
                                          .attention.k_dim = 64,
                                          .attention.v_dim = 64,
                                          .attention.dtype = dtype,
                                          .attention.kv_dtype = dtype,
                                          .mask = {.causal = 1}},
                                .num_blocks = 1024,
                                .max_num_batched_tokens = 256,
                                .max_num_seqs = 16,
                                .staging_bytes = 8 << 20,
                                .skip_self_test = 1,
                                .seed = 3};
}

/* Short and long contexts that decode for a while, and end one after another. */
static cpa_request request(int64_t i) {
    return (cpa_request){
        .size = sizeof(cpa_request), .id = (uint64_t)i, .prompt_tokens = 1 + 83 * i % 700, .output_tokens = 20 + 9 * i};
}

static cpa_engine_stats run(const cpa_engine_options *options) {
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    for (int i = 0; i < REQUESTS; i++) requests[i] = request(i);
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    return stats;
}

static int64_t rows_of_run(void) {
    int64_t rows = 0;
    for (int64_t i = 0; i < REQUESTS; i++) rows += request(i).prompt_tokens + request(i).output_tokens - 1;
    return rows;
}

static void compare_with_eager(cpa_dtype dtype, double verify, int64_t local_context) {
    cpa_engine_options options = engine_options(dtype);
    options.verify = verify;
    options.local_context = local_context;
    options.algorithm = CPA_PASS_Q; /* what the planner measures may differ between the runs */
    cpa_engine_stats graphs = run(&options);
    options.enforce_eager = 1;
    cpa_engine_stats eager = run(&options);
    CU_ASSERT_EQUAL(graphs.output_digest, eager.output_digest);
    CU_ASSERT_EQUAL(graphs.steps, eager.steps);
    CU_ASSERT_EQUAL(graphs.chunks_pass_q, eager.chunks_pass_q);
    CU_ASSERT_EQUAL(graphs.chunks_pass_kv, eager.chunks_pass_kv);
    CU_ASSERT_EQUAL(eager.graph_steps, 0);
    /* Most of the steps decode alone; a quarter of those are the first ones of their shape or have checked rows. */
    CPA_ASSERT_ORDER(graphs.graph_steps, >, graphs.steps / 3);
    CU_ASSERT(graphs.actual_attend_s > 0 && graphs.actual_attend_s < graphs.duration_s);
    CU_ASSERT(graphs.graph_s > 0 && graphs.graph_s < graphs.duration_s);
    CU_ASSERT_EQUAL(eager.graph_s, 0);
    CPA_ASSERT_ORDER(graphs.imbalance, >=, 1);
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CU_ASSERT_EQUAL(graphs.rank_local > 0, size > 1 && local_context > 0);
    CU_ASSERT_EQUAL((graphs.exposed_comm_s > 0), (size > 1));
    CU_ASSERT((graphs.bytes_sent >= eager.bytes_sent) && (graphs.bytes_sent > 0) == (size > 1));
}

static void replayed_steps_have_the_bits_of_eager_ones(void) {
    compare_with_eager(CPA_BF16, 0, 0);
    compare_with_eager(CPA_F32, 0, 0);
    compare_with_eager(CPA_BF16, 0, 400); /* some sequences are whole */
}

static void checked_steps_run_between_replayed_ones(void) {
    compare_with_eager(CPA_F16, 0.0002, 0);
}

/* Of the last layer, which here is the only one. */
static void check_replayed_rows(int32_t q_heads, int32_t kv_heads, int32_t dim) {
    cpa_engine_options options = engine_options(CPA_BF16);
    options.model.layers = 1;
    options.model.attention.q_heads = q_heads;
    options.model.attention.kv_heads = kv_heads;
    options.model.attention.k_dim = options.model.attention.v_dim = dim;
    options.verify = 1;
    options.algorithm = CPA_PASS_Q;
    cpa_engine_stats stats = run(&options);
    CPA_ASSERT_ORDER(stats.graph_steps, >, stats.steps / 3);
    CU_ASSERT_EQUAL(stats.verify_rows, options.model.attention.q_heads * rows_of_run());
    CU_ASSERT_EQUAL(stats.verify_violations, 0);
}

/* A group that a CTA of decode holds, and those that it does not. */
static void rows_of_replayed_steps_are_checked(void) {
    check_replayed_rows(8, 2, 64);
    check_replayed_rows(128, 1, 128);
    check_replayed_rows(34, 2, 64);
}

/* Counts the spans of a run, and adds up those of attention and of replayed steps. */
typedef struct sums {
    double attend_s, replayed_s;
    int64_t spans, attends, replayed;
} sums;

static void add_span(void *ctx, const cpa_span *span) {
    sums *s = ctx;
    s->spans++;
    CU_ASSERT(span->begin_s >= 0 && span->seconds >= 0);
    if (strcmp(span->name, "replayed step") == 0) {
        s->replayed_s += span->seconds;
        s->replayed++;
        CU_ASSERT_EQUAL(span->layer, -1);
    }
    if (strncmp(span->name, "attend", 6) != 0) return;
    s->attend_s += span->seconds;
    s->attends++;
    CU_ASSERT(span->layer >= 0 && span->layer < 3);
}

static void spans_of_replayed_steps_are_on_the_timeline(void) {
    cpa_engine_options options = engine_options(CPA_BF16);
    options.timeline_spans = 1 << 20;
    cpa_request request = {.size = sizeof request, .prompt_tokens = 300, .output_tokens = 40};
    cpa_engine *engine = cpa_test_engine(&options, &request, 1);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine) return;
    CU_ASSERT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_OK);
    sums s = {0};
    CU_ASSERT_EQUAL(cpa_engine_timeline(engine, add_span, &s), CPA_OK);
    cpa_engine_stats stats;
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    CPA_ASSERT_ORDER(stats.graph_steps, >=, 30);
    if (rank == 0) CU_ASSERT_EQUAL(s.replayed, stats.graph_steps * size);
    if (rank == 0) CPA_ASSERT_ORDER(s.replayed_s, >=, stats.graph_s - 1e-9);
    if (rank == 0) CPA_ASSERT_ORDER(s.attends, >=, (stats.steps - stats.graph_steps) * 3);
    if (rank == 0) CPA_ASSERT_ORDER(s.attend_s, >, 0);
    if (rank == 0 && size == 1) CU_ASSERT_DOUBLE_EQUAL(s.attend_s, stats.actual_attend_s, 1e-9);
    cpa_engine_destroy(engine);
}

static const cpa_test tests[] = {
    {"events measure the work between them", marks_measure_the_work_between_them},
    {"a graph sets its events at each launch", a_graph_sets_its_marks_at_each_launch},
    {"a capture that failed leaves the stream in order", a_capture_that_failed_leaves_the_stream_in_order},
    {"replayed steps have the bits of eager ones", replayed_steps_have_the_bits_of_eager_ones},
    {"checked steps run between replayed ones", checked_steps_run_between_replayed_ones},
    {"rows of replayed steps are checked", rows_of_replayed_steps_are_checked},
    {"spans of replayed steps are on the timeline", spans_of_replayed_steps_are_on_the_timeline},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_cuda_missing() ? 1 : cpa_test_transport_missing(), "cuda engine", tests,
                         (int)(sizeof tests / sizeof tests[0]))
