/* Answers that are constrained, biased, or must have some length: each token is the one that a computation beside the
 * engine draws, whatever ranks, chunks, preemptions and drafts; what a constraint breaks is its own request alone. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/hash.h"
#include "src/engine/engine_internal.h"
#include "tests/fixtures/bigram_model.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { MOST = 16, OUTPUTS = 64, WORDS = (BIGRAM_VOCAB + 31) / 32, VOCAB = BIGRAM_VOCAB };

/* ---- a constraint: what may come follows from a state, which follows from the tokens ---- */

typedef struct walk {
    uint64_t state, states;
    int keyed;
    int64_t fail_accept, fail_mask, none, only_end; /* at that many tokens; -1: never */
    uint32_t end;                                   /* of the last */
    /* What it has seen. */
    uint32_t tokens[OUTPUTS];
    int64_t accepted, masks, closed;
} walk;

static uint64_t next_state(const walk *w, uint64_t state, uint32_t token) {
    return cpa_mix64(state * VOCAB + token) % w->states;
}

static int may_follow(uint64_t state, uint32_t token) {
    return cpa_mix64(state + token * CPA_GOLDEN) % 3 == 0;
}

static cpa_status walk_accept(void *ctx, uint32_t token, cpa_error *err) {
    walk *w = ctx;
    if (w->accepted == w->fail_accept) {
        snprintf(err->message, sizeof err->message, "walk: no way by token %u", token);
        return CPA_INVALID;
    }
    w->state = next_state(w, w->state, token);
    w->tokens[w->accepted++] = token;
    return CPA_OK;
}

static void set_bit(uint32_t *words, uint32_t token) {
    words[token / 32] |= 1u << token % 32;
}

static cpa_status walk_mask(void *ctx, uint32_t *words, cpa_error *err) {
    walk *w = ctx;
    w->masks++;
    if (w->accepted == w->fail_mask) {
        snprintf(err->message, sizeof err->message, "walk: no mask");
        return CPA_IO;
    }
    words[WORDS - 1] = ~0u << VOCAB % 32; /* behind the vocabulary */
    if (w->accepted == w->none) return CPA_OK;
    if (w->accepted == w->only_end) {
        set_bit(words, w->end);
        return CPA_OK;
    }
    for (uint32_t t = 0; t < VOCAB; t++)
        if (may_follow(w->state, t)) set_bit(words, t);
    return CPA_OK;
}

static uint64_t walk_key(void *ctx) {
    const walk *w = ctx;
    return w->keyed ? 1 + w->state : 0;
}

static void walk_close(void *ctx) {
    ((walk *)ctx)->closed++;
}

static const cpa_constraint_ops walk_ops = {sizeof walk_ops, walk_accept, walk_mask, walk_key, walk_close};

/* ---- a run ---- */

typedef struct limits_run {
    bigram_model bigram;
    cpa_engine_options options;
    cpa_engine *engine;
    int n;
    cpa_request requests[MOST];
    cpa_sampling samplings[MOST];
    walk walks[MOST];
    uint32_t tokens[MOST][OUTPUTS];
    float logprobs[MOST][OUTPUTS];
    int64_t ended[MOST]; /* output tokens; -1: not told */
    cpa_finish_reason reason[MOST];
    char error[MOST][256];
    int64_t cancel_at; /* of request 0; 0: never */
    cpa_engine_stats stats;
} limits_run;

static limits_run run; /* too large for the stack */

static void begin(void) {
    memset(&run, 0, sizeof run);
    run.options = cpa_test_engine_options();
    bigram_model_open(&run.bigram, &run.options.model.attention, 11);
    run.options.network = &run.bigram.model;
    run.options.token_at = bigram_token_at;
}

/* A request, without a constraint; its place in the run. */
static int add(int64_t prompt, int64_t outputs, cpa_sampling sampling) {
    const int i = run.n++;
    run.samplings[i] = sampling;
    run.samplings[i].size = sizeof sampling;
    run.requests[i] = (cpa_request){.size = sizeof(cpa_request),
                                    .id = (uint64_t)i,
                                    .prompt_tokens = prompt,
                                    .output_tokens = outputs,
                                    .sampling = &run.samplings[i]};
    run.ended[i] = -1;
    return i;
}

static walk *constrain(int i, uint64_t states, int keyed) {
    run.walks[i] =
        (walk){.states = states, .keyed = keyed, .fail_accept = -1, .fail_mask = -1, .none = -1, .only_end = -1};
    run.requests[i].constraint = &walk_ops;
    run.requests[i].constraint_ctx = &run.walks[i];
    return &run.walks[i];
}

