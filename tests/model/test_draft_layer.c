/* The module of DeepSeek-V3 that drafts, through the whole engine: the tokens of transformers, and behind each of them
 * the draft that the module is to make of it (tests/data/mtp.py), whatever ranks, chunks, shared prefixes and preemption
 * do. */
#include <stdlib.h>
#include <string.h>

#include "src/model/transformer.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/model/expected.h"

enum { REQUESTS = 2 * CPA_TEST_PROMPTS, MAX_ROWS = 512, VOCABULARY = 128 };

/* How the requests run. */
typedef struct way {
    int64_t budget; /* tokens of a step */
    int32_t max_num_seqs;
    int64_t num_blocks; /* 0: enough for all */
    int32_t no_prefix_caching, swaps;
    float temperature;
    int plain;       /* nobody drafts */
    int spread;      /* experts are, over the ranks */
    int constrained; /* the first request has a constraint, which lets any token through */
} way;

typedef struct run {
    const cpa_test_expected *expected;
    cpa_status (*end_draft)(void *ctx, const cpa_model_step *step, uint32_t *guesses, cpa_stream *stream);
    uint32_t tokens[REQUESTS][CPA_TEST_OUTPUTS];
    int64_t finished;
    int64_t right, wrong; /* drafts of this rank behind tokens that are those of transformers */
    cpa_engine_stats stats;
} run;
static run *current;

/* Request i asks prompt i modulo the prompts. */
static uint32_t prompt_token(void *ctx, uint64_t request, int64_t position) {
    return ((const run *)ctx)->expected->prompts[request % CPA_TEST_PROMPTS][position];
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    run *r = ctx;
    CU_ASSERT_EQUAL(result->output_tokens, CPA_TEST_OUTPUTS);
    if (result->output_tokens == CPA_TEST_OUTPUTS)
        memcpy(r->tokens[result->id], result->tokens, sizeof r->tokens[result->id]);
    r->finished++;
}

static cpa_status accept(void *ctx, uint32_t token, cpa_error *err) {
    (void)ctx, (void)token, (void)err;
    return CPA_OK;
}

static cpa_status any_token(void *ctx, uint32_t *words, cpa_error *err) {
    (void)ctx, (void)err;
    memset(words, 0xff, VOCABULARY / 8);
    return CPA_OK;
}
static const cpa_constraint_ops anything = {sizeof anything, accept, any_token, NULL, NULL};

/* The draft behind the token of a row, which is one that the request has. */
static void check_guess(run *r, uint64_t request, int64_t position, uint32_t token, uint32_t guess) {
    const uint64_t prompt = request % CPA_TEST_PROMPTS;
    const int64_t n = r->expected->prompt_tokens[prompt], drawn = position + 1 - n;
    const uint32_t *outputs = r->expected->outputs[prompt];
    const uint32_t known = drawn > 0 ? outputs[drawn - 1] : r->expected->prompts[prompt][n - 1];
    if (drawn < 0 || drawn >= CPA_TEST_OUTPUTS || token != known) return;
    *(guess == r->expected->drafts[prompt][drawn] ? &r->right : &r->wrong) += 1;
}

static cpa_status end_draft(void *ctx, const cpa_model_step *step, uint32_t *guesses, cpa_stream *stream) {
    uint32_t tokens[MAX_ROWS], said[MAX_ROWS];
    int32_t rows[MAX_ROWS];
    const int64_t n = step->emissions.count;
    cpa_status status = current->end_draft(ctx, step, guesses, stream);
    if (status != CPA_OK) return status;
    cpa_test_download(stream, rows, step->emissions.rows, n * 4);
    cpa_test_download(stream, said, guesses, n * 4);
    if (step->rows.count > 0) cpa_test_download(stream, tokens, step->rows.tokens_device, step->rows.count * 4);
    for (int64_t i = 0; i < n; i++)
        if (rows[i] >= 0)
            check_guess(current, step->rows.requests[rows[i]], step->rows.positions[rows[i]], tokens[rows[i]], said[i]);
    return CPA_OK;
}

