/* An engine as a serving stack uses it: run after run, requests that come in between, prompts that hold what was
 * answered before. */
#include <string.h>

#include "comm/limits.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { REQUESTS = 5 };

static cpa_engine_options options_of_all_rows(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.verify = 1;
    return options;
}

/* Rank 0 submits, all ranks run. */
static cpa_status submit_and_run(cpa_engine *engine, const cpa_request *request, cpa_progress_fn on_progress) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (request && rank == 0) CU_ASSERT_EQUAL(cpa_engine_submit(engine, request), CPA_OK);
    cpa_status status = cpa_engine_run(engine, NULL, on_progress, engine);
    if (status != CPA_OK && rank == 0) printf("%s\n", cpa_engine_error(engine));
    return status;
}

static void statistics_are_totals_of_all_runs(void) {
    const cpa_engine_options options = options_of_all_rows();
    cpa_request requests[REQUESTS],
        another = {.size = sizeof another, .id = 100, .prompt_tokens = 70, .output_tokens = 9};
    cpa_engine_stats first, second;
    cpa_test_mixed_requests(requests, REQUESTS);
    cpa_engine *engine = cpa_test_engine(&options, requests, REQUESTS);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine) return;
    CU_ASSERT_EQUAL(submit_and_run(engine, NULL, NULL), CPA_OK);
    cpa_engine_get_stats(engine, &first, sizeof first);
    CU_ASSERT_EQUAL(submit_and_run(engine, &another, NULL), CPA_OK);
    cpa_engine_get_stats(engine, &second, sizeof second);
    CU_ASSERT_EQUAL(first.requests_finished, REQUESTS);
    CU_ASSERT_EQUAL(second.requests_finished, REQUESTS + 1);
    CU_ASSERT_EQUAL(second.output_tokens, first.output_tokens + 9);
    CU_ASSERT_EQUAL(second.steps, first.steps + 9);
    CU_ASSERT(second.duration_s > first.duration_s && second.verify_rows > first.verify_rows);
    CU_ASSERT_EQUAL(second.verify_violations, 0);
    cpa_engine_destroy(engine);
}

/* What test_links finds, and rates, the same on every rank. */
static void links_say_what_joins_the_ranks_and_how_fast(void) {
    static cpa_link links[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS], of_first[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS];
    const cpa_engine_options options = options_of_all_rows();
    cpa_engine *engine = cpa_test_engine(&options, NULL, 0);
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine) return;
    CU_ASSERT_EQUAL(cpa_engine_links(NULL, links), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_links(engine, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_links(engine, links), CPA_OK);
    int measured = 0;
    for (int a = 0; a < size; a++) {
        for (int b = 0; b < size; b++) {
            const cpa_link *link = &links[a * size + b];
            CU_ASSERT_EQUAL(memcmp(link, &links[b * size + a], sizeof *link), 0);
            CU_ASSERT_EQUAL(link->kind != CPA_LINK_UNKNOWN, a != b);
            measured += link->bandwidth > 0;
        }
        CU_ASSERT_EQUAL(links[a * size + a].bandwidth, 0);
    }
    CU_ASSERT_EQUAL(measured > 0, size > 1); /* all pairs, unless they are slow */
    memcpy(of_first, links, sizeof links);
    MPI_Bcast(of_first, sizeof of_first, MPI_BYTE, 0, MPI_COMM_WORLD);
    CU_ASSERT_EQUAL(memcmp(links, of_first, sizeof links), 0);
    if (options.device.backend == CPA_BACKEND_HOST) CU_ASSERT_STRING_EQUAL(cpa_engine_transport(engine), "mpi");
    if (options.device.backend == CPA_BACKEND_CUDA)
        CU_ASSERT(strcmp(cpa_engine_transport(engine), "nccl") == 0 ||
                  strcmp(cpa_engine_transport(engine), "peer") == 0);
    cpa_engine_destroy(engine);
}

static void stop_after_some_tokens(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    (void)requests, (void)elapsed_s;
    if (tokens > 150) cpa_engine_stop(ctx);
}

