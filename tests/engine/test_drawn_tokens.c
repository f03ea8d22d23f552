/* Tokens that are drawn while the engine runs, by a model whose next token follows from the one before: the same ids
 * whatever the ranks, chunks, preemptions and prefixes, requests that end with a token, and what is left of them. */
#include <string.h>

#include "src/engine/engine_internal.h"
#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/chain_run.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static const double VERIFY = 0.5;

/* Short and long prompts, whose first chunks end in various steps. */
static void add_mixed(chain_run *h, int families) {
    for (int f = 0; f < families; f++) chain_run_add(h, f, 0, 3 + 11 * f + 29 * f % 41, 5 + 7 * f % 19, NULL);
}

static void tokens_are_the_same_in_any_chunks(void) {
    static const int64_t budgets[] = {7, 33, 96};
    for (int i = 0; i < 3; i++) {
        chain_run h;
        chain_run_begin(&h, VERIFY);
        add_mixed(&h, 8);
        h.options.max_num_batched_tokens = budgets[i];
        h.options.algorithm = i == 1 ? CPA_PASS_KV : CPA_AUTO;
        chain_run_all(&h);
        chain_run_expect_lengths(&h);
        CPA_ASSERT_ORDER(h.chain.results, >, 0);
    }
}

static void tokens_are_the_same_on_one_rank_and_without_graphs(void) {
    chain_run h;
    chain_run_begin(&h, VERIFY);
    add_mixed(&h, 8);
    h.options.local_context = 60; /* some of them */
    chain_run_all(&h);
    chain_run_expect_lengths(&h);
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CU_ASSERT_EQUAL((h.stats.rank_local > 0), (size > 1));
    chain_run_begin(&h, VERIFY);
    add_mixed(&h, 8);
    h.options.enforce_eager = 1;
    chain_run_all(&h);
    chain_run_expect_lengths(&h);
}

static void tokens_are_the_same_after_preemptions(void) {
    for (int swaps = 0; swaps < 2; swaps++) {
        chain_run h;
        chain_run_begin(&h, VERIFY);
        int size;
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        for (int f = 0; f < 6; f++) chain_run_add(&h, f, 0, 60, 40, NULL);
        h.options.num_blocks = 24 / size + 2;
        h.options.preemption = swaps ? CPA_PREEMPT_SWAP : CPA_PREEMPT_RECOMPUTE;
        h.options.swap_bytes = swaps ? 4 << 20 : 0;
        chain_run_all(&h);
        chain_run_expect_lengths(&h);
        CPA_ASSERT_ORDER(h.stats.preemptions, >, 0);
        CU_ASSERT_EQUAL((h.stats.swapped_in > 0), swaps);
    }
}

/* The second request of a family has the prompt of the first and what that drew. There is room for three at once, so
 * that it takes the place of a first one that is done, the one of its own family or of one before. */
static void blocks_of_drawn_tokens_are_found(void) {
    enum { FAMILIES = 3 };
    chain_run h;
    chain_run_begin(&h, VERIFY);
    h.options.max_num_seqs = FAMILIES;
    h.options.local_context =
        CPA_LOCAL_CONTEXT_NONE; /* the second one could go to a rank that has nothing of the first */
    for (int f = 0; f < FAMILIES; f++) chain_run_add(&h, f, 0, 40, 60, NULL);
    for (int f = 0; f < FAMILIES; f++) chain_run_add(&h, f, 1, 97, 9, NULL);
    chain_run_all(&h);
    chain_run_expect_lengths(&h);
    /* All blocks of the second ones' prompts but that of the last token: 97 tokens are 6 blocks of 16, and one more. */
    CU_ASSERT_EQUAL(h.stats.prefix_hits, FAMILIES * 6);
}

/* Where the text of a family has a token for the first time after the prompt. */
static int64_t first_index(const chain_run *h, int family, int64_t prompt, uint32_t token) {
    int64_t index = 0;
    while (h->chain.text[family][prompt + index] != token) index++;
    return index;
}

