/* Log-probabilities and the most probable tokens through the whole engine, beside a plain forward of each sequence: at
 * any temperature, whatever the chunks, the batch and the drafts, on any number of ranks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "src/model/plain_forward.h"
#include "src/model/transformer.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/model/expected.h"

enum { REQUESTS = 2 * CPA_TEST_PROMPTS, OUTPUTS = 12, LENGTH = CPA_TEST_MAX_PROMPT + OUTPUTS };

/* How many of the most probable tokens each request wants with its output, and with its prompt; -1: nothing of that. */
static const int32_t TOPS[REQUESTS] = {0, 20, 5, 1, 20, 0}, PROMPT_TOPS[REQUESTS] = {-1, 0, 20, 3, -1, 1};

/* How the requests run. */
typedef struct way {
    int64_t budget; /* tokens of a step */
    int32_t max_num_seqs;
    int64_t num_blocks; /* 0: enough for all */
    int32_t no_prefix_caching;
    float temperature, frequency_penalty;
    cpa_model_slices slices;
    int32_t drafts;          /* of a sequence in a step */
    int32_t without_prompts; /* nobody wants anything of prompts */
} way;
static const way WHOLE = {.budget = 512, .max_num_seqs = REQUESTS, .temperature = 1};

typedef struct run {
    const cpa_test_expected *expected;
    int32_t prompt_tops[REQUESTS];
    uint32_t tokens[REQUESTS][OUTPUTS];
    float logprobs[REQUESTS][OUTPUTS];
    cpa_token_ranks ranks[REQUESTS][OUTPUTS];  /* of those with a TOPS */
    cpa_token_ranks called[REQUESTS][OUTPUTS]; /* the same by on_ranks */
    int64_t n_called[REQUESTS];
    cpa_token_ranks prompt_ranks[REQUESTS][CPA_TEST_MAX_PROMPT];  /* of those with PROMPT_TOPS */
    cpa_token_ranks prompt_called[REQUESTS][CPA_TEST_MAX_PROMPT]; /* the same by on_ranks */
    int64_t n_prompt_called[REQUESTS];
    cpa_engine_stats stats;
} run;

static int64_t prompt_tokens(const run *r, uint64_t request) {
    return r->expected->prompt_tokens[request % CPA_TEST_PROMPTS];
}

/* Request i asks prompt i modulo the prompts. */
static uint32_t prompt_token(void *ctx, uint64_t request, int64_t position) {
    return ((const run *)ctx)->expected->prompts[request % CPA_TEST_PROMPTS][position];
}

static void on_ranks(void *ctx, uint64_t request, int64_t position, const cpa_token_ranks *ranks) {
    run *r = ctx;
    if (position < prompt_tokens(r, request)) {
        CU_ASSERT_EQUAL(position, 1 + r->n_prompt_called[request]++);
        CU_ASSERT_EQUAL(r->n_called[request], 0);
        r->prompt_called[request][position] = *ranks;
        return;
    }
    const int64_t index = r->n_called[request]++;
    CU_ASSERT_EQUAL(position, prompt_tokens(r, request) + index);
    if (index < OUTPUTS) r->called[request][index] = *ranks;
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    run *r = ctx;
    CU_ASSERT_EQUAL(result->output_tokens, OUTPUTS);
    if (result->output_tokens != OUTPUTS) return;
    CU_ASSERT_EQUAL(result->ranks != NULL, TOPS[result->id] > 0);
    memcpy(r->tokens[result->id], result->tokens, sizeof r->tokens[result->id]);
    memcpy(r->logprobs[result->id], result->logprobs, sizeof r->logprobs[result->id]);
    CU_ASSERT_EQUAL(result->prompt_ranks != NULL, r->prompt_tops[result->id] >= 0);
    if (result->prompt_ranks)
        memcpy(r->prompt_ranks[result->id], result->prompt_ranks,
               (size_t)result->prompt_tokens * sizeof *result->prompt_ranks);
    if (result->ranks) memcpy(r->ranks[result->id], result->ranks, sizeof r->ranks[result->id]);
}

