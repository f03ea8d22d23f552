/* Units that make room on the device, in host memory and on disk: where they go, when they come back, and what is computed
 * all the same. test_shadow has what becomes of their content. */
#include <string.h>

#include "src/schedule/evicted_units.h"
#include "src/schedule/scheduler_tokens.h"
#include "tests/fixtures/scheduler_fixture.h"

/* One rank, blocks of 4 tokens, so many blocks on the device, in host memory and on disk. */
static void setup(fixture *f, int64_t device, int64_t host, int64_t disk) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){1, 4}, 4, device, 64, 4);
    prepare(f, &options);
    f->options.groups.list[0].host_blocks = host;
    f->options.groups.list[0].disk_blocks = disk;
    f->options.keep_evicted = 1;
    begin(f);
}

/* The text of a request from its first token on; `common` of the fixture is 0 for one of its own. Runs it to its end. */
static void run_alone(fixture *f, uint64_t id, int64_t prompt, int64_t common) {
    add(f, asked(id, prompt, 1), common);
    finish(f);
}

/* Requests 0 and 1 have four blocks each, and the device five: those of 0 move out for those of 1. */
static void evict_the_first(fixture *f) {
    run_alone(f, 0, 16, 16);
    add(f, asked(1, 16, 1), 0);
    CU_ASSERT_EQUAL(step(f, 0), 1);
}

static void what_makes_room_moves_to_host_memory(void) {
    fixture f;
    setup(&f, 5, 8, 0);
    evict_the_first(&f);
    /* An empty block, and three that others need: the last ones of the prompt go first. */
    CU_ASSERT_EQUAL(f.plan.n_swap_outs, 3);
    CU_ASSERT_EQUAL(f.plan.n_stores, 0);
    CU_ASSERT_EQUAL(f.stats.kept_blocks, 3);
    CU_ASSERT_EQUAL(f.stats.evictions, 3);
    CU_ASSERT_EQUAL(f.stats.swapped_out, 0);
    for (int64_t i = 0; i < 3; i++)
        for (int64_t j = 0; j < i; j++) CU_ASSERT(f.plan.swap_outs[i].to != f.plan.swap_outs[j].to);
    teardown(&f);
}

static void a_request_waits_for_what_it_needs_of_them(void) {
    fixture f;
    setup(&f, 8, 8, 0);
    evict_the_first(&f);
    finish(&f);
    run_alone(&f, 2, 32, 0); /* all others make room */
    CU_ASSERT_EQUAL(f.stats.blocks_in_host, 8);
    add(&f, asked(3, 17, 1), 16);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(f.plan.n_swap_ins, 4);
    CU_ASSERT_EQUAL(f.plan.swap_ins[0].request, 3);
    CU_ASSERT_EQUAL(f.next, 0); /* the next plan is wanted at once */
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(f.plan.n_swap_ins, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 16);
    CU_ASSERT_EQUAL(f.plan.chunks[0].count, 1);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 4);
    CU_ASSERT_EQUAL(f.stats.fetched_blocks, 4);
    CU_ASSERT_EQUAL(f.stats.swapped_in, 0);
    teardown(&f);
}

/* One that shares nothing of it goes ahead; another one with the same beginning waits for the same move. */
static void others_pass_it_and_share_what_comes(void) {
    fixture f;
    setup(&f, 12, 12, 0);
    run_alone(&f, 0, 16, 16);
    run_alone(&f, 1, 48, 0);
    CU_ASSERT_EQUAL(f.stats.blocks_in_host, 4);
    add(&f, asked(2, 18, 1), 16);
    add(&f, asked(3, 19, 1), 16);
    add(&f, asked(4, 3, 1), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].request, 4);
    CU_ASSERT_EQUAL(f.plan.n_swap_ins, 4);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 2);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 16);
    CU_ASSERT_EQUAL(f.plan.chunks[1].start, 16);
    CU_ASSERT_EQUAL(f.stats.fetched_blocks, 4);
    teardown(&f);
}