static void run_engine(const cpa_model_config *config, cpa_transformer *transformer, way w, run *r) {
    static cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_request requests[REQUESTS];
    cpa_model model = cpa_transformer_model(transformer);
    const cpa_sampling sampling = {.size = sizeof sampling, .temperature = w.temperature, .seed = 3, .ignore_eos = 1};
    cpa_engine_options options = cpa_test_engine_options();
    options.model = cpa_model_config_shape(config, CPA_F32, masks);
    cpa_transformer_give_forms(transformer, &options.model);
    options.network = &model;
    options.token_at = prompt_token;
    options.token_ctx = r;
    options.max_num_batched_tokens = w.budget;
    options.max_num_seqs = w.max_num_seqs;
    options.num_blocks = w.num_blocks ? w.num_blocks : 80;
    options.no_prefix_caching = w.no_prefix_caching;
    options.preemption = w.swaps ? CPA_PREEMPT_SWAP : CPA_PREEMPT_RECOMPUTE;
    options.swap_bytes = w.swaps ? 1 << 20 : 0;
    options.drafter = w.plain ? CPA_DRAFT_NONE : CPA_DRAFT_MODEL;
    options.verify = 0.2;
    if (!w.plain && w.temperature == 0) { /* whose tokens are expected */
        r->end_draft = model.end_draft;
        model.end_draft = end_draft;
        model.capturable = 0;
    }
    for (int i = 0; i < REQUESTS; i++) {
        requests[i] = (cpa_request){.size = sizeof requests[i],
                                    .id = (uint64_t)i,
                                    .prompt_tokens = r->expected->prompt_tokens[i % CPA_TEST_PROMPTS],
                                    .output_tokens = CPA_TEST_OUTPUTS,
                                    .sampling = &sampling,
                                    .constraint = w.constrained && i == 0 ? &anything : NULL};
    }
    CU_ASSERT_EQUAL(cpa_test_engine_run(&options, requests, REQUESTS, on_finish, r, &r->stats), 1);
}

/* Runs the model in n ways; r[i] is what the i-th gave. */
static void run_model(const way *ways, int n, cpa_test_expected *expected, run *r) {
    static cpa_model_config config;
    cpa_safetensors *files = NULL;
    cpa_device *device;
    cpa_stream *stream;
    const char *folder = cpa_test_model_folder("tiny-deepseek-mtp");
    cpa_test_expected_read("tiny-deepseek-mtp", expected);
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL(cpa_model_config_load(folder, &config, NULL), CPA_OK);
    CU_ASSERT_EQUAL(config.next_modules, 1);
    CU_ASSERT_EQUAL(cpa_safetensors_open(folder, &files, NULL), CPA_OK);
    for (int i = 0; i < n; i++) {
        const cpa_transformer_options options = {.dtype = CPA_F32,
                                                 .max_rows = MAX_ROWS,
                                                 .max_sequences = REQUESTS,
                                                 .logit_rows = 2, /* several tiles of drafts */
                                                 .rank = cpa_test_rank(),
                                                 .ranks = cpa_comm_size(cpa_test_comm()),
                                                 .experts = ways[i].spread ? CPA_EXPERTS_SENT : CPA_EXPERTS_REPLICATED};
        cpa_transformer *transformer = NULL;
        config.draft_layers = !ways[i].plain;
        CU_ASSERT_EQUAL(cpa_transformer_create(device, &config, files, &options, &transformer, NULL), CPA_OK);
        memset(&r[i], 0, sizeof r[i]);
        r[i].expected = expected;
        current = &r[i];
        run_engine(&config, transformer, ways[i], &r[i]);
        cpa_transformer_destroy(transformer);
    }
    cpa_safetensors_close(files);
    cpa_test_device_close(device, stream);
}

static void check_tokens_and_drafts(const run *r) {
    CU_ASSERT_EQUAL(r->wrong, 0);
    CU_ASSERT(r->right > 0 || cpa_comm_size(cpa_test_comm()) > 1); /* a rank may own no row that yields a token */
    if (cpa_test_rank() > 0) return;
    CU_ASSERT_EQUAL(r->finished, REQUESTS);
    CPA_ASSERT_ORDER(r->stats.accepted_tokens, >, 0);
    for (int i = 0; i < REQUESTS; i++)
        CU_ASSERT_EQUAL(memcmp(r->tokens[i], r->expected->outputs[i % CPA_TEST_PROMPTS], sizeof r->tokens[i]), 0);
}