/* Some stop by a token of theirs, one by one of the model's; all others go on. */
static void add_stopping(chain_run *h, int64_t outputs, uint32_t stops[4], cpa_sampling samplings[4]) {
    h->chain.model.end_ids = &stops[3];
    h->chain.model.n_end_ids = 1;
    stops[3] = h->chain.text[3][60 + 8];
    for (int f = 0; f < 5; f++) {
        if (f < 3) stops[f] = h->chain.text[f][60 + (f == 0 ? 0 : 5 * f)];
        if (f < 3) samplings[f] = (cpa_sampling){.size = sizeof *samplings, .stop_ids = &stops[f], .n_stop_ids = 1};
        chain_run_add(h, f, 0, 60, f < 4 ? outputs : 31, f < 3 ? &samplings[f] : NULL);
    }
}

static void requests_end_with_their_tokens(void) {
    uint32_t stops[4];
    cpa_sampling samplings[4];
    chain_run h, cut;
    chain_run_begin(&h, VERIFY);
    add_stopping(&h, 50, stops, samplings);
    chain_run_all(&h);
    chain_run_begin(&cut, VERIFY);
    for (int f = 0; f < 5; f++) {
        int64_t tokens = 31;
        if (f < 4) tokens = first_index(&h, f, 60, stops[f]) + 1;
        chain_run_add(&cut, f, 0, 60, tokens, NULL);
        if (cpa_test_rank() > 0) continue;
        CU_ASSERT_EQUAL(h.ended[4 * f], tokens);
        CU_ASSERT_EQUAL(h.reason[4 * f], f < 4 ? CPA_FINISH_STOP : CPA_FINISH_LENGTH);
    }
    chain_run_all(&cut);
    chain_run_expect_lengths(&cut);
    /* What was computed beyond an end is in no figure but that of work. */
    CU_ASSERT_EQUAL(h.stats.output_tokens, cut.stats.output_tokens);
    CU_ASSERT_EQUAL(h.stats.requests_finished, 5);
    CPA_ASSERT_ORDER(h.stats.computed_tokens, >, cut.stats.computed_tokens);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(h.stats.output_digest, cut.stats.output_digest);
}

/* With few places, blocks and tokens a step, those that end make room for others. */
static void places_of_requests_that_ended_are_taken_by_others(void) {
    uint32_t stops[8];
    cpa_sampling samplings[8];
    chain_run h;
    chain_run_begin(&h, VERIFY);
    h.options.max_num_seqs = 2;
    h.options.preemption = CPA_PREEMPT_SWAP;
    h.options.swap_bytes = 1 << 20;
    for (int f = 0; f < 8; f++) {
        stops[f] = h.chain.text[f][100 + f];
        samplings[f] = (cpa_sampling){.size = sizeof *samplings, .stop_ids = &stops[f], .n_stop_ids = 1};
        chain_run_add(&h, f, 0, 100, 300, &samplings[f]);
    }
    chain_run_all(&h);
    for (int f = 0; cpa_test_rank() == 0 && f < 8; f++)
        CU_ASSERT_EQUAL(h.ended[4 * f], first_index(&h, f, 100, stops[f]) + 1);
}

static void an_end_token_is_ignored_where_that_is_asked_for(void) {
    uint32_t stop;
    const cpa_sampling ignoring = {.size = sizeof ignoring, .ignore_eos = 1};
    chain_run h;
    chain_run_begin(&h, VERIFY);
    stop = h.chain.text[2][50];
    h.chain.model.end_ids = &stop;
    h.chain.model.n_end_ids = 1;
    chain_run_add(&h, 2, 0, 40, 30, &ignoring);
    chain_run_all(&h);
    chain_run_expect_lengths(&h);
}