static void what_comes_back_damaged_ends_what_is_found(void) {
    fixture f;
    setup(&f, 8, 12, 0);
    evict_the_first(&f);
    finish(&f);
    run_alone(&f, 2, 32, 0);
    add(&f, asked(3, 17, 1), 16);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_swap_ins, 4);
    /* The last units move first: the third one is damaged. */
    const cpa_block_move damaged = f.plan.swap_ins[1], other = {3, 0, 0, 0, 99};
    step(&f, 0);
    CU_ASSERT(cpa_evicted_fetch_failed(f.scheduler, &damaged));
    CU_ASSERT_FALSE(cpa_evicted_fetch_failed(f.scheduler, &other));
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 8);
    CU_ASSERT_EQUAL(f.plan.chunks[0].count, 9);
    CU_ASSERT_EQUAL(f.stats.damaged_blocks, 1);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 2);
    teardown(&f);
}

/* Host memory holds four blocks; the disk all of them, which come back over host memory. */
static void what_host_memory_has_no_room_for_comes_from_disk(void) {
    fixture f;
    setup(&f, 5, 5, 40);
    evict_the_first(&f);
    CU_ASSERT_EQUAL(f.plan.n_stores, 3);
    CU_ASSERT_EQUAL(f.plan.stores[0].host, f.plan.swap_outs[0].to);
    CU_ASSERT_EQUAL(f.plan.stores[0].ranks, 1);
    finish(&f);
    run_alone(&f, 2, 20, 0);
    run_alone(&f, 4, 20, 0);
    CU_ASSERT_EQUAL(f.stats.blocks_in_host, 5);
    CU_ASSERT_EQUAL(f.stats.blocks_on_disk, 13);
    CU_ASSERT_EQUAL(f.stats.stored_blocks, 13);
    add(&f, asked(3, 17, 1), 16);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(f.plan.n_loads, 4);
    CU_ASSERT_EQUAL(f.plan.n_swap_ins, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(f.plan.n_swap_ins, 4);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 16);
    CU_ASSERT_EQUAL(f.stats.blocks_on_disk, 15); /* of what made room for it, what host memory had a block for */
    teardown(&f);
}

static void a_load_that_fails_is_forgotten_on_disk(void) {
    fixture f;
    setup(&f, 5, 5, 40);
    evict_the_first(&f);
    finish(&f);
    run_alone(&f, 2, 20, 0);
    run_alone(&f, 4, 20, 0);
    const int64_t there = f.stats.blocks_on_disk;
    add(&f, asked(3, 17, 1), 16);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_loads, 4);
    const cpa_disk_move failed = f.plan.loads[0]; /* the first unit: loads begin with it */
    step(&f, 0);
    cpa_evicted_load_failed(f.scheduler, &failed);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 0);
    CU_ASSERT_EQUAL(f.stats.damaged_blocks, 1);
    CPA_ASSERT_ORDER(f.stats.blocks_on_disk, <, there + f.plan.n_stores);
    teardown(&f);
}

/* No more goes to disk; what is there comes back. */
static void a_full_disk_gets_no_more(void) {
    fixture f;
    setup(&f, 5, 5, 40);
    evict_the_first(&f);
    finish(&f);
    run_alone(&f, 2, 20, 0);
    const int64_t stored = f.stats.stored_blocks;
    cpa_evicted_stop_stores(f.scheduler);
    run_alone(&f, 4, 20, 0);
    run_alone(&f, 5, 20, 0);
    CU_ASSERT_EQUAL(f.stats.stored_blocks, stored);
    run_alone(&f, 3, 17, 16);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 4);
    CPA_ASSERT_ORDER(f.stats.loaded_blocks, >, 0);
    teardown(&f);
}

/* The swapped cache of a running request has all of host memory: nothing is kept, and nothing waits for it. */
static void host_memory_is_first_of_all_for_requests_that_give_way(void) {
    fixture f;
    const cpa_scheduler_options options = options_of((cpa_owner_map){1, 4}, 4, 4, 64, 4);
    prepare(&f, &options);
    f.options.preemption = CPA_PREEMPT_SWAP;
    f.options.groups.list[0].host_blocks = 2;
    f.options.keep_evicted = 1;
    begin(&f);
    add(&f, asked(0, 7, 4), 0);
    add(&f, asked(1, 6, 5), 0);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.swapped_out, 2);
    CU_ASSERT_EQUAL(f.stats.swapped_in, 2);
    CU_ASSERT_EQUAL(f.stats.finished, 2);
    teardown(&f);
}

