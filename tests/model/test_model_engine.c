/* Models through the whole engine: the greedy tokens of transformers, each prompt asked twice, whatever the chunks and
 * the batch, with and without shared prefixes, with preemption, and with draws that depend on the seed alone. */
#include <stdlib.h>
#include <string.h>

#include "src/model/transformer.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/model/expected.h"

enum { REQUESTS = 2 * CPA_TEST_PROMPTS };

/* How the requests run. */
typedef struct way {
    int64_t budget; /* tokens of a step */
    int32_t max_num_seqs;
    int64_t num_blocks; /* 0: enough for all */
    int32_t no_prefix_caching;
    float temperature;
    float repetition_penalty, presence_penalty, frequency_penalty;
    cpa_model_slices slices; /* of the weights, on several ranks */
    int32_t drafts;          /* of a sequence in a step; they come from the run before, */
    int32_t branches;        /* above 1: in trees whose nodes have so many below each */
    cpa_experts_over_ranks experts;
    int unchecked; /* no row is checked */
} way;
static const way plain = {.budget = 512, .max_num_seqs = REQUESTS};

typedef struct run {
    const cpa_test_expected *expected;
    uint32_t tokens[REQUESTS][CPA_TEST_OUTPUTS];
    int64_t finished;
    cpa_engine_stats stats;
    int64_t bytes; /* of the transformer */
} run;

/* Request i asks prompt i modulo the prompts. */
static uint32_t prompt_token(void *ctx, uint64_t request, int64_t position) {
    return ((const run *)ctx)->expected->prompts[request % CPA_TEST_PROMPTS][position];
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    run *r = ctx;
    CU_ASSERT_EQUAL(result->reason, CPA_FINISH_LENGTH);
    CU_ASSERT_EQUAL(result->output_tokens, CPA_TEST_OUTPUTS);
    if (result->output_tokens == CPA_TEST_OUTPUTS)
        memcpy(r->tokens[result->id], result->tokens, sizeof r->tokens[result->id]);
    r->finished++;
}

/* Drafts what another run has drawn, every fourth one wrong; of the drafts that come behind the same one in a tree, all
 * but one are. */
static const run *drafted_from;
static int32_t draft_branches;
static int64_t draft(void *ctx, const cpa_draft_args *args) {
    (void)ctx;
    const int64_t at = args->n_tokens - drafted_from->expected->prompt_tokens[args->request % CPA_TEST_PROMPTS];
    int64_t depth[CPA_TEST_OUTPUTS];
    for (int64_t i = 0; i < args->max_drafts; i++) {
        const int64_t parent = draft_branches > 1 ? (i < draft_branches ? -1 : i / draft_branches - 1) : i - 1;
        depth[i] = parent < 0 ? 0 : depth[parent] + 1;
        const int64_t index = at + depth[i], right = draft_branches > 1 ? index % draft_branches : 0;
        const int is_wrong = index % 4 == 3 || (draft_branches > 1 && i % draft_branches != right);
        args->parents[i] = (int32_t)parent;
        args->drafts[i] = drafted_from->tokens[args->request][index] ^ (uint32_t)(is_wrong ? 1 + i % 2 : 0);
    }
    return args->max_drafts;
}

static void run_engine(const cpa_model_config *config, cpa_transformer *transformer, way w, run *r) {
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_request requests[REQUESTS];
    cpa_model model = cpa_transformer_model(transformer);
    const cpa_sampling sampling = {.size = sizeof sampling,
                                   .temperature = w.temperature,
                                   .repetition_penalty = w.repetition_penalty,
                                   .presence_penalty = w.presence_penalty,
                                   .frequency_penalty = w.frequency_penalty,
                                   .seed = 3,
                                   .ignore_eos = 1,
                                   .logprobs = 1};
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
    options.preemption = CPA_PREEMPT_RECOMPUTE;
    if (w.unchecked) options.verify = 0;
    options.drafter = w.drafts > 0 ? CPA_DRAFT_MODEL : CPA_DRAFT_NONE;
    options.draft_tokens = w.drafts;
    draft_branches = w.branches;
    model.draft = draft;
    for (int i = 0; i < REQUESTS; i++) {
        requests[i] = (cpa_request){.size = sizeof requests[i],
                                    .id = (uint64_t)i,
                                    .prompt_tokens = r->expected->prompt_tokens[i % CPA_TEST_PROMPTS],
                                    .output_tokens = CPA_TEST_OUTPUTS,
                                    .sampling = &sampling};
    }
    CU_ASSERT_EQUAL(cpa_test_engine_run(&options, requests, REQUESTS, on_finish, r, &r->stats), 1);
}

