/* Several tokens of a request in a step: whatever was guessed, and whoever guessed it, tokens and digest are those of a
 * run without drafts, on any number of ranks. */
#include <stdio.h>
#include <string.h>

#include "src/engine/engine_internal.h"
#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/chain_model.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { MOST = 16 };

/* One run, and what rank 0 heard of it. */
typedef struct heard {
    chain_model chain;
    cpa_engine_options options;
    cpa_request requests[MOST];
    int64_t n_requests;
    uint64_t cancelled; /* a request that is cancelled when it has got cancel_at tokens */
    int64_t cancel_at;  /* 0: none is */
    cpa_request late;   /* is submitted when the first one has ended; of size 0: there is none */
    cpa_engine *engine;
    int64_t tokens[CHAIN_REQUESTS]; /* by on_token */
    int64_t ended[CHAIN_REQUESTS];  /* output tokens of the result; -1: not told */
    cpa_finish_reason reason[CHAIN_REQUESTS];
    int64_t wrong, leaked;
    cpa_engine_stats stats;
} heard;

/* As the chain gives it, the outputs too. */
static uint32_t given_at(void *ctx, uint64_t request, int64_t position) {
    const chain_model *chain = ctx;
    return chain->text[request / 4][position];
}

static int is_expected(const heard *h, uint64_t request, int64_t index, uint32_t token, float logprob) {
    const chain_model *chain = &h->chain;
    const int64_t at = chain->prompt_tokens[request] + index;
    const int wants = chain->sampling[request].logprobs;
    const float difference = logprob - (wants ? chain->logprob[chain->text[request / 4][at - 1]] : 0);
    return token == chain->text[request / 4][at] && difference * difference < 1e-9f;
}

static void on_token(void *ctx, uint64_t request, int64_t index, uint32_t token, float logprob) {
    heard *h = ctx;
    h->wrong += index != h->tokens[request]++ || !is_expected(h, request, index, token, logprob);
    if (h->cancel_at > 0 && request == h->cancelled && index + 1 == h->cancel_at)
        h->wrong += cpa_engine_cancel(h->engine, request) != CPA_OK;
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    heard *h = ctx;
    h->ended[result->id] = result->output_tokens;
    h->reason[result->id] = result->reason;
    h->wrong += result->output_tokens != h->tokens[result->id];
    if (h->late.size > 0 && result->id == h->requests[0].id)
        h->wrong += cpa_engine_submit(h->engine, &h->late) != CPA_OK;
}

static void begin(heard *h) {
    memset(h, 0, sizeof *h);
    h->options = cpa_test_engine_options();
    h->options.verify = 0.3;
    chain_model_open(&h->chain, &h->options.model.attention, h->options.seed);
    h->options.network = &h->chain.model;
    h->options.token_at = chain_token_at;
    h->options.token_ctx = &h->chain;
    h->options.on_token = on_token;
    for (int i = 0; i < CHAIN_REQUESTS; i++) h->ended[i] = -1;
}

static void add(heard *h, int family, int index, int64_t prompt, int64_t output, const cpa_sampling *sampling) {
    h->requests[h->n_requests++] = chain_request(&h->chain, family, index, prompt, output, sampling);
}

/* Prompts and answers of all lengths, so that chunks lie across runs and blocks in many ways. */
static void add_mixed(heard *h) {
    for (int f = 0; f < 8; f++) add(h, f, 0, 3 + 11 * f + 29 * f % 41, 5 + 13 * f % 37, NULL);
}

/* Drafts of the chain, `rightness` of ten of them right. */
static void use_drafts(heard *h, int32_t most, int64_t rightness) {
    h->options.drafter = CPA_DRAFT_MODEL;
    h->options.draft_tokens = most;
    h->chain.rightness = rightness;
}

