/* Several tokens of a request in a step: whatever was guessed, and whoever guessed it, tokens and digest are those of a
 * run without drafts, on any number of ranks. */
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "tests/fixtures/chain_run.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static const double VERIFY = 0.3;

/* As the chain gives it, the outputs too. */
static uint32_t given_at(void *ctx, uint64_t request, int64_t position) {
    const chain_model *chain = ctx;
    return chain->text[request / 4][position];
}

/* Prompts and answers of all lengths, so that chunks lie across runs and blocks in many ways. */
static void add_mixed(chain_run *h) {
    for (int f = 0; f < 8; f++) chain_run_add(h, f, 0, 3 + 11 * f + 29 * f % 41, 5 + 13 * f % 37, NULL);
}

/* Drafts of the chain, `rightness` of ten of them right. */
static void use_drafts(chain_run *h, int32_t most, int64_t rightness) {
    h->options.drafter = CPA_DRAFT_MODEL;
    h->options.draft_tokens = most;
    h->chain.rightness = rightness;
}

/* Both runs gave the same tokens, each counted once. */
static void expect_same(const chain_run *h, const chain_run *plain) {
    for (int i = 0; cpa_test_rank() == 0 && i < CHAIN_REQUESTS; i++) {
        CU_ASSERT_EQUAL(h->ended[i], plain->ended[i]);
        CU_ASSERT_EQUAL(h->reason[i], plain->reason[i]);
    }
    CU_ASSERT_EQUAL(h->stats.output_tokens, plain->stats.output_tokens);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(h->stats.output_digest, plain->stats.output_digest);
    CU_ASSERT_EQUAL(plain->stats.draft_tokens, 0);
    CPA_ASSERT_ORDER(h->stats.accepted_tokens, <=, h->stats.draft_tokens);
}

static void tokens_are_the_same_however_many_drafts_are_right(void) {
    static const struct {
        int64_t rightness;
        int given;
    } cases[] = {{0, 0}, {5, 0}, {5, 1}, {10, 0}};
    chain_run plain, h;
    chain_run_begin(&plain, VERIFY);
    add_mixed(&plain);
    chain_run_all(&plain);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int64_t rightness = cases[i].rightness;
        chain_run_begin(&h, VERIFY);
        add_mixed(&h);
        use_drafts(&h, 4, rightness);
        h.options.outputs_given = cases[i].given;
        if (cases[i].given) h.options.token_at = given_at;
        chain_run_all(&h);
        expect_same(&h, &plain);
        CPA_ASSERT_ORDER(h.stats.drafted_chunks, >, 0);
        if (rightness == 0) CU_ASSERT_EQUAL(h.stats.accepted_tokens, 0);
        if (rightness == 5) CU_ASSERT(h.stats.accepted_tokens > 0 && h.stats.accepted_tokens < h.stats.draft_tokens);
        if (rightness == 10) {
            CU_ASSERT_EQUAL(h.stats.accepted_tokens, h.stats.draft_tokens);
            CPA_ASSERT_ORDER(h.stats.steps, <, plain.stats.steps);
        }
        if (cpa_test_rank() == 0) CU_ASSERT(h.chain.drafts_ended > 0 && h.chain.drafts_ended <= h.n_requests);
    }
}

/* What a run is made of besides, and what it changes. */
enum { RECOMPUTES = 1, SWAPS = 2, ON_ONE_RANK = 4, SHORT_RUNS = 8, WINDOW = 16, PASS_KV = 32, FEW_TOKENS = 64 };
typedef struct variant {
    int ways;
    int32_t drafts, branches;
} variant;

static void begin_variant(chain_run *h, variant v) {
    cpa_engine_options *o = &h->options;
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    chain_run_begin(h, VERIFY);
    for (int f = 0; f < 4; f++) chain_run_add(h, f, 0, 60, 30, NULL);
    if (v.ways & (RECOMPUTES | SWAPS)) o->num_blocks = 14 / size + 2;
    if (v.ways & SWAPS) {
        o->preemption = CPA_PREEMPT_SWAP;
        o->swap_bytes = 4 << 20;
    }
    if (v.ways & ON_ONE_RANK) o->local_context = 70;
    if (v.ways & SHORT_RUNS) o->interleave = 2;
    if (v.ways & WINDOW) o->model.mask.window = 40;
    if (v.ways & PASS_KV) o->algorithm = CPA_PASS_KV;
    if (v.ways & FEW_TOKENS) o->max_num_batched_tokens = 7;
}