/* Drafts what another run has drawn, every third one wrong. */
static const run *drafted_from;
static int64_t draft(void *ctx, const cpa_draft_args *args) {
    const int64_t at = args->n_tokens - prompt_tokens(drafted_from, args->request);
    (void)ctx;
    for (int64_t i = 0; i < args->max_drafts; i++)
        args->drafts[i] = drafted_from->tokens[args->request][(at + i) % OUTPUTS] ^ (i % 3 == 2);
    return args->max_drafts;
}

static void run_engine(const cpa_model_config *config, cpa_transformer *transformer, way w, run *r) {
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_request requests[REQUESTS];
    cpa_sampling samplings[REQUESTS];
    cpa_model model = cpa_transformer_model(transformer);
    cpa_engine_options options = cpa_test_engine_options();
    options.model = cpa_model_config_shape(config, CPA_F32, masks);
    options.network = &model;
    options.token_at = prompt_token;
    options.token_ctx = r;
    options.max_num_batched_tokens = w.budget;
    options.max_num_seqs = w.max_num_seqs;
    options.num_blocks = w.num_blocks ? w.num_blocks : 80;
    if (w.num_blocks) options.local_context = CPA_LOCAL_CONTEXT_NONE; /* they are counted for shards */
    options.no_prefix_caching = w.no_prefix_caching;
    options.preemption = CPA_PREEMPT_RECOMPUTE;
    options.drafter = w.drafts > 0 ? CPA_DRAFT_MODEL : CPA_DRAFT_NONE;
    options.draft_tokens = w.drafts;
    options.on_ranks = on_ranks;
    model.draft = draft;
    for (int i = 0; i < REQUESTS; i++) {
        r->prompt_tops[i] = w.without_prompts ? -1 : PROMPT_TOPS[i];
        samplings[i] = (cpa_sampling){.size = sizeof samplings[i],
                                      .temperature = w.temperature,
                                      .frequency_penalty = w.frequency_penalty,
                                      .seed = (uint64_t)i,
                                      .ignore_eos = 1,
                                      .logprobs = 1,
                                      .top_logprobs = TOPS[i],
                                      .prompt_logprobs = r->prompt_tops[i] >= 0,
                                      .top_prompt_logprobs = r->prompt_tops[i] > 0 ? r->prompt_tops[i] : 0};
        requests[i] = (cpa_request){.size = sizeof requests[i],
                                    .id = (uint64_t)i,
                                    .prompt_tokens = prompt_tokens(r, (uint64_t)i),
                                    .output_tokens = OUTPUTS,
                                    .sampling = &samplings[i]};
    }
    CU_ASSERT_EQUAL(cpa_test_engine_run(&options, requests, REQUESTS, on_finish, r, &r->stats), 1);
}

static int is_near(float found, double expected) {
    return fabs((double)found - expected) <= 2e-4;
}

/* Whether what is told of a token is what a row of logits says, but for errors of rounding, which may exchange
 * neighbours in the order. */
static int is_right(const float *logits, int vocabulary, uint32_t token, const cpa_token_ranks *found, int32_t top) {
    double sum = 0;
    int32_t larger = 0, near = 0;
    int right = 1;
    for (int t = 0; t < vocabulary; t++) {
        const double more = (double)logits[t] - (double)logits[token];
        sum += exp((double)logits[t]);
        larger += more > 2e-4;
        near += fabs(more) <= 2e-4;
    }
    right &= is_near(found->logprob, (double)logits[token] - log(sum));
    right &= found->rank > larger && found->rank <= larger + near;
    for (int32_t i = 0; i < CPA_MOST_TOP_LOGPROBS; i++) {
        const cpa_token_logprob *next = &found->top[i];
        if (i >= top) {
            right &= next->token == CPA_NO_TOKEN;
            continue;
        }
        int32_t before = 0;
        for (int t = 0; next->token < (uint32_t)vocabulary && t < vocabulary; t++)
            before += logits[t] > logits[next->token] + 2e-4f;
        right &= next->token < (uint32_t)vocabulary && before <= i && (i == 0 || next->logprob <= next[-1].logprob) &&
                 is_near(next->logprob, (double)logits[next->token] - log(sum));
    }
    return right;
}

