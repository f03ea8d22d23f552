/* The engine end to end on the ranks of mpirun: requests finish, results are checked, and on the host their bits depend
 * neither on the algorithm nor on how steps are cut. */
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { REQUESTS = 9 };

typedef struct finished {
    int64_t requests, tokens;
    int ordered;
} finished;

static void on_finish(void *ctx, const cpa_request_result *result) {
    finished *f = ctx;
    f->requests++;
    f->tokens += result->output_tokens;
    for (int64_t i = 0; i < result->output_tokens; i++) {
        double before = i > 0 ? result->token_s[i - 1] : result->arrival_s;
        if (!(result->token_s[i] >= before)) f->ordered = 0;
    }
}

static void mixed(cpa_request *requests) {
    cpa_test_mixed_requests(requests, REQUESTS);
}

/* Short prompts that decode for long. */
static void decode_heavy(cpa_request *requests) {
    for (int i = 0; i < REQUESTS; i++) {
        requests[i] = (cpa_request){
            .size = sizeof requests[i], .id = (uint64_t)i, .prompt_tokens = 3 + i, .output_tokens = 60 - i};
    }
}

/* Runs the same requests with the given options; the statistics of the run. */
static cpa_engine_stats run(const cpa_engine_options *options, void (*make)(cpa_request *), double arrival_step) {
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    finished f = {.ordered = 1};
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    make(requests);
    for (int i = 0; i < REQUESTS; i++) requests[i].arrival_s = i * arrival_step;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, on_finish, &f, &stats));
    if (rank == 0) {
        CU_ASSERT_EQUAL(f.requests, REQUESTS);
        CU_ASSERT_EQUAL(f.tokens, stats.output_tokens);
        CU_ASSERT(f.ordered);
    }
    return stats;
}

static void every_request_finishes_and_is_checked(void) {
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine_stats stats = run(&options, mixed, 0);
    CPA_ASSERT_ORDER(stats.verify_rows, >, 500);
    CPA_ASSERT_ORDER(stats.verify_max_error, <, 1e-4);
    CPA_ASSERT_ORDER(stats.staging_bytes, <=, options.staging_bytes);
}

/* On a back end that promises no bits, run() has held the results of both to the tolerance. */
static void expect_same_results(const cpa_engine_stats *stats, uint64_t digest) {
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(stats->output_digest, digest);
    CPA_ASSERT_ORDER(stats->verify_rows, >, 500);
}

static void results_do_not_depend_on_algorithm_or_step_size(void) {
    cpa_engine_options options = cpa_test_engine_options();
    uint64_t digest = run(&options, mixed, 0).output_digest;
    options.algorithm = CPA_PASS_KV;
    cpa_engine_stats stats = run(&options, mixed, 0);
    expect_same_results(&stats, digest);
    options.algorithm = CPA_PASS_Q;
    options.max_num_batched_tokens = 33;
    stats = run(&options, mixed, 0);
    expect_same_results(&stats, digest);
    options.max_num_seqs = 1;
    stats = run(&options, mixed, 0);
    expect_same_results(&stats, digest);
    options.seed = 8;
    CU_ASSERT_NOT_EQUAL(run(&options, mixed, 0).output_digest, digest);
}

static void preemption_loses_nothing_and_changes_no_result(void) {
    cpa_engine_options options = cpa_test_engine_options();
    uint64_t digest = run(&options, decode_heavy, 0).output_digest;
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    options.num_blocks = 8 / size + 2; /* two or three of the nine sequences at their full length */
    cpa_engine_stats stats = run(&options, decode_heavy, 0);
    CPA_ASSERT_ORDER(stats.preemptions, >, 0);
    expect_same_results(&stats, digest);
    CPA_ASSERT_ORDER(stats.kv_peak, <=, options.num_blocks);
}