/* What the last plan saves is what the next scheduler finds, by the slots in which it is. */
static void the_next_scheduler_finds_what_was_saved(void) {
    fixture f, next;
    cpa_restored_unit units[8];
    int32_t slots[8];
    setup(&f, 8, 8, 8);
    run_alone(&f, 0, 16, 16);
    cpa_step_plan_clear(&f.plan);
    cpa_evicted_save(f.scheduler, &f.plan);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_stores, 4);
    CU_ASSERT_EQUAL(f.plan.n_swap_outs, 4);
    setup(&next, 8, 8, 8);
    for (int i = 0; i < 4; i++) {
        slots[i] = f.plan.stores[i].slot;
        units[i] = (cpa_restored_unit){.group = 0, .slots = &slots[i]};
        memcpy(units[i].key.bytes, f.plan.stores[i].digest, sizeof units[i].key.bytes);
    }
    slots[4] = slots[0]; /* of a slot that is taken nothing is found */
    units[4] = (cpa_restored_unit){.group = 0, .slots = &slots[4]};
    CU_ASSERT_EQUAL(cpa_evicted_restore(next.scheduler, units, 5, NULL), CPA_OK);
    run_alone(&next, 0, 17, 16);
    CU_ASSERT_EQUAL(next.stats.restored_blocks, 4);
    CU_ASSERT_EQUAL(next.stats.loaded_blocks, 4);
    CU_ASSERT_EQUAL(next.stats.prefix_hits, 4);
    teardown(&next);
    teardown(&f);
}

/* Blocks that were on the device when the request was queued, and moved out before there was room for it. */
static void what_was_evicted_while_a_request_waited_is_fetched(void) {
    fixture f;
    setup(&f, 8, 12, 0);
    run_alone(&f, 0, 16, 16);
    add(&f, asked(2, 16, 16), 0); /* takes all blocks, of which those of 0 make room */
    (void)step(&f, 0);
    add(&f, asked(3, 30, 1), 12);
    for (int i = 0; i < 40 && f.stats.finished < 2; i++) (void)step(&f, 0);
    CU_ASSERT_EQUAL(f.stats.finished, 2);
    for (int i = 0; i < 5 && (step(&f, 0) == 0 || f.plan.chunks[0].request != 3);) i++;
    CU_ASSERT_EQUAL(f.plan.chunks[0].request, 3);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 12);
    CU_ASSERT_EQUAL(f.stats.fetched_blocks, 3);
    teardown(&f);
}

/* A request that fetches, and is ended: what was kept for it is there for the next one, and it is known when. */
static void what_was_kept_for_who_ended_is_waited_for(void) {
    fixture f;
    int is_running;
    setup(&f, 8, 12, 0);
    run_alone(&f, 0, 16, 16);
    run_alone(&f, 2, 24, 0);
    add(&f, asked(3, 17, 1), 16);
    add(&f, asked(4, 32, 1), 0);
    (void)step(&f, 0);
    (void)step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_end(f.scheduler, 3, &is_running, NULL), CPA_OK);
    int chunks = 0;
    for (int i = 0; i < 4 && chunks == 0; i++) {
        chunks = step(&f, 0);
        if (chunks == 0) CU_ASSERT_EQUAL(f.next, 0);
    }
    CU_ASSERT_EQUAL(chunks, 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].request, 4);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"what makes room moves to host memory", what_makes_room_moves_to_host_memory},
    {"a request waits for what it needs of them", a_request_waits_for_what_it_needs_of_them},
    {"others pass it, and share what comes", others_pass_it_and_share_what_comes},
    {"what comes back damaged ends what is found", what_comes_back_damaged_ends_what_is_found},
    {"what host memory has no room for comes from disk", what_host_memory_has_no_room_for_comes_from_disk},
    {"a load that fails is forgotten on disk", a_load_that_fails_is_forgotten_on_disk},
    {"a full disk gets no more", a_full_disk_gets_no_more},
    {"host memory is first of all for requests that give way", host_memory_is_first_of_all_for_requests_that_give_way},
    {"the next scheduler finds what was saved", the_next_scheduler_finds_what_was_saved},
    {"what was evicted while a request waited is fetched", what_was_evicted_while_a_request_waited_is_fetched},
    {"what was kept for who ended is waited for", what_was_kept_for_who_ended_is_waited_for},
};

CPA_TEST_MAIN("evicted units", tests)