static void run(heard *h) {
    h->engine = cpa_test_engine(&h->options, h->requests, h->n_requests);
    CU_ASSERT_PTR_NOT_NULL_FATAL(h->engine);
    cpa_status status = cpa_engine_run(h->engine, on_finish, NULL, h);
    if (status != CPA_OK) printf("%s\n", cpa_engine_error(h->engine));
    CU_ASSERT_EQUAL(status, CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_get_stats(h->engine, &h->stats, sizeof h->stats), CPA_OK);
    const cpa_scheduler *s = h->engine->scheduler;
    for (int32_t r = 0; s && r < s->options.map.cp_size; r++)
        h->leaked += s->options.num_blocks - cpa_block_pool_free_count(s->pools[r]);
    if (s) h->leaked += s->options.max_num_seqs - s->n_free_indices;
    chain_model_close(&h->chain);
    cpa_engine_destroy(h->engine);
    CU_ASSERT_EQUAL(h->wrong, 0);
    CU_ASSERT_EQUAL(h->chain.wrong, 0);
    CU_ASSERT_EQUAL(h->chain.drafts_wrong, 0);
    CU_ASSERT_EQUAL(h->leaked, 0);
    CU_ASSERT_EQUAL(h->stats.verify_violations, 0);
    for (int64_t i = 0; cpa_test_rank() == 0 && i < h->n_requests; i++) CU_ASSERT(h->ended[h->requests[i].id] >= 0);
}

/* Both runs gave the same tokens, each counted once. */
static void expect_same(const heard *h, const heard *plain) {
    for (int i = 0; cpa_test_rank() == 0 && i < CHAIN_REQUESTS; i++) {
        CU_ASSERT_EQUAL(h->ended[i], plain->ended[i]);
        CU_ASSERT_EQUAL(h->reason[i], plain->reason[i]);
    }
    CU_ASSERT_EQUAL(h->stats.output_tokens, plain->stats.output_tokens);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(h->stats.output_digest, plain->stats.output_digest);
    CU_ASSERT_EQUAL(plain->stats.draft_tokens, 0);
    CU_ASSERT(h->stats.accepted_tokens <= h->stats.draft_tokens);
}

static void tokens_are_the_same_however_many_drafts_are_right(void) {
    for (int given = 0; given < 2; given++) {
        heard plain, h;
        begin(&plain);
        add_mixed(&plain);
        run(&plain);
        for (int64_t rightness = 0; rightness <= 10; rightness += 5) {
            begin(&h);
            add_mixed(&h);
            use_drafts(&h, 4, rightness);
            h.options.outputs_given = given;
            if (given) h.options.token_at = given_at;
            run(&h);
            expect_same(&h, &plain);
            CU_ASSERT(h.stats.drafted_chunks > 0);
            if (rightness == 0) CU_ASSERT_EQUAL(h.stats.accepted_tokens, 0);
            if (rightness == 5)
                CU_ASSERT(h.stats.accepted_tokens > 0 && h.stats.accepted_tokens < h.stats.draft_tokens);
            if (rightness == 10) {
                CU_ASSERT_EQUAL(h.stats.accepted_tokens, h.stats.draft_tokens);
                CU_ASSERT(h.stats.steps < plain.stats.steps);
            }
            if (cpa_test_rank() == 0) CU_ASSERT(h.chain.drafts_ended > 0 && h.chain.drafts_ended <= h.n_requests);
        }
    }
}

/* What a run is made of besides, and what it changes. */
typedef enum variant {
    RECOMPUTES = 0,
    SWAPS,
    ON_ONE_RANK,
    SHORT_RUNS,
    WINDOW,
    PASS_KV,
    FEW_TOKENS,
    DEEP,
    VARIANTS
} variant;

static void set_variant(heard *h, variant v) {
    cpa_engine_options *o = &h->options;
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (v == RECOMPUTES || v == SWAPS) o->num_blocks = 24 / size + 2;
    if (v == SWAPS) {
        o->preemption = CPA_PREEMPT_SWAP;
        o->swap_bytes = 4 << 20;
    }
    if (v == ON_ONE_RANK) o->local_context = 70;
    if (v == SHORT_RUNS) o->interleave = 2;
    if (v == WINDOW) o->model.mask.window = 40;
    if (v == PASS_KV) o->algorithm = CPA_PASS_KV;
    if (v == FEW_TOKENS) o->max_num_batched_tokens = 7;
}