static void a_stopped_engine_goes_on(void) {
    const cpa_engine_options options = options_of_all_rows();
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    cpa_test_mixed_requests(requests, REQUESTS);
    cpa_engine *engine = cpa_test_engine(&options, requests, REQUESTS);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine) return;
    CU_ASSERT_EQUAL(submit_and_run(engine, NULL, stop_after_some_tokens), CPA_STOPPED);
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    CU_ASSERT(stats.steps > 0 && stats.requests_finished < REQUESTS);
    CU_ASSERT_EQUAL(submit_and_run(engine, NULL, NULL), CPA_OK);
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.requests_finished, REQUESTS);
    CU_ASSERT_EQUAL(stats.verify_violations, 0);
    cpa_engine_destroy(engine);
}

typedef struct ranks_seen {
    cpa_engine *engine;
    int32_t ranks;
    int64_t told;                                                      /* how often they were */
    cpa_rank_stats stats[CPA_COMM_MAX_RANKS];                          /* as last told */
    int64_t bytes[CPA_COMM_MAX_RANKS][CPA_COMM_MAX_RANKS], bytes_sent; /* by sender and receiver; and in all */
} ranks_seen;

/* What is told of a rank now follows what was told of it before. */
static void look_at_rank(ranks_seen *seen, int32_t rank) {
    cpa_rank_stats *before = &seen->stats[rank], now;
    CU_ASSERT_EQUAL(cpa_engine_get_rank_stats(seen->engine, rank, &now, sizeof now, seen->bytes[rank]), CPA_OK);
    CPA_ASSERT_ORDER(now.attend_s, >=, before->attend_s);
    CPA_ASSERT_ORDER(now.exposed_comm_s, >=, before->exposed_comm_s);
    CPA_ASSERT_ORDER(now.graph_s, >=, before->graph_s);
    CPA_ASSERT_ORDER(now.step_end_s, >=, now.step_begin_s);
    if (now.steps > before->steps) CPA_ASSERT_ORDER(now.step_begin_s, >=, before->step_end_s);
    *before = now;
}

/* Sums the bytes of all pairs, none of them of a rank with itself. */
static void expect_bytes_of_pairs(const ranks_seen *seen) {
    int64_t sum = 0;
    for (int32_t from = 0; from < seen->ranks; from++) {
        CU_ASSERT_EQUAL(seen->bytes[from][from], 0);
        for (int32_t to = 0; to < seen->ranks; to++) sum += seen->bytes[from][to];
    }
    CPA_ASSERT_ORDER(sum, ==, seen->bytes_sent);
}

static void look_at_ranks(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    ranks_seen *seen = ctx;
    cpa_engine_stats stats;
    (void)tokens, (void)requests;
    cpa_engine_get_stats(seen->engine, &stats, sizeof stats);
    seen->bytes_sent = stats.bytes_sent;
    for (int32_t rank = 0; rank < seen->ranks; rank++) look_at_rank(seen, rank);
    expect_bytes_of_pairs(seen);
    CPA_ASSERT_ORDER(seen->stats[0].steps, ==, stats.steps);
    CPA_ASSERT_ORDER(seen->stats[0].step_end_s, <=, elapsed_s);
    for (int32_t rank = 1; rank < seen->ranks; rank++) CPA_ASSERT_ORDER(seen->stats[rank].steps, >=, stats.steps - 1);
    seen->told++;
}

static void each_rank_is_told_of_after_every_step(void) {
    const cpa_engine_options options = options_of_all_rows();
    static int64_t between[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS];
    static ranks_seen seen;
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    cpa_test_mixed_requests(requests, REQUESTS);
    seen = (ranks_seen){.engine = cpa_test_engine(&options, requests, REQUESTS), .ranks = ranks};
    CU_ASSERT_PTR_NOT_NULL(seen.engine);
    if (!seen.engine) return;
    CU_ASSERT_EQUAL(cpa_engine_run(seen.engine, NULL, look_at_ranks, &seen), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_bytes_between(seen.engine, between), CPA_OK);
    cpa_engine_get_stats(seen.engine, &stats, sizeof stats);
    for (int32_t of = 0; of < ranks && rank == 0; of++) {
        look_at_rank(&seen, of);
        CPA_ASSERT_ORDER(seen.stats[of].steps, ==, stats.steps);
        CPA_ASSERT_ORDER(seen.stats[of].attend_s + seen.stats[of].graph_s, >, 0);
        CU_ASSERT(memcmp(seen.bytes[of], between + of * ranks, (size_t)ranks * sizeof between[0]) == 0);
    }
    if (rank == 0) CPA_ASSERT_ORDER(seen.told, >=, stats.steps);
    cpa_rank_stats none;
    CU_ASSERT_EQUAL(cpa_engine_get_rank_stats(seen.engine, rank == 0 ? ranks : 0, &none, sizeof none, NULL),
                    CPA_INVALID);
    cpa_engine_destroy(seen.engine);
}