/* The fixture compares, on the host, each emission and history with what they should be. */
static void how_tokens_are_drawn_reaches_every_rank(void) {
    chain_run h;
    chain_run_begin(&h, VERIFY);
    h.options.max_num_batched_tokens = 50;
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    h.options.num_blocks = 24 / size + 2; /* histories begin again after preemptions */
    for (int f = 0; f < 6; f++) {
        const cpa_sampling sampling = {.size = sizeof sampling,
                                       .temperature = 0.25f * (float)(f % 3),
                                       .top_p = f % 2 ? 0.9f : 0,
                                       .min_p = f % 3 ? 0 : 0.05f,
                                       .top_k = f,
                                       .presence_penalty = f % 4 == 1 ? 0.5f * (float)f : 0,
                                       .frequency_penalty = f % 4 == 3 ? -0.5f * (float)f : 0,
                                       .seed = 1000 + (uint64_t)f,
                                       .logprobs = f % 2};
        chain_run_add(&h, f, 0, 60, 40, &sampling);
    }
    chain_run_all(&h);
    chain_run_expect_lengths(&h);
    CPA_ASSERT_ORDER(h.stats.preemptions, >, 0);
    int64_t histories = h.chain.histories;
    MPI_Allreduce(MPI_IN_PLACE, &histories, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(histories, 3 * 40);
}

/* What a first chunk brings of it is all that comes before, here of a prompt whose beginning is found in the cache. */
static void a_history_may_be_longer_than_a_step(void) {
    const cpa_sampling sampling = {.size = sizeof sampling, .presence_penalty = 1};
    chain_run h;
    chain_run_begin(&h, VERIFY);
    chain_run_add(&h, 4, 0, 800, 3, NULL);
    chain_run_add(&h, 4, 1, 810, 12, &sampling);
    chain_run_add(&h, 4, 2, 800, 9, &sampling);
    chain_run_all(&h);
    chain_run_expect_lengths(&h);
    CPA_ASSERT_ORDER(h.stats.prefix_hits, >, 49);
}

static void sampling_out_of_bounds_is_refused(void) {
    const uint32_t one = 1;
    const cpa_sampling bad[] = {
        {.temperature = -1},
        {.temperature = 1.0f / 0.0f},
        {.top_p = 1.5f},
        {.min_p = -0.1f},
        {.top_k = -1},
        {.repetition_penalty = -1},
        {.n_stop_ids = 1},
        {.n_stop_ids = -1, .stop_ids = &one},
        {.frequency_penalty = 0.0f / 0.0f},
    };
    chain_run h;
    chain_run_begin(&h, VERIFY);
    cpa_engine *engine = cpa_test_engine(&h.options, NULL, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
    for (size_t i = 0; cpa_test_rank() == 0 && i < sizeof bad / sizeof bad[0]; i++) {
        cpa_sampling sampling = bad[i];
        sampling.size = sizeof sampling;
        const cpa_request request = chain_request(&h.chain, 1, 0, 20, 4, &sampling);
        CU_ASSERT_EQUAL(cpa_engine_submit(engine, &request), CPA_INVALID);
    }
    cpa_engine_destroy(engine);
}

static const cpa_test tests[] = {
    {"tokens are the same in any chunks", tokens_are_the_same_in_any_chunks},
    {"tokens are the same on one rank and without graphs", tokens_are_the_same_on_one_rank_and_without_graphs},
    {"tokens are the same after preemptions", tokens_are_the_same_after_preemptions},
    {"blocks of drawn tokens are found", blocks_of_drawn_tokens_are_found},
    {"requests end with their tokens", requests_end_with_their_tokens},
    {"places of requests that ended are taken by others", places_of_requests_that_ended_are_taken_by_others},
    {"an end token is ignored where that is asked for", an_end_token_is_ignored_where_that_is_asked_for},
    {"how tokens are drawn reaches every rank", how_tokens_are_drawn_reaches_every_rank},
    {"a history may be longer than a step", a_history_may_be_longer_than_a_step},
    {"sampling out of bounds is refused", sampling_out_of_bounds_is_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("drawn tokens", tests)