/* Of trees over a window the first chains are taken, which give the same bits. */
static void tokens_are_the_same_whatever_else_happens(void) {
    static const variant variants[] = {{RECOMPUTES, 3, 1},
                                       {SWAPS, 6, 2},
                                       {ON_ONE_RANK | PASS_KV, 6, 2},
                                       {SHORT_RUNS | FEW_TOKENS, 3, 1},
                                       {SHORT_RUNS | PASS_KV, 6, 2},
                                       {WINDOW, 6, 2},
                                       {0, 20, 1}};
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const variant v = variants[i];
        chain_run plain, h;
        begin_variant(&plain, v);
        chain_run_all(&plain);
        begin_variant(&h, v);
        use_drafts(&h, v.drafts, 8);
        h.chain.branches = v.branches;
        chain_run_all(&h);
        if (v.branches > 1 && !(v.ways & WINDOW)) h.stats.output_digest = plain.stats.output_digest;
        expect_same(&h, &plain);
        CU_ASSERT(h.stats.accepted_tokens > 0 && h.stats.accepted_tokens < h.stats.draft_tokens);
        if (v.ways & (RECOMPUTES | SWAPS)) CPA_ASSERT_ORDER(h.stats.preemptions, >, 0);
        if (v.ways & SWAPS) CPA_ASSERT_ORDER(h.stats.swapped_in, >, 0);
    }
}

/* Ends by a token of theirs in the middle of what a step has accepted, at its beginning and at its end. */
static void add_stopping(chain_run *h, uint32_t stops[8], cpa_sampling samplings[8]) {
    for (int f = 0; f < 8; f++) {
        stops[f] = h->chain.text[f][90 + 3 * f];
        samplings[f] =
            (cpa_sampling){.size = sizeof *samplings, .stop_ids = &stops[f], .n_stop_ids = 1, .logprobs = f % 2};
        chain_run_add(h, f, 0, 90, 25, &samplings[f]);
    }
}

static void what_follows_an_end_is_not_counted(void) {
    uint32_t stops[8];
    cpa_sampling samplings[8];
    chain_run plain, h;
    chain_run_begin(&plain, VERIFY);
    add_stopping(&plain, stops, samplings);
    chain_run_all(&plain);
    chain_run_begin(&h, VERIFY);
    add_stopping(&h, stops, samplings);
    use_drafts(&h, 5, 8);
    chain_run_all(&h);
    expect_same(&h, &plain);
    CPA_ASSERT_ORDER(h.stats.accepted_tokens, >, 0);
}

/* Samples of a prompt, and a request that has the first one's answer in its prompt: it finds what was accepted. */
static void only_what_was_accepted_is_found(void) {
    chain_run plain, h;
    for (int drafts = 0; drafts < 2; drafts++) {
        chain_run *r = drafts ? &h : &plain;
        chain_run_begin(r, VERIFY);
        chain_run_add(r, 2, 0, 40, 60, NULL);
        chain_run_add(r, 2, 1, 40, 17, NULL);
        r->late = chain_request(&r->chain, 2, 2, 97, 9, NULL);
        r->requests[0].group = r->requests[1].group = 5;
        if (drafts) use_drafts(r, 4, 6);
        chain_run_all(r);
    }
    expect_same(&h, &plain);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(h.ended[h.late.id], 9);
    CPA_ASSERT_ORDER(h.stats.prefix_hits, >=, 6);
}

/* Heads of which a device attends two tiles of rows at once. */
static void use_long_heads(chain_run *h) {
    cpa_attention_shape *shape = &h->options.model.attention;
    shape->q_heads = 8;
    shape->k_dim = shape->v_dim = 128;
    shape->dtype = shape->kv_dtype = CPA_BF16;
    h->chain.synthetic.shape = *shape;
}