static void tokens_are_the_same_whatever_else_happens(void) {
    for (variant v = RECOMPUTES; v < VARIANTS; v++) {
        heard plain, h;
        begin(&plain);
        set_variant(&plain, v);
        for (int f = 0; f < 6; f++) add(&plain, f, 0, 60, 40, NULL);
        run(&plain);
        begin(&h);
        set_variant(&h, v);
        for (int f = 0; f < 6; f++) add(&h, f, 0, 60, 40, NULL);
        use_drafts(&h, v == DEEP ? 20 : 3, 8);
        run(&h);
        expect_same(&h, &plain);
        CU_ASSERT(h.stats.accepted_tokens > 0 && h.stats.accepted_tokens < h.stats.draft_tokens);
        if (v == RECOMPUTES || v == SWAPS) CU_ASSERT(h.stats.preemptions > 0);
        if (v == SWAPS) CU_ASSERT(h.stats.swapped_in > 0);
    }
}

/* Ends by a token of theirs in the middle of what a step has accepted, at its beginning and at its end. */
static void add_stopping(heard *h, uint32_t stops[8], cpa_sampling samplings[8]) {
    for (int f = 0; f < 8; f++) {
        stops[f] = h->chain.text[f][90 + 3 * f];
        samplings[f] =
            (cpa_sampling){.size = sizeof *samplings, .stop_ids = &stops[f], .n_stop_ids = 1, .logprobs = f % 2};
        add(h, f, 0, 90, 25, &samplings[f]);
    }
}

static void what_follows_an_end_is_not_counted(void) {
    uint32_t stops[8];
    cpa_sampling samplings[8];
    heard plain, h;
    begin(&plain);
    add_stopping(&plain, stops, samplings);
    run(&plain);
    for (int64_t rightness = 5; rightness <= 10; rightness += 5) {
        begin(&h);
        add_stopping(&h, stops, samplings);
        use_drafts(&h, 5, rightness);
        run(&h);
        expect_same(&h, &plain);
        CU_ASSERT(h.stats.accepted_tokens > 0);
    }
}

/* Samples of a prompt, and a request that has the first one's answer in its prompt: it finds what was accepted. */
static void only_what_was_accepted_is_found(void) {
    heard plain, h;
    for (int drafts = 0; drafts < 2; drafts++) {
        heard *r = drafts ? &h : &plain;
        begin(r);
        add(r, 2, 0, 40, 60, NULL);
        add(r, 2, 1, 40, 17, NULL);
        r->late = chain_request(&r->chain, 2, 2, 97, 9, NULL);
        r->requests[0].group = r->requests[1].group = 5;
        if (drafts) use_drafts(r, 4, 6);
        run(r);
    }
    expect_same(&h, &plain);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(h.ended[h.late.id], 9);
    CU_ASSERT(h.stats.prefix_hits >= 6);
}

/* Trees: the fixture's model knows no rows but the one before, so that tokens show which row counts; the sampled check,
 * of every second row, that each sees those that it comes behind and no others. */
static void tokens_are_the_same_with_trees(void) {
    for (int rightness = 5; rightness <= 10; rightness += 5) {
        heard plain, h;
        for (int drafts = 0; drafts < 2; drafts++) {
            heard *r = drafts ? &h : &plain;
            begin(r);
            add_mixed(r);
            r->options.verify = 0.5;
            if (drafts) use_drafts(r, 7, rightness);
            r->chain.branches = 2;
            run(r);
        }
        CU_ASSERT(h.stats.accepted_tokens > 0 && h.stats.accepted_tokens < h.stats.draft_tokens);
        CU_ASSERT(h.stats.steps < plain.stats.steps);
        CU_ASSERT_EQUAL(h.stats.output_tokens, plain.stats.output_tokens);
    }
}