/* All requests are the beginning of one text. */
static uint32_t token_of_the_text(void *ctx, uint64_t request, int64_t position) {
    (void)ctx, (void)request;
    return (uint32_t)position * 2654435761u;
}

/* The first prompt ends within a block, so that where its blocks lie follows from fewer tokens than a block has; what
 * is answered fills them. The next prompt holds both. */
static void an_answer_becomes_part_of_the_next_prompt(void) {
    cpa_engine_options options = options_of_all_rows();
    options.token_at = token_of_the_text;
    for (int64_t prompt = 1; prompt < 16; prompt += 3) {
        const cpa_request turn = {.size = sizeof turn, .id = 1, .prompt_tokens = prompt, .output_tokens = 50 - prompt};
        const cpa_request next = {.size = sizeof next, .id = 2, .prompt_tokens = 60, .output_tokens = 4};
        const cpa_request last = {.size = sizeof last, .id = 3, .prompt_tokens = 70, .output_tokens = 4};
        cpa_engine_stats stats;
        cpa_engine *engine = cpa_test_engine(&options, &turn, 1);
        CU_ASSERT_PTR_NOT_NULL(engine);
        if (!engine) return;
        CU_ASSERT_EQUAL(submit_and_run(engine, NULL, NULL), CPA_OK);
        CU_ASSERT_EQUAL(submit_and_run(engine, &next, NULL), CPA_OK);
        CU_ASSERT_EQUAL(submit_and_run(engine, &last, NULL), CPA_OK);
        cpa_engine_get_stats(engine, &stats, sizeof stats);
        CPA_ASSERT_ORDER(stats.prefix_hits, >=, 3); /* at least what the second one computed */
        CU_ASSERT_EQUAL(stats.verify_violations, 0);
        cpa_engine_destroy(engine);
    }
}

typedef struct clocked {
    cpa_engine *engine;
    int finished;
} clocked;

static void stop_early(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    (void)requests, (void)elapsed_s;
    if (tokens > 30) cpa_engine_stop(((clocked *)ctx)->engine);
}

static void expect_ordered_times(void *ctx, const cpa_request_result *result) {
    CPA_ASSERT_ORDER(result->first_token_s, >=, result->arrival_s);
    for (int64_t i = 1; i < result->output_tokens; i++)
        CPA_ASSERT_ORDER(result->token_s[i], >=, result->token_s[i - 1]);
    ((clocked *)ctx)->finished++;
}

static void the_clock_goes_on_from_run_to_run(void) {
    const cpa_engine_options options = options_of_all_rows();
    const cpa_request first = {.size = sizeof first, .id = 1, .prompt_tokens = 20, .output_tokens = 40};
    const cpa_request second = {
        .size = sizeof second, .id = 2, .prompt_tokens = 20, .output_tokens = 5, .arrival_s = 0.05};
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    clocked c = {.engine = cpa_test_engine(&options, &first, 1)};
    CU_ASSERT_PTR_NOT_NULL(c.engine);
    if (!c.engine) return;
    CU_ASSERT_EQUAL(cpa_engine_run(c.engine, expect_ordered_times, stop_early, &c), CPA_STOPPED);
    if (rank == 0) CU_ASSERT_EQUAL(cpa_engine_submit(c.engine, &second), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(c.engine, expect_ordered_times, NULL, &c), CPA_OK);
    if (rank == 0) CU_ASSERT_EQUAL(c.finished, 2);
    cpa_engine_destroy(c.engine);
}

static cpa_status give_nothing(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                               cpa_stream *stream) {
    (void)ctx, (void)step, (void)args, (void)stream;
    return layer == 1 ? CPA_IO : CPA_OK;
}

/* Each rank by itself: those of one engine could wait for one another from then on. */
static void a_model_that_fails_is_named(void) {
    const cpa_model network = {.size = sizeof network, .layer_in = give_nothing};
    const cpa_request request = {.size = sizeof request, .prompt_tokens = 20, .output_tokens = 1};
    cpa_engine_options options = cpa_test_engine_options();
    cpa_comm *self = NULL;
    cpa_engine *engine = NULL;
    options.network = &network;
    options.verify = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_comm_alone(&self, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_engine_create(self, &options, &engine, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_submit(engine, &request), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(engine), "layer 1: the model's layer_in returned"));
    cpa_engine_destroy(engine);
    cpa_comm_destroy(self);
}