static void on_token(void *ctx, uint64_t request, int64_t index, uint32_t token, float logprob) {
    (void)ctx;
    CPA_ASSERT_ORDER(index, <, OUTPUTS);
    run.tokens[request][index] = token;
    run.logprobs[request][index] = logprob;
    if (request == 0 && index + 1 == run.cancel_at) CU_ASSERT_EQUAL(cpa_engine_cancel(run.engine, 0), CPA_OK);
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    (void)ctx;
    run.ended[result->id] = result->output_tokens;
    run.reason[result->id] = result->reason;
    snprintf(run.error[result->id], sizeof run.error[0], "%s", result->error);
    CU_ASSERT_EQUAL(run.walks[result->id].closed, 0); /* it is closed after this */
}

static void run_all(void) {
    run.options.on_token = on_token;
    run.engine = cpa_test_engine(&run.options, run.requests, run.n);
    CU_ASSERT_PTR_NOT_NULL_FATAL(run.engine);
    const cpa_status status = cpa_engine_run(run.engine, on_finish, NULL, NULL);
    if (status != CPA_OK) printf("%s\n", cpa_engine_error(run.engine));
    CU_ASSERT_EQUAL(status, CPA_OK);
    cpa_engine_get_stats(run.engine, &run.stats, sizeof run.stats);
    CU_ASSERT_EQUAL(run.stats.verify_violations, 0);
    for (int i = 0; cpa_test_rank() == 0 && i < run.n; i++) {
        CPA_ASSERT_ORDER(run.ended[i], >=, 0);
        CU_ASSERT_EQUAL(run.walks[i].closed, run.requests[i].constraint != NULL);
        CU_ASSERT_EQUAL(memcmp(run.walks[i].tokens, run.tokens[i], (size_t)run.walks[i].accepted * 4), 0);
    }
    bigram_model_close(&run.bigram);
    cpa_engine_destroy(run.engine);
}

/* ---- what should come ---- */

static int is_stop(const cpa_sampling *s, uint32_t token) {
    for (int64_t i = 0; i < s->n_stop_ids; i++)
        if (s->stop_ids[i] == token) return 1;
    return 0;
}

/* The logit of a token, -infinity where it may not come; penalties aside. */
static double adjusted(int i, uint64_t state, int64_t index, uint32_t before, uint32_t token) {
    const cpa_sampling *s = &run.samplings[i];
    double l = (double)run.bigram.logits[before][token];
    for (int64_t b = 0; b < s->n_logit_biases; b++)
        if (s->logit_biases[b].token == token) l += (double)s->logit_biases[b].bias;
    if (run.requests[i].constraint && !may_follow(state, token)) return -INFINITY;
    return index < s->min_tokens && is_stop(s, token) ? -INFINITY : l;
}

/* The token that the operator alone, on the host, draws from these logits. */
static uint32_t draw(cpa_stream *stream, const cpa_sampling *s, const float *logits, int64_t position) {
    const float top_p = s->top_p > 0 ? s->top_p : 1;
    uint32_t token = 0;
    const cpa_sample_args args = {.size = sizeof args,
                                  .rows = 1,
                                  .vocabulary = VOCAB,
                                  .logits = logits,
                                  .temperature = &s->temperature,
                                  .top_k = &s->top_k,
                                  .top_p = &top_p,
                                  .min_p = &s->min_p,
                                  .seed = &s->seed,
                                  .position = &position,
                                  .tokens = &token};
    CU_ASSERT_EQUAL(cpa_sample(&args, stream), CPA_OK);
    return token;
}

static double log_softmax(const float *logits, uint32_t token) {
    double sum = 0;
    for (int t = 0; t < VOCAB; t++) sum += exp((double)logits[t]);
    return (double)logits[token] - log(sum);
}