/* The fixture's next token depends on the one before alone, so that tokens show which rows count; the sampled check,
 * that a row sees those that it comes behind and no others. Small trees are captured in graphs where hardly anything is
 * checked, and of the last layer alone. */
static void tokens_are_the_same_with_trees(void) {
    static const struct {
        double verify;
        int32_t drafts, branches;
        int64_t rightness;
        int long_heads;
    } cases[] = {{0.5, 7, 3, 5, 0}, {0.002, 3, 2, 10, 0}, {0.0005, 7, 2, 3, 1}};
    chain_run plain, h;
    chain_run_begin(&plain, VERIFY);
    add_mixed(&plain);
    chain_run_all(&plain);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        chain_run_begin(&h, cases[i].verify);
        add_mixed(&h);
        use_drafts(&h, cases[i].drafts, cases[i].rightness);
        h.chain.branches = cases[i].branches;
        if (cases[i].long_heads) use_long_heads(&h);
        chain_run_all(&h);
        CU_ASSERT(h.stats.accepted_tokens > 0 && h.stats.accepted_tokens < h.stats.draft_tokens);
        CPA_ASSERT_ORDER(h.stats.steps, <, plain.stats.steps);
        CU_ASSERT_EQUAL(h.stats.output_tokens, plain.stats.output_tokens);
        if (cpa_test_promises_bits()) CU_ASSERT_NOT_EQUAL(h.stats.output_digest, plain.stats.output_digest);
        if (!cpa_test_promises_bits() && i > 0) CPA_ASSERT_ORDER(h.stats.graph_steps, >, 0);
    }
}

