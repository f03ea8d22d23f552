/* Where the scheduler places sequences: on one rank, or sharded over all. */
#include <math.h>
#include <string.h>

#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/scheduler_fixture.h"

enum { RANKS = 4, BLOCK = 4, LOCAL = 40 };

static void setup(fixture *f) {
    const cpa_scheduler_options options = {
        .map = {RANKS, BLOCK},
        .block_size = BLOCK,
        .groups = {1, {{.num_blocks = 64}}},
        .max_num_batched_tokens = 512,
        .max_num_seqs = 16,
        .planner = {.cp_size = RANKS,
                    .shape.q_heads = 8,
                    .shape.kv_heads = 2,
                    .shape.k_dim = 64,
                    .shape.v_dim = 64,
                    .shape.kv_dtype = CPA_BF16,
                    .flops = 1e12,
                    .bandwidth = 1e12,
                    .memory_bandwidth = 1e12,
                    .exchange_s = 1e-5},
        .local_context = LOCAL,
    };
    prepare(f, &options);
}

static const cpa_plan_chunk *chunk_of(const fixture *f, uint64_t request) {
    for (int64_t i = 0; i < f->plan.n_chunks; i++)
        if (f->plan.chunks[i].request == request) return &f->plan.chunks[i];
    CU_FAIL_FATAL("the request has no chunk");
    return NULL;
}

/* The rank on which a request lies; -1 where it is sharded. */
static int32_t home_of(const fixture *f, uint64_t request) {
    const cpa_placement placement = chunk_of(f, request)->placement;
    return placement.kind == CPA_ON_RANK ? placement.rank : -1;
}

static void short_sequences_lie_on_one_rank_and_long_ones_are_sharded(void) {
    fixture f;
    setup(&f);
    begin(&f);
    add(&f, asked(0, LOCAL - 9, 10), 0);
    add(&f, asked(1, LOCAL - 9, 11), 0);
    step(&f, 0);
    int32_t home = home_of(&f, 0), seq = chunk_of(&f, 0)->seq;
    CPA_ASSERT_ORDER(home, >=, 0);
    CU_ASSERT_EQUAL(home_of(&f, 1), -1);
    int64_t blocks = 0;
    for (int64_t i = 0; i < f.plan.n_appends; i++) {
        if (f.plan.appends[i].seq != seq) continue;
        CU_ASSERT_EQUAL(f.plan.appends[i].rank, home);
        blocks += f.plan.appends[i].count;
    }
    CU_ASSERT_EQUAL(blocks, (LOCAL - 9 + BLOCK - 1) / BLOCK);
    CU_ASSERT_EQUAL(f.stats.rank_local, 1);
    CU_ASSERT_EQUAL(f.stats.chunks[CPA_PASS_KV][CPA_REASON_LOCAL], 1);
    step(&f, 0); /* decodes there */
    CU_ASSERT_EQUAL(home_of(&f, 0), home);
    CU_ASSERT_EQUAL(f.stats.chunks[CPA_PASS_KV][CPA_REASON_LOCAL], 2);
    teardown(&f);
}

static void local_sequences_go_to_the_rank_that_is_used_least(void) {
    fixture f;
    setup(&f);
    begin(&f);
    for (uint64_t id = 0; id < 2 * RANKS; id++) add(&f, asked(id, 20, 4), 0);
    step(&f, 0);
    int used[RANKS] = {0};
    for (uint64_t id = 0; id < 2 * RANKS; id++) {
        int32_t home = home_of(&f, id);
        CU_ASSERT_FATAL(home >= 0);
        used[home]++;
    }
    for (int r = 0; r < RANKS; r++) CU_ASSERT_EQUAL(used[r], 2);
    teardown(&f);
}

static void an_equal_beginning_draws_a_sequence_until_its_rank_is_fuller_by_more(void) {
    fixture f;
    setup(&f);
    begin(&f);
    add(&f, asked(0, 20, 8), 16);
    step(&f, 0);
    int32_t home = home_of(&f, 0);
    add(&f, asked(1, 12, 8), 12); /* three blocks of its own are there, five in use */
    step(&f, 0);
    CU_ASSERT(home_of(&f, 1) >= 0 && home_of(&f, 1) != home);
    CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, 0);
    for (uint64_t id = 2; id < 1 + RANKS; id++) add(&f, asked(id, 28, 8), 0); /* fill the others */
    step(&f, 0);
    add(&f, asked(10, 20, 8), 16);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 10), home);
    CU_ASSERT_EQUAL(chunk_of(&f, 10)->start, 16);
    teardown(&f);
}

static void local_and_sharded_copies_of_a_prefix_are_found_apart(void) {
    fixture f;
    setup(&f);
    begin(&f);
    add(&f, asked(0, 20, 8), 16);
    step(&f, 0);
    add(&f, asked(1, 60, 8), 16); /* long: what 0 has is of no use to it */
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 1), -1);
    CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, 0);
    add(&f, asked(2, 64, 8), 16);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 2), -1);
    CU_ASSERT_EQUAL(chunk_of(&f, 2)->start, 16);
    CU_ASSERT_EQUAL(chunk_of(&f, 2)->placement.rank, chunk_of(&f, 1)->placement.rank);
    teardown(&f);
}

