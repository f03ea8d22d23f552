/* What plans say of drafts, and what becomes of blocks and budget. */
#include <math.h>
#include <string.h>

#include "src/schedule/scheduler_internal.h"
#include "src/schedule/scheduler_tokens.h"
#include "tests/fixtures/planner_fixture.h"
#include "tests/fixtures/scheduler_fixture.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 4, DRAFTS = 5 };

/* Drafts 500, 501, ..., whatever is asked, as often as `times` says. */
static int times;
static const int32_t *tree; /* [DRAFTS] what they come behind; NULL: the one before */
static int64_t draft(void *ctx, const cpa_draft_args *args) {
    (void)ctx;
    if (times-- <= 0) return 0;
    for (int64_t i = 0; i < args->max_drafts; i++) {
        args->drafts[i] = 500 + (uint32_t)i;
        if (tree) args->parents[i] = tree[i];
    }
    return args->max_drafts;
}

static void setup(fixture *f, int64_t num_blocks, int64_t tokens) {
    const cpa_scheduler_options options = {
        .map = {1, BLOCK},
        .block_size = BLOCK,
        .groups = {1, {{.num_blocks = num_blocks}}},
        .max_num_batched_tokens = tokens,
        .max_num_seqs = 4,
        .planner = cpa_test_planner(1),
        .drafting = {.most = DRAFTS, .draft = draft},
    };
    times = 100;
    tree = NULL;
    prepare(f, &options);
    begin(f);
}

static void add_drawing(fixture *f, uint64_t id, int64_t prompt, int64_t output) {
    cpa_scheduler_request request = asked(id, prompt, output);
    request.draws = 1;
    request.sampling = (cpa_plan_sampling){.top_p = 1, .repetition_penalty = 1};
    add(f, request, 0);
}

static void report(fixture *f, uint64_t request, uint32_t token) {
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_report(f->scheduler, request, token, NULL), CPA_OK);
}

/* n requests that draw, each with its prompt computed and its first token, 70, reported: the step to come has
 * drafts. */
static void setup_decoding(fixture *f, int64_t num_blocks, int64_t budget, uint64_t n, int64_t prompt, int64_t output) {
    setup(f, num_blocks, budget);
    for (uint64_t id = 0; id < n; id++) add_drawing(f, id, prompt, output);
    step(f, 0);
    for (uint64_t id = 0; id < n; id++) report(f, id, 70);
}

static int64_t free_blocks(const fixture *f) {
    return cpa_block_pool_free_count(f->scheduler->pools[0]);
}

static void check_chunk(const fixture *f, int64_t i, int64_t start, int64_t drafts) {
    const cpa_plan_chunk *chunk = &f->plan.chunks[i];
    CU_ASSERT_EQUAL(chunk->start, start);
    CU_ASSERT_EQUAL(chunk->count, 1 + drafts);
    CU_ASSERT_EQUAL(chunk->drafts, drafts);
    CU_ASSERT_EQUAL(chunk->flags & ~(uint32_t)CPA_CHUNK_FINISHES, CPA_CHUNK_DECODE | CPA_CHUNK_EMITS);
}

static void a_length_follows_from_what_was_accepted_alone(void) {
    fixture f;
    setup_decoding(&f, 16, 64, 1, 6, 20);
    step(&f, 0);
    check_chunk(&f, 0, 6, DRAFTS);
    static const uint32_t tokens[] = {70, 500, 501, 502, 503, 504};
    CU_ASSERT_EQUAL(memcmp(f.plan.token_ids, tokens, sizeof tokens), 0);
    CU_ASSERT_EQUAL(f.plan.n_cuts + f.plan.n_discards, 0);
    CU_ASSERT_EQUAL(free_blocks(&f), 16 - 3); /* 6 + 1 + 5 tokens */
    report(&f, 0, 500);
    step(&f, 0); /* no draft was right */
    CU_ASSERT_EQUAL_FATAL(f.plan.n_cuts, 1);
    CU_ASSERT_EQUAL(f.plan.cuts[0].tokens, 7);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_discards, 1);
    CU_ASSERT_EQUAL(f.plan.discards[0].position, 8);
    check_chunk(&f, 0, 7, DRAFTS);
    for (uint32_t i = 0; i < 1 + DRAFTS; i++) report(&f, 0, 500 + i);
    CU_ASSERT_EQUAL(cpa_scheduler_report(f.scheduler, 0, 1, NULL), CPA_INTERNAL); /* one more than it has */
    step(&f, 0);                                                                  /* all were */
    CU_ASSERT_EQUAL(f.plan.n_cuts + f.plan.n_discards, 0);
    check_chunk(&f, 0, 13, DRAFTS);
    teardown(&f);
}

