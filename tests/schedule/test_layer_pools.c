/* A scheduler whose layers are in two groups: one keeps all keys, the other a window of 8 tokens and 1 sink. */
#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/scheduler_fixture.h"

enum { BLOCK = 4, WINDOW = 8, WIDE_BLOCKS = 64 };

static void setup(fixture *f, int64_t tokens, int64_t window_blocks) {
    cpa_scheduler_options options = options_of((cpa_owner_map){1, BLOCK}, BLOCK, WIDE_BLOCKS, tokens, 8);
    options.groups.count = 2;
    options.groups.list[1] = (cpa_layer_group){.window = WINDOW, .sinks = 1, .num_blocks = window_blocks};
    prepare(f, &options);
}

static int64_t used(const fixture *f, int32_t group) {
    return f->options.groups.list[group].num_blocks - cpa_block_pool_free_count(f->scheduler->pools[group]);
}

static void a_group_with_a_window_gives_back_what_the_other_keeps(void) {
    fixture f;
    setup(&f, 4, 8);
    begin(&f);
    add(&f, asked(0, 60, 5), 0);
    int64_t nulled = 0, computed = 0;
    while (step(&f, 0) > 0) {
        computed += f.plan.chunks[0].count;
        CU_ASSERT_EQUAL(used(&f, 0), (computed + BLOCK - 1) / BLOCK);
        CU_ASSERT(used(&f, 1) <= 1 + 4);
        for (int64_t i = 0; i < f.plan.n_nulled; i++)
            CU_ASSERT(f.plan.nulled[i].group == 1 && f.plan.nulled[i].entry > 0);
        nulled += f.plan.n_nulled;
    }
    CU_ASSERT_EQUAL(computed, 64);
    CU_ASSERT_EQUAL(nulled, 13);
    CU_ASSERT_EQUAL(f.stats.peak_blocks[0], 16);
    CU_ASSERT(f.stats.peak_blocks[1] <= 5);
    CU_ASSERT_EQUAL(used(&f, 0) + used(&f, 1), 0);
    teardown(&f);
}

/* Behind 40 tokens the next query sees those from 33 on, and the first: blocks 1 to 7 are left out. */
static void a_found_prefix_takes_what_the_window_sees_of_it(void) {
    fixture f;
    setup(&f, 64, 30);
    begin(&f);
    add(&f, asked(0, 44, 1), 40);
    finish(&f);
    add(&f, asked(1, 60, 1), 40);
    CU_ASSERT_EQUAL_FATAL(step(&f, 200), 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 40);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 10);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_appends, 2);
    for (int32_t group = 0; group < 2; group++) {
        CU_ASSERT_EQUAL(f.plan.appends[group].group, group);
        CU_ASSERT_EQUAL_FATAL(f.plan.appends[group].count, 15);
        for (int32_t i = 0; i < 15; i++) {
            const int is_void = f.plan.block_ids[f.plan.appends[group].blocks + i] < 0;
            CU_ASSERT_EQUAL(is_void, group == 1 && i >= 1 && i < 8);
        }
    }
    teardown(&f);
}

/* The second request takes the blocks that the first had in the smaller pool, and none of those in the other. */
static void a_prefix_is_found_no_further_than_in_every_group(void) {
    fixture f;
    setup(&f, 16, 12);
    begin(&f);
    add(&f, asked(0, 44, 1), 40);
    finish(&f);
    add(&f, asked(1, 44, 1), 0);
    finish(&f);
    CU_ASSERT(f.stats.evictions > 0);
    add(&f, asked(2, 44, 1), 40);
    CU_ASSERT_EQUAL_FATAL(step(&f, 200), 1);
    CU_ASSERT(f.plan.chunks[0].start < 40);
    CU_ASSERT_EQUAL(f.stats.prefix_hits * BLOCK, f.plan.chunks[0].start);
    CU_ASSERT_PTR_NOT_NULL(cpa_prefix_cache_find(f.scheduler->caches[0], &f.scheduler->running[0]->tip));
    finish(&f);
    teardown(&f);
}

/* Two chunks of 16 tokens need 14 blocks beside those that are seen. */
static void who_lacks_blocks_of_one_group_waits_though_the_other_has_them(void) {
    fixture f;
    setup(&f, 32, 13);
    f.options.long_prefill_threshold = 16;
    begin(&f);
    add(&f, asked(0, 60, 4), 0);
    add(&f, asked(1, 60, 4), 0);
    CU_ASSERT_EQUAL(step(&f, 100), 2);
    CU_ASSERT_EQUAL(step(&f, 100), 1);
    CU_ASSERT_EQUAL(f.stats.running, 2);
    CU_ASSERT_EQUAL(used(&f, 0), 8 + 4);
    CU_ASSERT_EQUAL(used(&f, 1), 7 + 3);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, 2);
    CU_ASSERT_EQUAL(used(&f, 0) + used(&f, 1), 0);
    teardown(&f);
}

static void a_request_that_a_group_cannot_hold_is_refused(void) {
    fixture f;
    cpa_error err = {0};
    setup(&f, 32, 9);
    begin(&f);
    const cpa_scheduler_request large = asked(0, 60, 4), small = asked(1, 30, 4);
    CU_ASSERT_EQUAL(cpa_scheduler_add(f.scheduler, &large, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "which has 9 for layers with narrower windows; expected 13 or more"));
    CU_ASSERT_EQUAL(cpa_scheduler_add(f.scheduler, &small, &err), CPA_OK);
    finish(&f);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"a group with a window gives back what the other keeps", a_group_with_a_window_gives_back_what_the_other_keeps},
    {"a found prefix takes what the window sees of it", a_found_prefix_takes_what_the_window_sees_of_it},
    {"a prefix is found no further than in every group", a_prefix_is_found_no_further_than_in_every_group},
    {"who lacks blocks of one group waits though the other has them",
     who_lacks_blocks_of_one_group_waits_though_the_other_has_them},
    {"a request that a group cannot hold is refused", a_request_that_a_group_cannot_hold_is_refused},
};

CPA_TEST_MAIN("layer pools", tests)