/* Compares the first `most` tokens of request i; returns how many it should have in all. */
static int64_t compare(cpa_stream *stream, int i, int64_t most) {
    const cpa_request *request = &run.requests[i];
    const cpa_sampling *s = &run.samplings[i];
    uint64_t state = 0;
    uint32_t before = run.options.token_at(NULL, request->id, request->prompt_tokens - 1), ended = 0;
    int64_t index = 0, wrong = 0;
    for (; index < request->output_tokens && index < most && !ended; index++) {
        float logits[VOCAB];
        uint32_t best = 0;
        for (uint32_t t = 0; t < VOCAB; t++) {
            logits[t] = (float)adjusted(i, state, index, before, t);
            if (logits[t] > logits[best]) best = t;
        }
        const uint32_t want = s->temperature > 0 ? draw(stream, s, logits, request->prompt_tokens + index) : best;
        wrong += run.tokens[i][index] != want;
        if (s->logprobs)
            wrong += fabs((double)run.logprobs[i][index] - log_softmax(run.bigram.logits[before], want)) > 1e-4;
        if (request->constraint) state = next_state(&run.walks[i], state, want);
        ended = (uint32_t)is_stop(s, want);
        before = want;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    return index;
}

/* All requests but those in the bits of `others` end as they should. */
static void expect_all_but(unsigned others) {
    cpa_device *device;
    cpa_stream *stream;
    const cpa_device_options host = {.size = sizeof host, .backend = CPA_BACKEND_HOST, .threads = 1};
    if (cpa_test_rank() > 0) return;
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&host, &device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_create(device, &stream, NULL), CPA_OK);
    for (int i = 0; i < run.n; i++) {
        if (others >> i & 1) {
            compare(stream, i, run.ended[i]);
            continue;
        }
        CU_ASSERT_EQUAL(run.ended[i], compare(stream, i, OUTPUTS));
        CU_ASSERT_EQUAL(run.reason[i],
                        run.ended[i] < run.requests[i].output_tokens ? CPA_FINISH_STOP : CPA_FINISH_LENGTH);
    }
    cpa_stream_destroy(stream);
    cpa_device_close(device);
}

/* ---- tests ---- */

static const uint32_t stops[] = {7, 250, 31, 64, 100, 129, 201, 202, 203, 204, 205, 206};
static const cpa_logit_bias biases[] = {{299, 3.5f}, {0, -100}, {33, 5}, {7, 2}, {128, 100}};

/* Some are constrained, some are not, some have all that there is. */
static void add_mixed(void) {
    const cpa_sampling greedy = {.logprobs = 1};
    const cpa_sampling drawn = {.temperature = 0.9f, .seed = 5, .logprobs = 1};
    const cpa_sampling filtered = {.temperature = 1.2f, .top_k = 30, .top_p = 0.95f, .min_p = 0.01f, .seed = 6};
    cpa_sampling biased = {.temperature = 1, .logit_biases = biases, .n_logit_biases = 4, .seed = 7};
    cpa_sampling ending = {.stop_ids = stops, .n_stop_ids = 12, .min_tokens = 9, .temperature = 1, .seed = 8};
    cpa_sampling all = ending;
    all.logit_biases = biases;
    all.n_logit_biases = 5;
    constrain(add(40, 30, greedy), 8, 1);
    add(3, 25, drawn);
    constrain(add(110, 21, drawn), 8, 1);
    constrain(add(65, 40, filtered), 5, 0);
    add(17, 20, biased);
    add(70, 50, ending);
    constrain(add(33, 50, ending), 8, 1);
    constrain(add(20, 50, all), 4, 1);
    constrain(add(60, 1, drawn), 8, 1);
    add(9, 33, greedy);
}

static void tokens_are_those_that_masks_and_biases_let_through(void) {
    static const int64_t budgets[] = {17, 96};
    for (int i = 0; i < 2; i++) {
        begin();
        add_mixed();
        run.options.max_num_batched_tokens = budgets[i];
        run_all();
        expect_all_but(0);
        int64_t masks = 0, accepted = 0;
        for (int w = 0; w < run.n; w++) masks += run.walks[w].keyed * run.walks[w].masks;
        for (int w = 0; w < run.n; w++) accepted += run.walks[w].keyed * run.walks[w].accepted;
        if (cpa_test_rank() == 0) CU_ASSERT(accepted > 60 && masks <= 8); /* one for each key */
    }
}

static void tokens_are_the_same_after_preemptions_and_on_one_rank(void) {
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int i = 0; i < 3; i++) {
        begin();
        add_mixed();
        if (i < 2) run.options.num_blocks = 14 / size + 3;
        run.options.preemption = i == 1 ? CPA_PREEMPT_SWAP : CPA_PREEMPT_RECOMPUTE;
        run.options.swap_bytes = i == 1 ? 4 << 20 : 0;
        if (i == 2) run.options.local_context = 80;
        run_all();
        expect_all_but(0);
        CU_ASSERT(i == 2 || run.stats.preemptions > 0);
    }
}