/* How many drafts a request is to have, and how many of them are right, with a draft behind each token but the last two
 * at most. */
static void count_drafts(const cpa_test_expected *expected, int prompt, int64_t *drafts, int64_t *accepted) {
    for (int known = 1; known < CPA_TEST_OUTPUTS - 1; known++, ++*drafts) {
        if (expected->drafts[prompt][known - 1] != expected->outputs[prompt][known]) continue;
        ++*accepted;
        known++;
    }
}

static void drafts_are_those_of_the_module(void) {
    const way ways[] = {{.budget = 512, .max_num_seqs = REQUESTS},
                        {.budget = 512, .max_num_seqs = REQUESTS, .plain = 1}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    static run r[2];
    run_model(ways, 2, expected, r);
    check_tokens_and_drafts(&r[0]);
    int64_t drafts = 0, accepted = 0;
    for (int i = 0; i < REQUESTS; i++) count_drafts(expected, i % CPA_TEST_PROMPTS, &drafts, &accepted);
    if (cpa_test_rank() == 0) {
        CU_ASSERT_EQUAL(r[0].stats.draft_tokens, drafts);
        CU_ASSERT_EQUAL(r[0].stats.accepted_tokens, accepted);
        CPA_ASSERT_ORDER(r[0].stats.steps, <, r[1].stats.steps);
    }
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(r[0].stats.output_digest, r[1].stats.output_digest);
    free(expected);
}

/* Chunks, prefixes that are found, an answer with a constraint, for which nobody drafts, beside others, preemption by
 * computing again and by host memory, and experts on other ranks. */
static void ways_to_run_do_not_matter(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const int64_t few = ranks < 4 ? 14 / ranks : 4; /* blocks */
    const way ways[] = {
        {.budget = 24, .max_num_seqs = 3, .constrained = 1},
        {.budget = 40,
         .max_num_seqs = REQUESTS,
         .no_prefix_caching = 1,
         .num_blocks = few,
         .spread = cpa_test_promises_bits()},
        {.budget = 512, .max_num_seqs = REQUESTS, .no_prefix_caching = 1, .num_blocks = few, .swaps = 1}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    static run r[3];
    run_model(ways, 3, expected, r);
    for (int i = 0; i < 3; i++) check_tokens_and_drafts(&r[i]);
    CPA_ASSERT_ORDER(r[0].stats.prefix_hits, >, 0);
    CPA_ASSERT_ORDER(r[1].stats.preemptions, >, 0);
    /* Steps of devices follow each other otherwise, and two of them have room enough. */
    if (cpa_test_promises_bits()) CPA_ASSERT_ORDER(r[2].stats.swapped_in, >, 0);
    free(expected);
}

static void drawn_tokens_are_those_without_drafts(void) {
    if (cpa_comm_size(cpa_test_comm()) > 1) return; /* the greedy ones are drawn alike */
    const way ways[] = {{.budget = 60, .max_num_seqs = REQUESTS, .temperature = 0.7f},
                        {.budget = 60, .max_num_seqs = REQUESTS, .temperature = 0.7f, .plain = 1}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    static run r[2];
    run_model(ways, 2, expected, r);
    CPA_ASSERT_ORDER(r[0].stats.draft_tokens, >, 0);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(memcmp(r[0].tokens, r[1].tokens, sizeof r[0].tokens), 0);
    free(expected);
}

static const cpa_test TESTS[] = {
    {"drafts are those of the module", drafts_are_those_of_the_module},
    {"chunks, shared prefixes and preemption do not matter", ways_to_run_do_not_matter},
    {"drawn tokens are those without drafts", drawn_tokens_are_those_without_drafts},
};

CPA_MPI_DEVICE_TEST_MAIN("a layer that drafts", TESTS)