/* Every token of every request, beside the logits of a plain forward of its sequence. */
static void check(const cpa_model_config *config, const cpa_safetensors *files, const run *r) {
    float *logits = malloc(LENGTH * (size_t)config->vocabulary * sizeof *logits);
    for (uint64_t i = 0; i < REQUESTS; i++) {
        const int64_t n = prompt_tokens(r, i), count = n + OUTPUTS - 1;
        uint32_t tokens[LENGTH];
        int64_t positions[LENGTH];
        int wrong = 0;
        memcpy(tokens, r->expected->prompts[i % CPA_TEST_PROMPTS], (size_t)n * sizeof *tokens);
        memcpy(tokens + n, r->tokens[i], (OUTPUTS - 1) * sizeof *tokens);
        for (int64_t p = 0; p < count; p++) positions[p] = p;
        const cpa_plain_question question = {config, files, CPA_F32, tokens, count, positions, count, {NULL, NULL, 0}};
        CU_ASSERT_EQUAL(cpa_plain_forward(&question, logits, NULL), CPA_OK);
        for (int64_t o = 0; o < OUTPUTS; o++) {
            const float *row = logits + (n - 1 + o) * config->vocabulary;
            cpa_token_ranks found = r->ranks[i][o];
            const int told = TOPS[i] > 0;
            if (!told) {
                double sum = 0;
                for (int64_t t = 0; t < config->vocabulary; t++) sum += exp((double)row[t]);
                wrong += !is_near(r->logprobs[i][o], (double)row[r->tokens[i][o]] - log(sum));
                continue;
            }
            wrong += !is_right(row, (int)config->vocabulary, r->tokens[i][o], &found, TOPS[i]);
            wrong += memcmp(&r->logprobs[i][o], &found.logprob, sizeof(float)) != 0;
        }
        for (int64_t p = 1; r->prompt_tops[i] >= 0 && p < n; p++)
            wrong += !is_right(logits + (p - 1) * config->vocabulary, (int)config->vocabulary, tokens[p],
                               &r->prompt_ranks[i][p], r->prompt_tops[i]);
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_EQUAL(r->n_prompt_called[i], r->prompt_tops[i] >= 0 ? n - 1 : 0);
        CU_ASSERT_EQUAL(
            memcmp(&r->prompt_called[i][1], &r->prompt_ranks[i][1], (size_t)(n - 1) * sizeof r->prompt_ranks[i][1]), 0);
        CU_ASSERT_EQUAL(r->n_called[i], TOPS[i] > 0 ? OUTPUTS : 0);
        if (TOPS[i] > 0) CU_ASSERT_EQUAL(memcmp(r->called[i], r->ranks[i], sizeof r->ranks[i]), 0);
    }
    free(logits);
}