static void blocks_behind_the_length_are_given_back(void) {
    fixture f;
    setup_decoding(&f, 5, 64, 1, 7, 12);
    step(&f, 0);
    CU_ASSERT_EQUAL(free_blocks(&f), 1); /* 7 + 1 + 5 tokens in four blocks */
    report(&f, 0, 2);
    add_drawing(&f, 1, 8, 2);
    times = 0;
    step(&f, 0); /* one token for the first, in a third block, and the other two for the second */
    CU_ASSERT_EQUAL(f.plan.cuts[0].tokens, 8);
    CU_ASSERT_EQUAL(f.plan.n_chunks, 2);
    CU_ASSERT_EQUAL(free_blocks(&f), 0);
    teardown(&f);
}

/* Who decodes has a token before anyone has drafts; nobody gives way to a draft. */
static void drafts_get_what_is_left(void) {
    fixture f;
    setup_decoding(&f, 16, 9, 3, 3, 9);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_chunks, 3);
    check_chunk(&f, 0, 3, 5);
    check_chunk(&f, 1, 3, 1);
    check_chunk(&f, 2, 3, 0);
    teardown(&f);
    setup_decoding(&f, 4, 64, 2, 3, 9);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_chunks, 2);
    check_chunk(&f, 0, 3, 5); /* 9 tokens, three blocks */
    check_chunk(&f, 1, 3, 0); /* one */
    CU_ASSERT_EQUAL(f.stats.preemptions, 0);
    teardown(&f);
}

static void no_draft_goes_beyond_the_last_token(void) {
    fixture f;
    setup_decoding(&f, 16, 64, 1, 6, 4);
    step(&f, 0);
    check_chunk(&f, 0, 6, 2); /* of four tokens one is there, and one is certain */
    report(&f, 0, 500);
    report(&f, 0, 501);
    CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->by_id), 1);
    report(&f, 0, 502); /* the last one: it has finished, and its id is free */
    CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->by_id), 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(f.stats.finished, 1);
    CU_ASSERT_EQUAL(f.plan.n_chunks, 0);
    CU_ASSERT_EQUAL(f.plan.n_releases, 1);
    CU_ASSERT_EQUAL(f.plan.n_discards, 0);
    CU_ASSERT_EQUAL(free_blocks(&f), 16);
    teardown(&f);
}

static void given_tokens_come_for_each_row(void) {
    fixture f;
    setup(&f, 16, 64);
    cpa_scheduler_request request = asked(0, 6, 9);
    request.sampling = (cpa_plan_sampling){.top_p = 1, .repetition_penalty = 1};
    add(&f, request, 0);
    step(&f, 0);
    report(&f, 0, token_at(&f, 0, 6));
    step(&f, 0);
    check_chunk(&f, 0, 6, DRAFTS);
    CU_ASSERT_EQUAL(f.plan.n_token_ids, 1 + DRAFTS + DRAFTS);
    CU_ASSERT_EQUAL(f.plan.chunks[0].given, token_at(&f, 0, 7));
    for (int64_t i = 0; i < DRAFTS; i++) CU_ASSERT_EQUAL(f.plan.token_ids[1 + DRAFTS + i], token_at(&f, 0, 8 + i));
    teardown(&f);
}

/* Behind 70: 500 with 502 and 503, 501 with 504. */
static const int32_t forks[DRAFTS] = {-1, -1, 0, 0, 1};

static void report_all(fixture *f, const uint32_t *tokens, int n) {
    for (int i = 0; i < n; i++) report(f, 0, tokens[i]);
}