/* The fixture compares what each row is told of the tokens before it, drafts included. */
static void penalties_count_the_drafts_before_a_row(void) {
    const cpa_sampling sampling = {.size = sizeof sampling, .presence_penalty = 1};
    for (int64_t rightness = 6; rightness <= 10; rightness += 4) {
        heard h;
        begin(&h);
        for (int f = 0; f < 4; f++) add(&h, f, 0, 40, 30, f < 3 ? &sampling : NULL);
        h.options.num_blocks = h.options.num_blocks < 12 ? h.options.num_blocks : 12; /* histories begin again */
        use_drafts(&h, 4, rightness);
        run(&h);
        int64_t compared[] = {h.chain.on_paths, h.chain.histories};
        MPI_Allreduce(MPI_IN_PLACE, compared, 2, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
        if (cpa_test_promises_bits()) CU_ASSERT(compared[0] > 60 && compared[1] >= 3 * 30);
        CU_ASSERT(h.stats.accepted_tokens > 0);
    }
}

static void a_request_may_be_cancelled_with_drafts_under_way(void) {
    heard h;
    begin(&h);
    add_mixed(&h);
    use_drafts(&h, 4, 7);
    h.cancelled = h.requests[5].id;
    h.cancel_at = 9;
    run(&h);
    if (cpa_test_rank() > 0) return;
    CU_ASSERT_EQUAL(h.reason[h.cancelled], CPA_FINISH_CANCELLED);
    CU_ASSERT(h.ended[h.cancelled] >= 9);
}

/* A chain of so few tokens comes back to where it was. */
static void ngrams_draft_what_repeats_itself(void) {
    heard plain, h;
    for (int drafts = 0; drafts < 2; drafts++) {
        heard *r = drafts ? &h : &plain;
        begin(r);
        for (int f = 0; f < 4; f++) add(r, f, 0, 60, 180, NULL);
        if (drafts) r->options.drafter = CPA_DRAFT_NGRAM;
        run(r);
    }
    expect_same(&h, &plain);
    CU_ASSERT(h.stats.accepted_tokens > 0);
    CU_ASSERT(h.stats.steps < plain.stats.steps);
}

/* Where a draft is wrong nobody asks what came of it. */
static void what_is_not_finite_of_wrong_drafts_is_nobodys_fault(void) {
    heard plain, h;
    if (!cpa_test_promises_bits()) return; /* the fixture writes NaN on the host */
    for (int drafts = 0; drafts < 2; drafts++) {
        heard *r = drafts ? &h : &plain;
        begin(r);
        add_mixed(r);
        r->options.verify = 0;
        r->chain.poisons = 1;
        if (drafts) use_drafts(r, 4, 6);
        run(r);
    }
    expect_same(&h, &plain);
    CU_ASSERT_EQUAL(h.stats.nonfinite_rows, 0);
    CU_ASSERT_EQUAL(h.stats.requests_failed, 0);
}

static void drafters_that_cannot_be_are_refused(void) {
    for (int i = 0; i < 5; i++) {
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        heard h;
        begin(&h);
        h.options.drafter = i == 0 ? (cpa_drafter)3 : i < 3 ? CPA_DRAFT_NGRAM : CPA_DRAFT_MODEL;
        if (i == 1) h.options.draft_tokens = -1;
        if (i == 2) h.options.ngram_min = 5, h.options.ngram_max = 4;
        if (i == 3) h.options.network = NULL;
        if (i == 4) h.chain.model.draft = NULL;
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &h.options, &engine, &err), CPA_INVALID);
        static const char *const said[] = {"drafter: 3", "draft_tokens: -1", "5 to 4 tokens", "draft is NULL",
                                           "draft is NULL"};
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, said[i]));
    }
}

static const cpa_test tests[] = {
    {"tokens are the same however many drafts are right", tokens_are_the_same_however_many_drafts_are_right},
    {"tokens are the same whatever else happens", tokens_are_the_same_whatever_else_happens},
    {"what follows an end is not counted", what_follows_an_end_is_not_counted},
    {"only what was accepted is found", only_what_was_accepted_is_found},
    {"tokens are the same with trees", tokens_are_the_same_with_trees},
    {"penalties count the drafts before a row", penalties_count_the_drafts_before_a_row},
    {"a request may be cancelled with drafts under way", a_request_may_be_cancelled_with_drafts_under_way},
    {"n-grams draft what repeats itself", ngrams_draft_what_repeats_itself},
    {"what is not finite of wrong drafts is nobody's fault", what_is_not_finite_of_wrong_drafts_is_nobodys_fault},
    {"drafters that cannot be are refused", drafters_that_cannot_be_are_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("drafts", tests)