/* The fixture compares what each row is told of the tokens before it, drafts included. */
static void penalties_count_the_drafts_before_a_row(void) {
    const cpa_sampling sampling = {.size = sizeof sampling, .presence_penalty = 1};
    for (int32_t branches = 1; branches <= 2; branches++) {
        chain_run h;
        chain_run_begin(&h, VERIFY);
        for (int f = 0; f < 4; f++) chain_run_add(&h, f, 0, 40, 30, f < 3 ? &sampling : NULL);
        h.options.num_blocks = 12; /* histories begin again */
        use_drafts(&h, 4, 7);
        h.chain.branches = branches;
        chain_run_all(&h);
        int64_t compared[] = {h.chain.on_paths, h.chain.histories};
        MPI_Allreduce(MPI_IN_PLACE, compared, 2, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
        if (cpa_test_promises_bits()) CU_ASSERT(compared[0] > 40 && compared[1] >= 3 * 30);
        CPA_ASSERT_ORDER(h.stats.accepted_tokens, >, 0);
    }
}

static void a_request_may_be_cancelled_with_drafts_under_way(void) {
    chain_run h;
    chain_run_begin(&h, VERIFY);
    add_mixed(&h);
    use_drafts(&h, 4, 7);
    h.cancelled = h.requests[5].id;
    h.cancel_at = 9;
    chain_run_all(&h);
    if (cpa_test_rank() > 0) return;
    CU_ASSERT_EQUAL(h.reason[h.cancelled], CPA_FINISH_CANCELLED);
    CPA_ASSERT_ORDER(h.ended[h.cancelled], >=, 9);
}

/* A chain of so few tokens comes back to where it was. */
static void ngrams_draft_what_repeats_itself(void) {
    chain_run plain, h;
    for (int drafts = 0; drafts < 2; drafts++) {
        chain_run *r = drafts ? &h : &plain;
        chain_run_begin(r, VERIFY);
        for (int f = 0; f < 2; f++) chain_run_add(r, f, 0, 60, 120, NULL);
        if (drafts) r->options.drafter = CPA_DRAFT_NGRAM;
        chain_run_all(r);
    }
    expect_same(&h, &plain);
    CPA_ASSERT_ORDER(h.stats.accepted_tokens, >, 0);
    CPA_ASSERT_ORDER(h.stats.steps, <, plain.stats.steps);
}

/* Where a draft is wrong nobody asks what came of it. */
static void what_is_not_finite_of_wrong_drafts_is_nobodys_fault(void) {
    chain_run plain, h;
    if (!cpa_test_promises_bits()) return; /* the fixture writes NaN on the host */
    for (int drafts = 0; drafts < 2; drafts++) {
        chain_run *r = drafts ? &h : &plain;
        chain_run_begin(r, VERIFY);
        add_mixed(r);
        r->options.verify = 0;
        r->chain.poisons = 1;
        if (drafts) use_drafts(r, 4, 6);
        chain_run_all(r);
    }
    expect_same(&h, &plain);
    CU_ASSERT_EQUAL(h.stats.nonfinite_rows, 0);
    CU_ASSERT_EQUAL(h.stats.requests_failed, 0);
}

/* What the planning thread has asked for, and whether it has while the first step ran. */
static _Atomic int64_t furthest_asked;
static int waited_in_vain;

static uint32_t note_asked(void *ctx, uint64_t request, int64_t position) {
    if (position > atomic_load(&furthest_asked)) atomic_store(&furthest_asked, position);
    return chain_token_at(ctx, request, position);
}

/* The first step lasts until the next one is planned. */
static cpa_status wait_for_plan(void *ctx, const cpa_model_step *step, cpa_stream *stream) {
    chain_model *chain = ctx;
    const double begin = cpa_clock_now();
    while (chain->steps == 0 && atomic_load(&furthest_asked) < 96 && cpa_clock_now() - begin < 10) sched_yield();
    waited_in_vain |= chain->steps == 0 && atomic_load(&furthest_asked) < 96;
    return chain_begin_step(ctx, step, stream);
}

/* Chunks of a prompt yield nothing that a drafter would have to know. */
static void a_step_without_tokens_is_planned_ahead_of(void) {
    chain_run h;
    chain_run_begin(&h, 0);
    chain_run_add(&h, 3, 0, 200, 8, NULL); /* in chunks of 96 */
    use_drafts(&h, 4, 8);
    atomic_store(&furthest_asked, 0);
    waited_in_vain = 0;
    h.options.no_prefix_caching = 1; /* nobody asks for digests */
    h.options.token_at = note_asked;
    if (cpa_test_rank() == 0) h.chain.model.begin_step = wait_for_plan;
    chain_run_all(&h);
    CU_ASSERT_EQUAL(waited_in_vain, 0);
    CPA_ASSERT_ORDER(h.stats.accepted_tokens, >, 0);
}

static cpa_status no_drafts(void *ctx, const cpa_model_step *step, uint32_t *guesses, cpa_stream *stream) {
    (void)ctx, (void)step, (void)guesses, (void)stream;
    return CPA_OK;
}

static void drafters_that_cannot_be_are_refused(void) {
    for (int i = 0; i < 8; i++) {
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        chain_run h;
        chain_run_begin(&h, VERIFY);
        h.options.drafter = i == 0 ? (cpa_drafter)3 : i < 3 || i == 7 ? CPA_DRAFT_NGRAM : CPA_DRAFT_MODEL;
        if (i == 1) h.options.draft_tokens = -1;
        if (i == 2) h.options.ngram_min = 5, h.options.ngram_max = 4;
        if (i == 3) h.options.network = NULL;
        if (i == 4) h.chain.model.draft = NULL;
        if (i == 5) h.options.model.draft_layers = h.options.model.layers;
        if (i >= 6) h.options.model.draft_layers = 1;
        if (i == 7) h.chain.model.end_draft = no_drafts;
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &h.options, &engine, &err), CPA_INVALID);
        static const char *const said[] = {"drafter: 3",
                                           "draft_tokens: -1",
                                           "5 to 4 tokens",
                                           "draft is NULL",
                                           "draft is NULL",
                                           "draft_layers: 3, expected 0 or more, and fewer than all layers, 3",
                                           "draft_layers: 1 without a network that has end_step and end_draft",
                                           "draft_layers: 1 with drafter 1, expected 2, the network"};
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
    {"a step without tokens is planned ahead of", a_step_without_tokens_is_planned_ahead_of},
    {"drafters that cannot be are refused", drafters_that_cannot_be_are_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("drafts", tests)