/* Runs a tiny model in n ways; r[i] is what the i-th gave. */
static void run_model(const char *name, const way *ways, int n, cpa_test_expected *expected, run *r) {
    cpa_model_config config;
    cpa_safetensors *files = NULL;
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_expected_read(name, expected);
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL(cpa_model_config_load(cpa_test_model_folder(name), &config, NULL), CPA_OK);
    config.index.dtype = cpa_index_dtype_beside(CPA_F32, CPA_F32);
    CU_ASSERT_EQUAL(cpa_safetensors_open(cpa_test_model_folder(name), &files, NULL), CPA_OK);
    for (int i = 0; i < n; i++) {
        const cpa_transformer_options options = {.dtype = CPA_F32,
                                                 .max_rows = plain.budget,
                                                 .max_sequences = REQUESTS,
                                                 .slices = ways[i].slices,
                                                 .rank = cpa_test_rank(),
                                                 .ranks = cpa_comm_size(cpa_test_comm()),
                                                 .experts = ways[i].experts};
        cpa_transformer *transformer = NULL;
        CU_ASSERT_EQUAL(cpa_transformer_create(device, &config, files, &options, &transformer, NULL), CPA_OK);
        memset(&r[i], 0, sizeof r[i]);
        r[i].expected = expected;
        r[i].bytes = cpa_transformer_bytes(&config, &options);
        if (i > 0) drafted_from = &r[i - 1];
        run_engine(&config, transformer, ways[i], &r[i]);
        cpa_transformer_destroy(transformer);
    }
    cpa_safetensors_close(files);
    cpa_test_device_close(device, stream);
}

static void check_greedy(const run *r) {
    if (cpa_test_rank() > 0) return;
    CU_ASSERT_EQUAL(r->finished, REQUESTS);
    for (int i = 0; i < REQUESTS; i++)
        CU_ASSERT_EQUAL(memcmp(r->tokens[i], r->expected->outputs[i % CPA_TEST_PROMPTS], sizeof r->tokens[i]), 0);
}

static void every_family_gives_the_tokens_of_transformers(void) {
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r;
    for (int i = 0; cpa_test_models[i]; i++) {
        run_model(cpa_test_models[i], &plain, 1, expected, &r);
        check_greedy(&r);
    }
    free(expected);
}