/* Of sequences that one rank keeps whole nothing is sent, and on the host they have the bits of a run on one rank. */
static void whole_sequences_exchange_nothing_and_give_what_one_rank_gives(void) {
    cpa_engine_options options = cpa_test_engine_options();
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    options.local_context = 80; /* of decode_heavy all, of mixed some */
    cpa_engine_stats stats = run(&options, decode_heavy, 0);
    CU_ASSERT_EQUAL(stats.bytes_sent, 0);
    CPA_ASSERT_ORDER(stats.verify_rows, >, 500);
    uint64_t whole = stats.output_digest;
    options.algorithm = CPA_PASS_Q;
    options.max_num_batched_tokens = 33;
    stats = run(&options, decode_heavy, 0);
    CU_ASSERT_EQUAL(stats.bytes_sent, 0);
    expect_same_results(&stats, whole);
    uint64_t some = run(&options, mixed, 0).output_digest;
    options = cpa_test_engine_options();
    options.local_context = 80;
    stats = run(&options, mixed, 0);
    expect_same_results(&stats, some);
    CU_ASSERT_EQUAL(stats.bytes_sent > 0, size > 1);
    if (!cpa_test_promises_bits()) return;
    cpa_comm *self = NULL;
    cpa_engine *alone = NULL;
    options.verify = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_comm_alone(&self, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_engine_create(self, &options, &alone, NULL), CPA_OK);
    cpa_request requests[REQUESTS];
    decode_heavy(requests);
    for (int i = 0; i < REQUESTS; i++) CU_ASSERT_EQUAL(cpa_engine_submit(alone, &requests[i]), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(alone, NULL, NULL, NULL), CPA_OK);
    cpa_engine_get_stats(alone, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.output_digest, whole);
    cpa_engine_destroy(alone);
    cpa_comm_destroy(self);
}

static void requests_wait_for_their_arrival(void) {
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine_stats stats = run(&options, mixed, 0.02);
    CPA_ASSERT_ORDER(stats.duration_s, >=, 0.02 * (REQUESTS - 1));
}

/* When a rank had received the plan of a step and was prepared for it; when its last layer was done, and known to
 * be. */
enum { MOST_STEPS = 64, MOST_RANKS = 8 };
typedef struct step_times {
    double received[MOST_RANKS][MOST_STEPS], prepared[MOST_RANKS][MOST_STEPS];
    double computed[MOST_RANKS][MOST_STEPS], drained[MOST_RANKS][MOST_STEPS];
} step_times;

static void note_times(void *ctx, const cpa_span *span) {
    step_times *times = ctx;
    const double end = span->begin_s + span->seconds;
    if (span->step >= MOST_STEPS || span->rank >= MOST_RANKS) return;
    if (strcmp(span->name, "receive plan") == 0) times->received[span->rank][span->step] = end;
    if (strcmp(span->name, "plan") == 0) times->prepared[span->rank][span->step] = end;
    if (strcmp(span->name, "drain") == 0) times->drained[span->rank][span->step] = end;
    double *computed = &times->computed[span->rank][span->step];
    if (strcmp(span->row, "compute") == 0 && end > *computed) *computed = end;
}

/* The steps take long enough to plan and send one in the meantime: some milliseconds. */
static cpa_engine_options long_steps(void) {
    cpa_engine_options options = cpa_test_engine_options();
    int on_host = cpa_test_promises_bits();
    options.model = (cpa_model_shape){.layers = on_host ? 2 : 4,
                                      .attention.q_heads = on_host ? 8 : 32,
                                      .attention.kv_heads = 2,
                                      .attention.k_dim = on_host ? 64 : 128,
                                      .attention.v_dim = on_host ? 64 : 128,
                                      .attention.dtype = on_host ? CPA_F32 : CPA_BF16,
                                      .mask = {.causal = 1}};
    options.model.attention.kv_dtype = options.model.attention.dtype;
    options.max_num_batched_tokens = on_host ? 128 : 2048;
    options.num_blocks = on_host ? 512 : 4096;
    options.staging_bytes = 0;
    options.verify = 0;
    options.timeline_spans = 1 << 20;
    return options;
}