/* Runs a tiny model in n ways, each of which is checked; r[i] is what the i-th gave. */
static void run_model(const char *name, const way *ways, int n, run *r) {
    static cpa_test_expected expected;
    cpa_model_config config;
    cpa_safetensors *files = NULL;
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_expected_read(name, &expected);
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL(cpa_model_config_load(cpa_test_model_folder(name), &config, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_safetensors_open(cpa_test_model_folder(name), &files, NULL), CPA_OK);
    for (int i = 0; i < n; i++) {
        const cpa_transformer_options options = {.dtype = CPA_F32,
                                                 .max_rows = WHOLE.budget,
                                                 .max_sequences = REQUESTS,
                                                 .slices = ways[i].slices,
                                                 .rank = cpa_test_rank(),
                                                 .ranks = cpa_comm_size(cpa_test_comm())};
        cpa_transformer *transformer = NULL;
        CU_ASSERT_EQUAL(cpa_transformer_create(device, &config, files, &options, &transformer, NULL), CPA_OK);
        memset(&r[i], 0, sizeof r[i]);
        r[i].expected = &expected;
        if (i > 0) drafted_from = &r[i - 1];
        run_engine(&config, transformer, ways[i], &r[i]);
        if (cpa_test_rank() == 0) check(&config, files, &r[i]);
        cpa_transformer_destroy(transformer);
    }
    cpa_safetensors_close(files);
    cpa_test_device_close(device, stream);
}

/* Prompts that tell theirs are computed whole, whatever the cache has; the others find what is there. */
static void ranks_are_those_of_a_plain_forward(void) {
    const way greedy = {.budget = 512, .max_num_seqs = REQUESTS};
    const way chunks = {.budget = 24, .max_num_seqs = 3, .temperature = 1, .frequency_penalty = 0.5f};
    way ways[] = {greedy, WHOLE, chunks, greedy};
    static run r[4];
    ways[3].without_prompts = 1;
    run_model("tiny-llama", ways, 4, r);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(r[0].stats.output_digest, r[3].stats.output_digest);
    CPA_ASSERT_ORDER(r[2].stats.prefix_hits, >, 0);
}

static void preemption_and_slices_do_not_matter(void) {
    way ways[] = {WHOLE, WHOLE, WHOLE};
    static run r[3];
    ways[0].no_prefix_caching = 1, ways[0].num_blocks = 12 / cpa_comm_size(cpa_test_comm());
    ways[1].slices = CPA_SLICES_DECODE;
    ways[2].slices = CPA_SLICES_ALL;
    run_model("tiny-qwen3", ways, 3, r);
    CPA_ASSERT_ORDER(r[0].stats.preemptions, >, 0);
}

static void ranks_of_accepted_drafts_are_told(void) {
    way ways[] = {WHOLE, WHOLE};
    static run r[2];
    ways[1].drafts = 5;
    run_model("tiny-qwen2", ways, 2, r);
    CPA_ASSERT_ORDER(r[1].stats.accepted_tokens, >, r[1].stats.draft_tokens / 3);
}

static void what_cannot_be_told_is_refused(void) {
    static const cpa_sampling bad[] = {{.logprobs = 1, .top_logprobs = 21},
                                       {.logprobs = 1, .top_logprobs = -1},
                                       {.top_logprobs = 3},
                                       {.prompt_logprobs = 1, .top_prompt_logprobs = 21},
                                       {.top_prompt_logprobs = 1},
                                       /* By a model that tells nothing of it: */
                                       {.logprobs = 1, .top_logprobs = 3},
                                       {.prompt_logprobs = 1}};
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine *engine = cpa_test_engine(&options, NULL, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
    for (int i = 0; cpa_test_rank() == 0 && i < 7; i++) {
        cpa_sampling sampling = bad[i];
        sampling.size = sizeof sampling;
        const cpa_request request = {
            .size = sizeof request, .id = 1, .prompt_tokens = 9, .output_tokens = 2, .sampling = &sampling};
        CU_ASSERT_EQUAL(cpa_engine_submit(engine, &request), i < 5 ? CPA_INVALID : CPA_UNSUPPORTED);
        CU_ASSERT_PTR_NOT_NULL(
            strstr(cpa_engine_error(engine), i == 3 || i == 4 ? "top_prompt_logprobs" : "top_logprobs"));
    }
    cpa_engine_destroy(engine);
}

static const cpa_test TESTS[] = {
    {"ranks are those of a plain forward", ranks_are_those_of_a_plain_forward},
    {"preemption and slices do not matter", preemption_and_slices_do_not_matter},
    {"ranks of accepted drafts are told", ranks_of_accepted_drafts_are_told},
    {"what cannot be told is refused", what_cannot_be_told_is_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("log-probabilities of tokens", TESTS)
