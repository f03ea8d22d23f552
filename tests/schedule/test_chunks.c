/* Adaptive prefill chunks: as long as blocks are free without anyone giving way. */
#include <stdlib.h>

#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/scheduler_fixture.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 4 };

static void setup(fixture *f, int32_t ranks, int64_t num_blocks, int64_t tokens, int32_t adaptive) {
    cpa_scheduler_options options = options_of((cpa_owner_map){ranks, BLOCK}, BLOCK, num_blocks, tokens, 8);
    options.local_context = CPA_LOCAL_CONTEXT_NONE;
    options.adaptive_chunks = adaptive;
    prepare(f, &options);
    f->options.prefix_caching = 0;
}

/* The tokens that a request is given in the last plan. */
static int64_t given(const fixture *f, uint64_t request) {
    for (int64_t i = 0; i < f->plan.n_chunks; i++)
        if (f->plan.chunks[i].request == request) return f->plan.chunks[i].count;
    return 0;
}

/* Eight blocks; request 0 decodes, from its ninth token on in three of them, and a fourth is spared for it. Request 1
 * has three then, and is given no more tokens than one more has room for. */
static void a_chunk_takes_what_is_free_but_for_what_is_spared(void) {
    for (int32_t adaptive = 0; adaptive <= 1; adaptive++) {
        fixture f;
        setup(&f, 1, 8, 12, adaptive);
        begin(&f);
        add(&f, asked(0, 7, 6), 0);
        step(&f, 0);
        add(&f, asked(1, 20, 1), 0);
        step(&f, 0);
        CU_ASSERT_EQUAL(given(&f, 0), 1);
        CU_ASSERT_EQUAL(given(&f, 1), 11);
        CU_ASSERT_EQUAL(f.stats.cut_chunks, 0);
        step(&f, 0);
        CU_ASSERT_EQUAL(given(&f, 0), 1);
        CU_ASSERT_EQUAL(given(&f, 1), adaptive ? 4 : 9);
        CU_ASSERT_EQUAL(f.stats.cut_chunks, adaptive);
        finish(&f);
        CU_ASSERT_EQUAL(f.stats.finished, 2);
        CU_ASSERT_EQUAL(f.stats.preemptions, 0);
        teardown(&f);
    }
}

/* Two long prompts that do not fit together: the second is not begun on blocks that the first needs for the rest of its
 * own, and would take from it again. */
static void a_waiting_request_leaves_blocks_for_the_prompts_that_run(void) {
    for (int32_t adaptive = 0; adaptive <= 1; adaptive++) {
        fixture f;
        setup(&f, 2, 8, 40, adaptive);
        f.options.long_prefill_threshold = 16;
        begin(&f);
        add(&f, asked(0, 48, 4), 0); /* six blocks on each of two ranks, and five */
        add(&f, asked(1, 40, 4), 0);
        step(&f, 0);
        CU_ASSERT_EQUAL(given(&f, 0), 16);
        CU_ASSERT_EQUAL(given(&f, 1), adaptive ? 0 : 16);
        CU_ASSERT_EQUAL(f.stats.held_back, adaptive);
        step(&f, 0);
        CU_ASSERT_EQUAL(given(&f, 1), adaptive ? 0 : 16);
        finish(&f);
        CU_ASSERT_EQUAL(f.stats.held_back, adaptive); /* once, however often it was looked at */
        CU_ASSERT_EQUAL(f.stats.finished, 2);
        CU_ASSERT_EQUAL(f.stats.preemptions == 0, adaptive);
        teardown(&f);
    }
}

/* The only one takes every block that it needs, whatever is kept of earlier ones. */
static void who_runs_alone_is_not_cut(void) {
    fixture f;
    setup(&f, 2, 8, 64, 1);
    f.options.prefix_caching = 1;
    begin(&f);
    for (uint64_t id = 0; id < 3; id++) {
        add(&f, asked(id, 64, 1), 0);
        step(&f, 0);
        CU_ASSERT_EQUAL(given(&f, id), 64);
    }
    CU_ASSERT_EQUAL(f.stats.cut_chunks, 0);
    teardown(&f);
}

/* Random requests in little memory: all of them finish, and fewer have to give way. */
static void fewer_give_way(void) {
    int64_t preemptions[2] = {0}, steps[2] = {0};
    for (int32_t adaptive = 0; adaptive <= 1; adaptive++) {
        srand(5);
        for (int i = 0; i < 40; i++) {
            fixture f;
            setup(&f, 1 + rand() % 3, 12 + rand() % 12, 48, adaptive);
            begin(&f);
            const uint64_t n = 4 + (uint64_t)(rand() % 8);
            for (uint64_t id = 0; id < n; id++) add(&f, asked(id, 1 + rand() % 40, 1 + rand() % 8), 0);
            finish(&f);
            CU_ASSERT_EQUAL(f.stats.finished, (int64_t)n);
            preemptions[adaptive] += f.stats.preemptions;
            steps[adaptive] += (int64_t)f.plan.step;
            teardown(&f);
        }
    }
    CPA_ASSERT_ORDER(preemptions[1], <, preemptions[0]);
    printf("%ld sequences in place of %ld, in %ld steps in place of %ld ... ", (long)preemptions[1],
           (long)preemptions[0], (long)steps[1], (long)steps[0]);
}

static const cpa_test tests[] = {
    {"a chunk takes what is free but for what is spared", a_chunk_takes_what_is_free_but_for_what_is_spared},
    {"a waiting request leaves blocks for the prompts that run",
     a_waiting_request_leaves_blocks_for_the_prompts_that_run},
    {"who runs alone is not cut", who_runs_alone_is_not_cut},
    {"fewer give way", fewer_give_way},
};

CPA_TEST_MAIN("adaptive chunks", tests)