static void the_next_step_is_received_and_prepared_while_one_runs(void) {
    cpa_engine_options options = long_steps();
    cpa_request request = {
        .size = sizeof request, .id = 1, .prompt_tokens = 30 * options.max_num_batched_tokens, .output_tokens = 1};
    cpa_engine *engine = cpa_test_engine(&options, &request, 1);
    cpa_engine_stats stats;
    step_times *times = calloc(1, sizeof *times);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine || !times) return;
    CU_ASSERT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_timeline(engine, note_times, times), CPA_OK);
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.steps, 30);
    for (int r = 0; rank == 0 && r < size; r++) {
        int received = 0, prepared = 0;
        for (int64_t step = 1; step < stats.steps; step++) {
            CU_ASSERT(times->received[r][step] > 0 && times->prepared[r][step] > times->received[r][step]);
            received += times->received[r][step] < times->computed[r][step - 1];
            prepared += times->prepared[r][step] < times->drained[r][step - 1];
        }
        CU_ASSERT(received >= 20 && prepared >= 20);
        if (received < 20 || prepared < 20) printf("rank %d: %d received, %d prepared ... ", r, received, prepared);
    }
    cpa_engine_destroy(engine);
    free(times);
}

static void self_test_passes_in_every_dtype_and_mask(void) {
    for (int dtype = CPA_F32; dtype < CPA_DTYPE_COUNT; dtype++) {
        cpa_engine_options options = cpa_test_engine_options();
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        options.skip_self_test = 0;
        options.model.attention.dtype = (cpa_dtype)dtype;
        options.model.attention.kv_dtype = dtype == CPA_F16 ? CPA_BF16 : (cpa_dtype)dtype;
        if (dtype == CPA_BF16) options.model.mask = (cpa_mask){.causal = 1, .window = 40, .sinks = 3};
        cpa_status status = cpa_engine_create(cpa_test_comm(), &options, &engine, &err);
        if (status != CPA_OK) printf("%s\n", err.message);
        CU_ASSERT_EQUAL(status, CPA_OK);
        cpa_engine_destroy(engine);
    }
}

/* A model that forgets: what it recalls is not what it gave, as if a block in the cache were another's. */
static cpa_model forgetful;
static cpa_status layer_through(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                                cpa_stream *stream) {
    (void)ctx;
    const cpa_rows *rows = &step->rows;
    void *const outs[3] = {args->q, args->k, args->v};
    const int64_t counts[3] = {4 * 32, 2 * 32, 2 * 16};
    cpa_status status = CPA_OK;
    float *host = malloc((size_t)(rows->count * counts[0] + 1) * sizeof *host);
    for (int t = 0; t < 3 && status == CPA_OK; t++) {
        int64_t n = rows->count * counts[t];
        for (int64_t i = 0; i < n; i++) host[i] = (float)((i * 7 + layer) % 5) - 2;
        status = stream->device->table->copy(outs[t], host, n * (int64_t)sizeof *host, stream);
        if (status == CPA_OK) status = cpa_stream_sync(stream);
    }
    free(host);
    return status;
}
static void recall_nothing(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                           const int64_t *positions, void *k, void *v) {
    (void)ctx, (void)layer, (void)kv_head, (void)tokens, (void)positions;
    memset(k, 0, (size_t)n * 32 * sizeof(float));
    memset(v, 0, (size_t)n * 16 * sizeof(float));
}

static void a_cache_that_is_not_what_was_written_fails_the_run_on_every_rank(void) {
    forgetful = (cpa_model){.size = sizeof forgetful, .layer_in = layer_through, .recall = recall_nothing};
    cpa_engine_options options = cpa_test_engine_options();
    options.network = &forgetful;
    cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 50, .output_tokens = 4};
    cpa_engine *engine = cpa_test_engine(&options, &request, 1);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine) return;
    CU_ASSERT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_CHECK_FAILED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(engine), "request 1, token"));
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(engine), "stale block"));
    cpa_engine_destroy(engine);
}

static void impossible_options_and_requests_are_named(void) {
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    options.model.attention.kv_heads = 3;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "q_heads is 4, expected a positive multiple of kv_heads, 3"));
    CU_ASSERT_PTR_NULL(engine);
    options = cpa_test_engine_options();
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_OK);
    if (!engine) return;
    cpa_request request = {.size = sizeof request, .prompt_tokens = 1000000, .output_tokens = 1};
    CU_ASSERT_EQUAL(cpa_engine_submit(engine, &request), CPA_INVALID);
    CPA_ASSERT_ORDER(strlen(cpa_engine_error(engine)), >, 0);
    cpa_engine_destroy(engine);
}