/* Of those that are not constrained, with n-grams; some of them begin to repeat themselves. */
static void the_others_are_drafted_for(void) {
    begin();
    add_mixed();
    add(8, OUTPUTS, (cpa_sampling){.logit_biases = biases + 4, .n_logit_biases = 1}); /* 128 for ever */
    run.options.drafter = CPA_DRAFT_NGRAM;
    run.options.ngram_min = 1;
    run_all();
    expect_all_but(0);
    CPA_ASSERT_ORDER(run.stats.accepted_tokens, >, 20);
    /* min_tokens, with drafts in front of it and behind. */
    begin();
    add(8, OUTPUTS,
        (cpa_sampling){.logit_biases = biases + 4,
                       .n_logit_biases = 1,
                       .stop_ids = &biases[4].token,
                       .n_stop_ids = 1,
                       .min_tokens = 9});
    add(8, OUTPUTS,
        (cpa_sampling){.logit_biases = biases + 2,
                       .n_logit_biases = 3,
                       .stop_ids = &biases[3].token,
                       .n_stop_ids = 1,
                       .min_tokens = 31});
    run.options.drafter = CPA_DRAFT_NGRAM;
    run.options.ngram_min = 1;
    run_all();
    expect_all_but(0);
    CPA_ASSERT_ORDER(run.stats.accepted_tokens, >, 10);
}

static uint32_t same_prompt(void *ctx, uint64_t request, int64_t position) {
    (void)request;
    return bigram_token_at(ctx, 99, position);
}

/* They share its blocks. */
static void samples_of_a_prompt_have_constraints_of_their_own(void) {
    begin();
    run.options.token_at = same_prompt;
    for (int i = 0; i < 5; i++) {
        const int at = add(48, 20, (cpa_sampling){.temperature = 1, .seed = (uint64_t)i});
        run.requests[at].group = 9;
        if (i < 4) constrain(at, (uint64_t)(1 + i), i % 2);
    }
    run_all();
    expect_all_but(0);
    CPA_ASSERT_ORDER(run.stats.prefix_hits, >, 0);
}

/* More masks than there are slots. */
static void masks_give_way_to_others(void) {
    begin();
    for (int i = 0; i < MOST; i++) constrain(add(10 + i, OUTPUTS, (cpa_sampling){.temperature = 2, .seed = 3}), 700, 1);
    run_all();
    expect_all_but(0);
    int64_t masks = 0;
    for (int w = 0; w < run.n; w++) masks += run.walks[w].masks;
    if (cpa_test_rank() == 0) CPA_ASSERT_ORDER(masks, >, 6 + 256);
}

static void a_constraint_that_breaks_fails_its_request_alone(void) {
    static const char *const lines[] = {"walk: no way by token", "walk: no mask",
                                        "the constraint lets no token through",
                                        "the constraint lets only an end through, after 4 tokens of min_tokens 9"};
    begin();
    const cpa_sampling drawn = {
        .temperature = 1, .seed = 4, .stop_ids = stops, .n_stop_ids = 12, .min_tokens = 9, .logprobs = 1};
    for (int i = 0; i < 4; i++) {
        walk *w = constrain(add(20 + i, 12, drawn), 6, 0);
        *(i == 0 ? &w->fail_accept : i == 1 ? &w->fail_mask : i == 2 ? &w->none : &w->only_end) = i == 2 ? 0 : 4;
        w->end = stops[5];
    }
    /* With the last token; an accept is not asked for then. */
    const cpa_sampling plain = {.temperature = 1, .seed = 5};
    constrain(add(30, 5, plain), 6, 0)->fail_mask = 4;
    constrain(add(31, 5, plain), 6, 0)->fail_accept = 4;
    add_mixed();
    run_all();
    expect_all_but(31);
    for (int i = 0; cpa_test_rank() == 0 && i < 5; i++) {
        CU_ASSERT_EQUAL(run.reason[i], CPA_FINISH_FAILED);
        CU_ASSERT_EQUAL(run.ended[i], i == 0 ? 5 : i == 2 ? 0 : 4);
        CU_ASSERT_EQUAL(strncmp(run.error[i], lines[i % 4 + (i == 4)], strlen(lines[i % 4 + (i == 4)])), 0);
    }
    CU_ASSERT_EQUAL(run.stats.requests_failed, 5);
}