/* Behind the first draft off the first chain tokens are not where they belong: they come again. */
static void what_a_tree_misplaces_is_computed_again(void) {
    static const struct {
        uint32_t drawn[3]; /* the last one is no draft */
        int64_t cut, again;
    } cases[] = {{{501, 504, 9}, 7, 2}, {{500, 503, 9}, 8, 1}, {{500, 502, 9}, 8, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f;
        setup_decoding(&f, 16, 64, 1, 6, 20);
        tree = forks;
        step(&f, 0);
        check_chunk(&f, 0, 6, DRAFTS);
        CU_ASSERT_EQUAL_FATAL(f.plan.n_parents, DRAFTS);
        CU_ASSERT_EQUAL(memcmp(f.plan.parents, forks, sizeof forks), 0);
        report_all(&f, cases[i].drawn, 3);
        CU_ASSERT_EQUAL(cpa_scheduler_report(f.scheduler, 0, 1, NULL), CPA_INTERNAL); /* there is none behind 9 */
        tree = NULL;
        step(&f, 0);
        const cpa_plan_chunk *chunk = &f.plan.chunks[0];
        CU_ASSERT_EQUAL_FATAL(f.plan.n_cuts, 1);
        CU_ASSERT_EQUAL(f.plan.cuts[0].tokens, cases[i].cut);
        CU_ASSERT_EQUAL(f.plan.discards[0].position, 10);
        CU_ASSERT_EQUAL(chunk->start, cases[i].cut);
        CU_ASSERT_EQUAL(chunk->count, cases[i].again + 1 + DRAFTS);
        CU_ASSERT_EQUAL(chunk->drafts, DRAFTS);
        CU_ASSERT_EQUAL(chunk->parents, -1);
        CU_ASSERT(chunk->flags & CPA_CHUNK_DECODE);
        CU_ASSERT_EQUAL(memcmp(f.plan.token_ids + chunk->tokens, cases[i].drawn + 2 - cases[i].again,
                               (size_t)(cases[i].again + 1) * sizeof(uint32_t)),
                        0);
        teardown(&f);
    }
}

/* With what nobody wants of it: from the first token on that was not reported, and the other drafts of a tree. */
static void a_request_may_end_with_drafts_under_way(void) {
    for (int is_tree = 0; is_tree < 2; is_tree++) {
        fixture f;
        int ended;
        setup_decoding(&f, 16, 64, 1, 6, 20);
        tree = is_tree ? forks : NULL;
        step(&f, 0);
        report(&f, 0, 500 + (uint32_t)is_tree);
        report(&f, 0, 501);
        CU_ASSERT_EQUAL(cpa_scheduler_end(f.scheduler, 0, &ended, NULL), CPA_OK);
        step(&f, 0);
        CU_ASSERT_EQUAL(f.plan.n_cuts, 0);
        CU_ASSERT_EQUAL_FATAL(f.plan.n_discards, 1);
        CU_ASSERT_EQUAL(f.plan.discards[0].position, 6 + 3);
        CU_ASSERT_EQUAL(free_blocks(&f), 16);
        teardown(&f);
    }
}

/* What does not fit the budget is cut from the end, and a tree stays one. */
static void a_tree_is_cut_to_what_is_left(void) {
    fixture f;
    setup_decoding(&f, 16, 6, 1, 6, 20);
    tree = forks;
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.chunks[0].drafts, DRAFTS);
    report_all(&f, (const uint32_t[]){501, 504, 9}, 3);
    step(&f, 0); /* two that come again, one, and three drafts */
    CU_ASSERT_EQUAL(f.plan.chunks[0].count, 6);
    CU_ASSERT_EQUAL(f.plan.chunks[0].drafts, 3);
    CU_ASSERT_EQUAL(f.plan.n_parents, 3);
    teardown(&f);
}

/* Drafts that are told with tokens: of a chunk within a prompt the token behind it is told, too. */
static void a_draft_may_come_with_the_token_before(void) {
    fixture f;
    const cpa_scheduler_options options = {.map = {1, BLOCK},
                                           .block_size = BLOCK,
                                           .groups = {1, {{.num_blocks = 16}}},
                                           .max_num_batched_tokens = 4,
                                           .max_num_seqs = 4,
                                           .planner = cpa_test_planner(1),
                                           .drafting = {.most = 1, .is_told = 1}};
    prepare(&f, &options);
    begin(&f);
    add_drawing(&f, 0, 6, 20);
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.chunks[0].count, 4);
    CU_ASSERT_EQUAL(f.plan.chunks[0].given, token_at(&f, 0, 4)); /* the next of the prompt */
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.chunks[0].given, -1); /* it draws */
    report(&f, 0, 70);
    cpa_scheduler_guess(f.scheduler, 0, 71);
    cpa_scheduler_guess(f.scheduler, 9, 72); /* nobody's */
    step(&f, 0);
    check_chunk(&f, 0, 6, 1);
    static const uint32_t tokens[] = {70, 71};
    CU_ASSERT_EQUAL(memcmp(f.plan.token_ids, tokens, sizeof tokens), 0);
    report(&f, 0, 71); /* the draft is right, and what is told with the last token is the next one */
    cpa_scheduler_guess(f.scheduler, 0, 80);
    report(&f, 0, 73);
    cpa_scheduler_guess(f.scheduler, 0, 74);
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.n_cuts, 0);
    check_chunk(&f, 0, 8, 1);
    CU_ASSERT_EQUAL(f.plan.token_ids[1], 74);
    report(&f, 0, 75); /* the draft is wrong, and nothing is told with this token */
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.n_cuts, 1);
    check_chunk(&f, 0, 9, 0);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"a length follows from what was accepted alone", a_length_follows_from_what_was_accepted_alone},
    {"blocks behind the length are given back", blocks_behind_the_length_are_given_back},
    {"drafts get what is left", drafts_get_what_is_left},
    {"no draft goes beyond the last token", no_draft_goes_beyond_the_last_token},
    {"given tokens come for each row", given_tokens_come_for_each_row},
    {"a request may end with drafts under way", a_request_may_end_with_drafts_under_way},
    {"what a tree misplaces is computed again", what_a_tree_misplaces_is_computed_again},
    {"a tree is cut to what is left", a_tree_is_cut_to_what_is_left},
    {"a draft may come with the token before", a_draft_may_come_with_the_token_before},
};

CPA_TEST_MAIN("draft plans", tests)