/* Scores of wide heads are sums of many terms, whose roundings the tolerance has to allow for. */
static void self_test_passes_in_fp32_with_wide_heads(void) {
    for (int32_t dim = 64; dim <= 256; dim *= 2) {
        for (uint64_t seed = 0; seed < (dim == 256 ? 3 : 1); seed++) {
            cpa_engine_options options = cpa_test_engine_options();
            cpa_engine *engine = NULL;
            cpa_error err = {CPA_OK, ""};
            options.skip_self_test = 0;
            options.staging_bytes = 0;
            options.model.attention.k_dim = options.model.attention.v_dim = dim;
            options.seed = seed;
            CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_OK);
            if (!engine) printf("heads of %d, seed %d: %s\n", dim, (int)seed, err.message);
            cpa_engine_destroy(engine);
        }
    }
}

/* Rows of a chunk see each other's keys then, whatever rank has them. */
static void a_model_without_a_causal_mask_is_checked_as_well(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.skip_self_test = 0;
    options.model.mask.causal = 0;
    for (int algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        options.algorithm = (cpa_algorithm)algorithm;
        CPA_ASSERT_ORDER(run(&options, mixed, 0).verify_rows, >, 100);
    }
}

static void self_test_passes_with_the_smallest_and_the_largest_blocks(void) {
    for (int32_t block_size = 1; block_size <= 512; block_size *= 512) {
        cpa_engine_options options = cpa_test_engine_options();
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        options.skip_self_test = 0;
        options.block_size = block_size;
        options.staging_bytes = 0;
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_OK);
        if (!engine) printf("blocks of %d: %s\n", block_size, err.message);
        cpa_engine_destroy(engine);
    }
}

/* What engine_create says of options that hold a number which is none of an enum. */
static void expect_none(const cpa_engine_options *options, const char *message) {
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, message));
    CU_ASSERT_PTR_NULL(engine);
}

static void numbers_that_are_no_choice_are_named(void) {
    const char *const messages[] = {
        "model: layout is 3", "algorithm: 3 is none", "preemption: 3 is none",
        "policy: 7 is none",  "transport: 4 is none", "block_size: 1024, expected a power of two up to 512",
    };
    enum { CASES = sizeof messages / sizeof messages[0] };
    cpa_engine_options cases[CASES];
    for (int i = 0; i < CASES; i++) cases[i] = cpa_test_engine_options();
    cases[0].model.attention.layout = (cpa_kv_layout)3;
    cases[1].algorithm = (cpa_algorithm)3;
    cases[2].preemption = (cpa_preemption_mode)3;
    cases[3].policy = (cpa_policy)7;
    cases[4].transport = (cpa_transport_kind)4;
    cases[5].block_size = 1024;
    for (int i = 0; i < CASES; i++) expect_none(&cases[i], messages[i]);
}

static const cpa_test tests[] = {
    {"every request finishes and is checked", every_request_finishes_and_is_checked},
    {"results do not depend on algorithm or step size", results_do_not_depend_on_algorithm_or_step_size},
    {"preemption loses nothing and changes no result", preemption_loses_nothing_and_changes_no_result},
    {"whole sequences exchange nothing and give what one rank gives",
     whole_sequences_exchange_nothing_and_give_what_one_rank_gives},
    {"requests wait for their arrival", requests_wait_for_their_arrival},
    {"the next step is received and prepared while one runs", the_next_step_is_received_and_prepared_while_one_runs},
    {"self-test passes in every dtype and mask", self_test_passes_in_every_dtype_and_mask},
    {"self-test passes in fp32 with wide heads", self_test_passes_in_fp32_with_wide_heads},
    {"a model without a causal mask is checked as well", a_model_without_a_causal_mask_is_checked_as_well},
    {"self-test passes with the smallest and the largest blocks",
     self_test_passes_with_the_smallest_and_the_largest_blocks},
    {"a cache that is not what was written fails the run on every rank",
     a_cache_that_is_not_what_was_written_fails_the_run_on_every_rank},
    {"impossible options and requests are named", impossible_options_and_requests_are_named},
    {"numbers that are no choice are named", numbers_that_are_no_choice_are_named},
};
CPA_MPI_DEVICE_TEST_MAIN("engine", tests)