static void ends_of_all_kinds_close_it_once(void) {
    begin();
    constrain(add(40, OUTPUTS, (cpa_sampling){.temperature = 1}), 8, 1);
    constrain(add(40, OUTPUTS, (cpa_sampling){.temperature = 1}), 8, 1);
    constrain(add(40, 20, (cpa_sampling){.temperature = 1}), 8, 1);
    run.cancel_at = 6;
    run.requests[1].deadline_s = 1e-9;
    run_all(); /* which looks at that */
    expect_all_but(3);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(run.reason[0], CPA_FINISH_CANCELLED);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(run.reason[1], CPA_FINISH_EXPIRED);
    /* An engine that never runs. */
    begin();
    constrain(add(40, 20, (cpa_sampling){.temperature = 1}), 8, 1);
    cpa_engine *engine = cpa_test_engine(&run.options, run.requests, 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
    CU_ASSERT_EQUAL(run.walks[0].closed, 0);
    cpa_engine_destroy(engine);
    CU_ASSERT_EQUAL(run.walks[0].closed, cpa_test_rank() == 0);
}

static void expect_refused(cpa_engine *engine, cpa_status status, const char *line) {
    if (cpa_test_rank() > 0) return;
    CU_ASSERT_EQUAL(cpa_engine_submit(engine, &run.requests[0]), status);
    CU_ASSERT_STRING_EQUAL(cpa_engine_error(engine), line);
    CU_ASSERT_EQUAL(run.walks[0].closed, 0);
}

static void what_can_be_no_limit_is_refused(void) {
    static const cpa_logit_bias twice[] = {{3, 1}, {4, 1}, {3, 2}}, beyond = {VOCAB, 1}, nan = {3, NAN};
    cpa_constraint_ops ops = walk_ops;
    begin();
    cpa_engine *engine = cpa_test_engine(&run.options, NULL, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
    add(4, 5, (cpa_sampling){.min_tokens = 6});
    expect_refused(engine, CPA_INVALID, "request 0: min_tokens 6, expected 0 to its 5 output tokens");
    run.samplings[0] = (cpa_sampling){.size = sizeof(cpa_sampling), .logit_biases = twice, .n_logit_biases = 3};
    expect_refused(engine, CPA_INVALID, "request 0: two logit biases of token 3");
    run.samplings[0] = (cpa_sampling){.size = sizeof(cpa_sampling), .logit_biases = &beyond, .n_logit_biases = 1};
    expect_refused(engine, CPA_INVALID,
                   "request 0: logit bias 1 of token 300; expected a finite one, of a token below 300");
    run.samplings[0].logit_biases = &nan;
    expect_refused(engine, CPA_INVALID,
                   "request 0: logit bias nan of token 3; expected a finite one, of a token below 300");
    run.samplings[0] = (cpa_sampling){.size = sizeof(cpa_sampling)};
    constrain(0, 8, 1);
    run.requests[0].constraint = &ops;
    ops.mask = NULL;
    char line[200];
    snprintf(line, sizeof line, "request 0: its constraint has size %zu, expected %zu or more, and accept and mask",
             sizeof ops, sizeof ops);
    expect_refused(engine, CPA_INVALID, line);
    cpa_engine_destroy(engine);
    for (int given = 0; given < 2; given++) {
        begin();
        run.options.outputs_given = given;
        if (!given) run.bigram.model.vocabulary = 0;
        engine = cpa_test_engine(&run.options, NULL, 0);
        CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
        constrain(add(4, 5, (cpa_sampling){.temperature = 1}), 8, 1);
        expect_refused(engine, given ? CPA_INVALID : CPA_UNSUPPORTED,
                       given ? "request 0: a constraint, where output tokens are given"
                             : "request 0: a constraint, logit_biases or min_tokens, but the network does not tell its "
                               "vocabulary");
        cpa_engine_destroy(engine);
    }
}

static const cpa_test tests[] = {
    {"tokens are those that masks and biases let through", tokens_are_those_that_masks_and_biases_let_through},
    {"tokens are the same after preemptions and on one rank", tokens_are_the_same_after_preemptions_and_on_one_rank},
    {"the others are drafted for", the_others_are_drafted_for},
    {"samples of a prompt have constraints of their own", samples_of_a_prompt_have_constraints_of_their_own},
    {"masks give way to others", masks_give_way_to_others},
    {"a constraint that breaks fails its request alone", a_constraint_that_breaks_fails_its_request_alone},
    {"ends of all kinds close it once", ends_of_all_kinds_close_it_once},
    {"what can be no limit is refused", what_can_be_no_limit_is_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("draw limits", tests)