static void ways_to_run_do_not_matter(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const way ways[] = {{.budget = 24, .max_num_seqs = 2},                                /* chunks, shared prefixes */
                        {.budget = 40, .max_num_seqs = REQUESTS, .no_prefix_caching = 1}, /* chunks, nothing shared */
                        {.budget = 512,
                         .max_num_seqs = REQUESTS,
                         .no_prefix_caching = 1, /* preemption */
                         .num_blocks = 14 / ranks}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[3];
    run_model("tiny-qwen2", ways, 3, expected, r);
    for (int i = 0; i < 3; i++) check_greedy(&r[i]);
    run_model("tiny-llama", ways, 3, expected, r);
    for (int i = 0; i < 3; i++) check_greedy(&r[i]);
    CU_ASSERT(r[0].stats.prefix_hits > 0 && r[1].stats.prefix_hits == 0);
    CU_ASSERT(r[0].stats.preemptions == 0 && r[2].stats.preemptions > 0);
    free(expected);
}

/* Absorbed and expanded rows in one step, chunks of a few tokens, shared prefixes, preemption, and drafts, which are
 * absorbed together. */
static void latent_attention_gives_the_tokens_of_transformers(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const way ways[] = {{.budget = 512, .max_num_seqs = REQUESTS},
                        {.budget = 24, .max_num_seqs = 3, .drafts = 5},
                        {.budget = 512, .max_num_seqs = REQUESTS, .no_prefix_caching = 1, .num_blocks = 12 / ranks},
                        {.budget = 60, .max_num_seqs = REQUESTS, .drafts = 6, .branches = 2}};
    const int n[] = {2, 4, 1, 4};
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[4];
    for (int i = 0; cpa_test_latent_models[i]; i++) {
        run_model(cpa_test_latent_models[i], ways, n[i], expected, r);
        for (int w = 0; w < n[i]; w++) check_greedy(&r[w]);
        if (n[i] < 4) continue;
        CU_ASSERT(r[1].stats.prefix_hits > 0 && (ranks > 1 || r[2].stats.preemptions > 0));
        CPA_ASSERT_ORDER(r[1].stats.accepted_tokens, >, 0);
        CPA_ASSERT_ORDER(r[3].stats.accepted_tokens, >, 0);
    }
    free(expected);
}

/* An indexer chooses in them too, of one token a sequence, of several with drafts, and where some sequences decode
 * beside others that have ended. Steps with checked rows are not captured. */
static void steps_that_decode_by_an_indexer_are_captured(void) {
    const way ways[] = {{.budget = 512, .max_num_seqs = REQUESTS, .unchecked = 1},
                        {.budget = 512, .max_num_seqs = REQUESTS, .drafts = 3, .unchecked = 1},
                        {.budget = 512, .max_num_seqs = 4, .unchecked = 1}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[3];
    run_model("tiny-deepseek-v32", ways, 3, expected, r);
    for (int i = 0; i < 3; i++) {
        check_greedy(&r[i]);
        if (!cpa_test_promises_bits()) CPA_ASSERT_ORDER(r[i].stats.graph_steps, >, i == 1 ? 0 : 8);
    }
    CPA_ASSERT_ORDER(r[1].stats.accepted_tokens, >, 0);
    free(expected);
}

/* Replicated and spread: in chunks with shared prefixes, with preemption, and with drafts. On devices steps that decode
 * are captured. */
static void experts_may_lie_anywhere(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const cpa_experts_over_ranks spread = cpa_test_promises_bits() ? CPA_EXPERTS_SENT : CPA_EXPERTS_GATHERED;
    const way chunks = {.budget = 24, .max_num_seqs = 3};
    const way preempted = {.budget = 512, .max_num_seqs = REQUESTS, .no_prefix_caching = 1, .num_blocks = 14 / ranks};
    way ways[] = {chunks, chunks, preempted, preempted, chunks};
    ways[1].experts = ways[2].experts = ways[3].experts = spread;
    ways[3].drafts = 6;
    ways[4].experts = CPA_EXPERTS_GATHERED;
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[5];
    run_model("tiny-qwen3-moe", ways, 5, expected, r);
    for (int i = 0; i < 5; i++) {
        const int travels = ways[i].experts != CPA_EXPERTS_REPLICATED && ranks > 1;
        check_greedy(&r[i]);
        CU_ASSERT(travels ? r[i].stats.row_bytes_sent > 0 : r[i].stats.row_bytes_sent == 0);
        if (spread == CPA_EXPERTS_SENT && i < 4) CU_ASSERT_EQUAL(r[i].stats.output_digest, r[0].stats.output_digest);
    }
    CU_ASSERT(r[0].stats.prefix_hits > 0 && r[2].stats.preemptions > 0);
    CPA_ASSERT_ORDER(r[3].stats.accepted_tokens, >, 0);
    free(expected);
}

/* How many output tokens of a request are among the n tokens before them: outputs, and with `prompt` that too. */
static int repeated(const run *r, int request, int prompt) {
    const int64_t n = prompt ? r->expected->prompt_tokens[request % CPA_TEST_PROMPTS] : 0;
    int count = 0;
    for (int i = 0; i < CPA_TEST_OUTPUTS; i++) {
        const uint32_t token = r->tokens[request][i];
        int seen = 0;
        for (int64_t j = 0; j < n; j++) seen |= r->expected->prompts[request % CPA_TEST_PROMPTS][j] == token;
        for (int j = 0; j < i; j++) seen |= r->tokens[request][j] == token;
        count += seen;
    }
    return count;
}

/* In every family; with chunks and preemption, where the same token is computed with and without slices; and with
 * penalties, whose tokens are noted on every rank. */
static void slices_of_the_weights_give_the_same_tokens(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const way ways[] = {{.budget = 512, .max_num_seqs = REQUESTS, .slices = CPA_SLICES_DECODE},
                        {.budget = 24, .max_num_seqs = 3, .slices = CPA_SLICES_DECODE},
                        {.budget = 512,
                         .max_num_seqs = REQUESTS,
                         .no_prefix_caching = 1,
                         .num_blocks = 14 / ranks,
                         .slices = CPA_SLICES_DECODE}};
    const way penalties[] = {
        {.budget = 512, .max_num_seqs = REQUESTS, .repetition_penalty = 1e6f},
        {.budget = 512, .max_num_seqs = REQUESTS, .repetition_penalty = 1e6f, .slices = CPA_SLICES_DECODE},
    };
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[3];
    for (int i = 0; cpa_test_models[i]; i++) {
        const way both[] = {{.budget = 60, .max_num_seqs = REQUESTS, .slices = CPA_SLICES_ALL},
                            {.budget = 60, .max_num_seqs = REQUESTS, .slices = CPA_SLICES_DECODE}};
        const int n = i == 0 ? 2 : 1;
        run_model(cpa_test_models[i], both, n, expected, r);
        for (int j = 0; j < n; j++) check_greedy(&r[j]);
        if (n == 2) CU_ASSERT(ranks > 1 ? r[0].bytes < r[1].bytes : r[0].bytes == r[1].bytes);
    }
    run_model("tiny-llama", ways, 3, expected, r);
    for (int i = 0; i < 3; i++) check_greedy(&r[i]);
    CPA_ASSERT_ORDER(r[2].stats.preemptions, >, 0);
    run_model("tiny-llama", penalties, 2, expected, r);
    for (int i = 0; cpa_test_rank() == 0 && i < REQUESTS; i++) {
        CU_ASSERT_EQUAL(repeated(&r[1], i, 1), 0);
        CU_ASSERT_EQUAL(memcmp(r[0].tokens[i], r[1].tokens[i], sizeof r[0].tokens[i]), 0);
    }
    free(expected);
}

/* Two requests of one prompt and seed draw the same, whatever is beside them. */
static void draws_depend_on_the_seed_alone(void) {
    const way ways[] = {{.budget = 512, .max_num_seqs = REQUESTS, .temperature = 2},
                        {.budget = 20, .max_num_seqs = 1, .no_prefix_caching = 1, .temperature = 2}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[2];
    run_model("tiny-sharded", ways, 2, expected, r);
    for (int i = 0; cpa_test_rank() == 0 && i < CPA_TEST_PROMPTS; i++) {
        if (cpa_test_promises_bits()) {
            CU_ASSERT_EQUAL(memcmp(r[0].tokens[i], r[0].tokens[i + CPA_TEST_PROMPTS], sizeof r[0].tokens[i]), 0);
            CU_ASSERT_EQUAL(memcmp(r[0].tokens[i], r[1].tokens[i], sizeof r[0].tokens[i]), 0);
        }
        CU_ASSERT_NOT_EQUAL(memcmp(r[0].tokens[i], expected->outputs[i], sizeof r[0].tokens[i]), 0);
    }
    free(expected);
}

/* Penalties so large that no token comes again: those of prompt and output, or of the output alone; also where requests
 * give way and are computed again, and where their places are taken by others. */
static void penalties_know_the_tokens_of_a_sequence(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const way ways[] = {{.budget = 512, .max_num_seqs = REQUESTS, .repetition_penalty = 1e6f},
                        {.budget = 24, .max_num_seqs = 2, .repetition_penalty = 1e6f},
                        {.budget = 512,
                         .max_num_seqs = REQUESTS,
                         .no_prefix_caching = 1,
                         .num_blocks = 14 / ranks,
                         .repetition_penalty = 1e6f},
                        {.budget = 512, .max_num_seqs = REQUESTS, .presence_penalty = 1e3f}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[4];
    run_model("tiny-qwen3", ways, 4, expected, r);
    CPA_ASSERT_ORDER(r[2].stats.preemptions, >, 0);
    for (int request = 0; cpa_test_rank() == 0 && request < REQUESTS; request++) {
        for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL(repeated(&r[i], request, 1), 0);
        CU_ASSERT_EQUAL(repeated(&r[3], request, 0), 0);
        CU_ASSERT_EQUAL(memcmp(r[0].tokens[request], r[1].tokens[request], sizeof r[0].tokens[request]), 0);
        CU_ASSERT_EQUAL(memcmp(r[0].tokens[request], r[2].tokens[request], sizeof r[0].tokens[request]), 0);
    }
    CU_ASSERT(cpa_test_rank() > 0 || repeated(&r[3], 2, 1) > 0);
    free(expected);
}

/* What is there once is lifted, what is there twice lowered: so tokens come in pairs, and no pair comes again. */
static const way in_pairs = {
    .budget = 512, .max_num_seqs = REQUESTS, .presence_penalty = -1000, .frequency_penalty = 600};

static void check_pairs(const run *r) {
    for (int request = 0; cpa_test_rank() == 0 && request < REQUESTS; request++) {
        const uint32_t *tokens = r->tokens[request];
        int wrong = 0;
        for (int i = 0; i + 1 < CPA_TEST_OUTPUTS; i += 2) {
            wrong += tokens[i] != tokens[i + 1];
            for (int j = 0; j < i; j++) wrong += tokens[j] == tokens[i];
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
}

/* Also where requests give way, and where their places are taken by others. */
static void frequency_penalties_count_the_output(void) {
    way ways[] = {in_pairs, in_pairs, in_pairs};
    ways[1].budget = 24, ways[1].max_num_seqs = 2;
    ways[2].no_prefix_caching = 1, ways[2].num_blocks = 14 / cpa_comm_size(cpa_test_comm());
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[3];
    run_model("tiny-qwen3", ways, 3, expected, r);
    CPA_ASSERT_ORDER(r[2].stats.preemptions, >, 0);
    for (int i = 0; i < 3; i++) check_pairs(&r[i]);
    free(expected);
}

/* Greedy, and with penalties that count the drafts before a row too, where requests give way; chains and trees. */
static void drafts_do_not_change_tokens(void) {
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    const way kinds[] = {{.budget = 512, .max_num_seqs = REQUESTS},
                         {.budget = 512,
                          .max_num_seqs = REQUESTS,
                          .no_prefix_caching = 1,
                          .num_blocks = 14 / ranks,
                          .presence_penalty = 1e3f},
                         {.budget = 60, .max_num_seqs = REQUESTS, .temperature = 1, .slices = CPA_SLICES_DECODE},
                         in_pairs};
    cpa_test_expected *expected = malloc(sizeof *expected);
    run r[3];
    for (int kind = 0; kind < 4; kind++) {
        way ways[] = {kinds[kind], kinds[kind], kinds[kind]};
        ways[1].drafts = ways[2].drafts = 6;
        ways[2].branches = 2;
        run_model("tiny-qwen3", ways, 3, expected, r);
        for (int i = 1; i < 3; i++) {
            CPA_ASSERT_ORDER(r[i].stats.accepted_tokens, >, r[i].stats.draft_tokens / 5);
            CPA_ASSERT_ORDER(r[i].stats.steps, <, r[0].stats.steps);
            CU_ASSERT(kind != 1 || r[0].stats.preemptions > 0);
            if (kind == 3) check_pairs(&r[i]);
            for (int request = 0; cpa_test_rank() == 0 && request < REQUESTS; request++)
                CU_ASSERT_EQUAL(memcmp(r[0].tokens[request], r[i].tokens[request], sizeof r[0].tokens[request]), 0);
        }
        /* With slices a token may be computed in a step with them, or in one without. */
        if (cpa_test_promises_bits() && kinds[kind].slices == CPA_SLICES_NONE)
            CU_ASSERT_EQUAL(r[0].stats.output_digest, r[1].stats.output_digest);
    }
    free(expected);
}

static const cpa_test TESTS[] = {
    {"every family gives the tokens of transformers", every_family_gives_the_tokens_of_transformers},
    {"chunks, shared prefixes and preemption do not matter", ways_to_run_do_not_matter},
    {"latent attention gives the tokens of transformers", latent_attention_gives_the_tokens_of_transformers},
    {"steps that decode by an indexer are captured", steps_that_decode_by_an_indexer_are_captured},
    {"experts may lie anywhere", experts_may_lie_anywhere},
    {"slices of the weights give the same tokens", slices_of_the_weights_give_the_same_tokens},
    {"draws depend on the seed alone", draws_depend_on_the_seed_alone},
    {"penalties know the tokens of a sequence", penalties_know_the_tokens_of_a_sequence},
    {"frequency penalties count the output", frequency_penalties_count_the_output},
    {"drafts do not change tokens", drafts_do_not_change_tokens},
};

CPA_MPI_DEVICE_TEST_MAIN("models through the engine", TESTS)