/* Whatever a callback may not do with the engine that runs it. */
static void misuse(void *ctx, const cpa_request_result *result) {
    cpa_engine *engine = ctx;
    CU_ASSERT_EQUAL(result->id, 1);
    CU_ASSERT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_serve(engine, NULL, NULL, NULL), CPA_INVALID);
    cpa_engine_destroy(engine);
}

static void runs_from_a_callback_are_refused(void) {
    const cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 20, .output_tokens = 1};
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine *engine = NULL;
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    CU_ASSERT_EQUAL_FATAL(cpa_engine_create(cpa_test_comm(), &options, &engine, NULL), CPA_OK);
    if (rank == 0) CU_ASSERT_EQUAL(cpa_engine_submit(engine, &request), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(engine, misuse, NULL, engine), CPA_OK);
    cpa_engine_destroy(engine);
}

/* The last rank's options are others. */
static void expect_refused(const cpa_engine_options *same, const cpa_engine_options *other, const char *expected) {
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size == 1) return;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), rank == size - 1 ? other : same, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
    cpa_engine_destroy(engine);
}

static void options_that_differ_are_refused_on_all_ranks(void) {
    const cpa_model network = {.size = sizeof network, .layer_in = give_nothing, .capturable = 1};
    const cpa_model sliced = {.size = sizeof sliced, .layer_in = give_nothing, .capturable = 1, .slices = 1};
    const cpa_engine_options same = cpa_test_engine_options();
    cpa_mask masks[2][64] = {{{.causal = 1}}};
    cpa_engine_options o = same, masked = same;
    CU_ASSERT_FATAL(same.model.layers <= 64);
    for (int32_t i = 0; i < same.model.layers; i++) masks[0][i] = masks[1][i] = same.model.mask;
    masks[1][same.model.layers - 1].window = 17;
    o = same, o.max_num_seqs = 7, expect_refused(&same, &o, "max_num_seqs: found 7 on rank");
    o = same, o.fail_on_nonfinite = 1, expect_refused(&same, &o, "fail_on_nonfinite: found 1 on rank");
    o = same, o.preemption = CPA_PREEMPT_AUTO, expect_refused(&same, &o, "preemption: found 2 on rank");
    o = same, o.network = &network, expect_refused(&same, &o, "network: found 1 on rank");
    cpa_engine_options whole = o;
    o.network = &sliced, expect_refused(&whole, &o, "network.slices: found 1 on rank");
    o = masked, masked.model.layer_masks = masks[0], o.model.layer_masks = masks[1];
    expect_refused(&masked, &o, "layer_masks");
}

static void refuse_network(cpa_model network, const char *expected) {
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    options.network = &network;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
    cpa_engine_destroy(engine);
}

static void a_model_that_cannot_be_called_is_refused(void) {
    const cpa_model right = {.size = sizeof right, .layer_in = give_nothing};
    cpa_model wrong = right;
    wrong.layer_in = NULL, refuse_network(wrong, "layer_in is NULL");
    wrong = right, wrong.n_end_ids = 1, refuse_network(wrong, "network: 1 end_ids");
    wrong = right, wrong.n_end_ids = -1, refuse_network(wrong, "network: -1 end_ids");
    wrong = right, wrong.slices = (cpa_model_slices)3, refuse_network(wrong, "slices 3 is none");
}

static const cpa_test tests[] = {
    {"links say what joins the ranks and how fast", links_say_what_joins_the_ranks_and_how_fast},
    {"runs from a callback are refused", runs_from_a_callback_are_refused},
    {"options that differ are refused on all ranks", options_that_differ_are_refused_on_all_ranks},
    {"a model that cannot be called is refused", a_model_that_cannot_be_called_is_refused},
    {"statistics are totals of all runs", statistics_are_totals_of_all_runs},
    {"each rank is told of after every step", each_rank_is_told_of_after_every_step},
    {"a stopped engine goes on", a_stopped_engine_goes_on},
    {"the clock goes on from run to run", the_clock_goes_on_from_run_to_run},
    {"a model that fails is named", a_model_that_fails_is_named},
    {"an answer becomes part of the next prompt", an_answer_becomes_part_of_the_next_prompt},
};
CPA_MPI_DEVICE_TEST_MAIN("runs of an engine", tests)