/* Samples of one prompt wait for the first and share what it has. */
static void samples_of_a_local_prompt_share_it(void) {
    fixture f;
    setup(&f);
    f.options.prefix_caching = 0;
    begin(&f);
    for (uint64_t id = 0; id < 2; id++) {
        cpa_scheduler_request request = {.id = id, .prompt_tokens = 20, .output_tokens = 8, .group = 5};
        f.common[id] = 20;
        CU_ASSERT_EQUAL_FATAL(cpa_scheduler_add(f.scheduler, &request, NULL), CPA_OK);
    }
    for (uint64_t id = 2; id < 1 + RANKS; id++) add(&f, asked(id, 36, 4), 0); /* keeps the other ranks used */
    step(&f, 0);
    int32_t home = home_of(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 1), home);
    CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, 19);
    CU_ASSERT_EQUAL(f.stats.cow_copies, 1);
    teardown(&f);
}

static void what_no_rank_can_hold_is_sharded(void) {
    fixture f;
    setup(&f);
    f.options.groups.list[0].num_blocks = 5;
    begin(&f);
    add(&f, asked(0, 20, 1), 0);
    add(&f, asked(1, 20, 2), 0);
    step(&f, 0);
    CPA_ASSERT_ORDER(home_of(&f, 0), >=, 0);
    while (f.plan.n_chunks > 0 && f.plan.chunks[f.plan.n_chunks - 1].request != 1) step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 1), -1);
    teardown(&f);
    setup(&f);
    f.options.tenant_block_quota = 4;
    begin(&f);
    add(&f, asked(0, 16, 1), 0);
    step(&f, 0);
    CPA_ASSERT_ORDER(home_of(&f, 0), >=, 0);
    add(&f, asked(1, 16, 2), 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 1), -1);
    teardown(&f);
}

/* Two rank-local sequences outgrow the one rank that has both; the younger one comes back where there is room. */
static void a_preempted_sequence_may_come_back_elsewhere_and_loses_nothing(void) {
    fixture f;
    setup(&f);
    f.options.groups.list[0].num_blocks = 8;
    begin(&f);
    for (uint64_t id = 0; id < 3 * RANKS; id++) add(&f, asked(id, 12, 20), 0);
    int64_t steps = 0, local = 0;
    do {
        step(&f, 0);
        for (int64_t i = 0; i < f.plan.n_chunks; i++) local += f.plan.chunks[i].placement.kind == CPA_ON_RANK;
        CU_ASSERT_EQUAL_FATAL(local, f.plan.n_chunks);
        local = 0;
        CU_ASSERT_FATAL(++steps < 500);
    } while (f.plan.n_chunks > 0 || isfinite(f.next));
    CU_ASSERT_EQUAL(f.stats.finished, 3 * RANKS);
    CPA_ASSERT_ORDER(f.stats.preemptions, >, 0);
    CPA_ASSERT_ORDER(f.stats.rank_local, >, 3 * RANKS);
    teardown(&f);
}

static void setup_auto(fixture *f) {
    setup(f);
    f->options.local_context = 0;
    f->options.groups.list[0].num_blocks = 1024;
    f->options.max_num_batched_tokens = 4096;
}

/* A token of decode saves 10 us less 3/4 of what reading takes, here next to nothing; a prompt of 512 costs 3/4 of
 * 2 * 512 * 256 * 8 * 128 / 1e12 = 268 us more: 20 tokens. */
static void auto_places_by_what_is_sooner_done(void) {
    fixture f;
    setup_auto(&f);
    begin(&f);
    add(&f, asked(0, 512, 10), 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 0), -1);
    teardown(&f);
    setup_auto(&f);
    begin(&f);
    add(&f, asked(0, 512, 40), 0);
    step(&f, 0);
    CPA_ASSERT_ORDER(home_of(&f, 0), >=, 0);
    add(&f, asked(1, 512, 30), 0); /* the exchange of a step is shared with others */
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 1), -1);
    teardown(&f);
    setup_auto(&f);
    begin(&f);
    add(&f, asked(0, 512, 30), 0); /* also with those that come at the same time */
    add(&f, asked(1, 512, 30), 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 0), -1);
    teardown(&f);
    setup_auto(&f);
    f.options.planner.forced = CPA_PASS_Q;
    begin(&f);
    add(&f, asked(0, 400, 40), 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(home_of(&f, 0), -1);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"short sequences lie on one rank and long ones are sharded",
     short_sequences_lie_on_one_rank_and_long_ones_are_sharded},
    {"rank-local sequences go to the rank that is used least", local_sequences_go_to_the_rank_that_is_used_least},
    {"an equal beginning draws a sequence until its rank is fuller by more",
     an_equal_beginning_draws_a_sequence_until_its_rank_is_fuller_by_more},
    {"rank-local and sharded copies of a prefix are found apart", local_and_sharded_copies_of_a_prefix_are_found_apart},
    {"samples of a rank-local prompt share it", samples_of_a_local_prompt_share_it},
    {"what no rank can hold is sharded", what_no_rank_can_hold_is_sharded},
    {"a preempted sequence may come back elsewhere and loses nothing",
     a_preempted_sequence_may_come_back_elsewhere_and_loses_nothing},
    {"auto places by what is sooner done", auto_places_by_what_is_sooner_done},
};
CPA_TEST_MAIN("placement", tests)
