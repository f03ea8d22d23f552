/* What the scheduler shares, for whom it waits, who gives way, and where to: the rules one by one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "src/schedule/scheduler_internal.h"
#include "src/schedule/scheduler_tokens.h"
#include "src/schedule/unconfirmed.h"
#include "tests/fixtures/scheduler_fixture.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 4 };

static void setup(fixture *f, int32_t ranks, int64_t num_blocks, int64_t tokens) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){ranks, BLOCK}, BLOCK, num_blocks, tokens, 8);
    prepare(f, &options);
}

static void check_chunk(const fixture *f, int64_t i, uint64_t request, int64_t start, int64_t count) {
    CU_ASSERT_FATAL(i < f->plan.n_chunks);
    CU_ASSERT_EQUAL(f->plan.chunks[i].request, request);
    CU_ASSERT_EQUAL(f->plan.chunks[i].start, start);
    CU_ASSERT_EQUAL(f->plan.chunks[i].count, count);
}

static void full_blocks_of_an_equal_beginning_are_shared(void) {
    fixture f;
    setup(&f, 2, 16, 64);
    begin(&f);
    add(&f, asked(0, 14, 1), 10);
    step(&f, 0);
    int32_t first_rank = f.plan.chunks[0].placement.rank, shared = f.plan.block_ids[0];
    add(&f, asked(1, 20, 1), 10);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 0, 1, 8, 12); /* two blocks of four */
    CU_ASSERT_EQUAL(f.plan.chunks[0].placement.rank, first_rank);
    CU_ASSERT_EQUAL(f.plan.n_token_ids, 20);
    CU_ASSERT_EQUAL(f.plan.n_copies, 0);
    int found = 0;
    for (int64_t i = 0; i < f.plan.n_block_ids; i++) found |= f.plan.block_ids[i] == shared;
    CU_ASSERT(found);
    CU_ASSERT_EQUAL(f.stats.prefix_queries, 3 + 5);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 2);
    teardown(&f);
}

/* What a step computes is found when it is known to be finite, two plans later, or never. */
static void blocks_are_found_once_they_are_confirmed(void) {
    for (int finite = 0; finite <= 1; finite++) {
        for (int64_t output = 1; output <= 5; output += 4) { /* it has finished by then, or still runs */
            fixture f;
            setup(&f, 2, 16, 64);
            f.options.confirms = 1;
            begin(&f);
            add(&f, asked(0, 14, output), 10);
            step(&f, 0);
            add(&f, asked(1, 20, 1), 10);
            CU_ASSERT_EQUAL(step(&f, 0), output > 1);
            CU_ASSERT_EQUAL(f.next, output > 1 ? (double)INFINITY : 0); /* at once */
            if (!finite) cpa_scheduler_forget_blocks(f.scheduler, 0);
            CU_ASSERT_EQUAL(step(&f, 0), 1 + (output > 1));
            check_chunk(&f, output > 1, 1, finite ? 8 : 0, finite ? 12 : 20);
            CU_ASSERT_EQUAL(f.stats.prefix_hits, finite ? 2 : 0);
            finish(&f);
            teardown(&f);
        }
    }
}

static void of_a_prompt_that_is_all_there_one_token_is_computed_in_a_copy(void) {
    fixture f;
    setup(&f, 1, 16, 64);
    begin(&f);
    add(&f, asked(0, 8, 1), 8);
    step(&f, 0);
    int32_t last = f.plan.block_ids[1];
    add(&f, asked(1, 8, 1), 8);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 0, 1, 7, 1);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_copies, 1);
    CU_ASSERT_EQUAL(f.plan.copies[0].from, last);
    CU_ASSERT_EQUAL(f.plan.copies[0].to, f.plan.block_ids[1]);
    CU_ASSERT(f.plan.copies[0].to != last);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 2);
    CU_ASSERT_EQUAL(f.stats.cow_copies, 1);
    teardown(&f);
}

static void the_partly_filled_last_block_of_an_equal_prompt_is_copied(void) {
    fixture f;
    setup(&f, 1, 16, 64);
    begin(&f);
    add(&f, asked(0, 7, 5), 7);
    step(&f, 0);
    int32_t last = f.plan.block_ids[1];
    add(&f, asked(1, 7, 5), 7);
    CU_ASSERT_EQUAL(step(&f, 0), 2);
    check_chunk(&f, 1, 1, 6, 1);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_copies, 1);
    CU_ASSERT_EQUAL(f.plan.copies[0].from, last);
    /* A longer prompt that only begins so finds the full block alone. */
    add(&f, asked(2, 9, 1), 7);
    step(&f, 0);
    check_chunk(&f, 2, 2, 4, 5);
    CU_ASSERT_EQUAL(f.plan.n_copies, 0);
    teardown(&f);
}

static void a_request_waits_for_a_prefix_that_another_one_computes(void) {
    fixture f;
    setup(&f, 2, 64, 8);
    begin(&f);
    add(&f, asked(0, 24, 1), 24);
    add(&f, asked(1, 21, 1), 20);
    add(&f, asked(2, 3, 1), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 0, 0, 0, 8);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(step(&f, 0), 1); /* computed to 24 at the end of this step */
    CU_ASSERT_EQUAL(step(&f, 0), 2);
    check_chunk(&f, 0, 1, 20, 1);
    check_chunk(&f, 1, 2, 0, 3);
    teardown(&f);
}

/* There is room for more in each step, and who shares nothing does not wait. */
static void others_pass_a_request_that_waits_for_its_prefix(void) {
    fixture f;
    setup(&f, 1, 64, 12);
    f.options.long_prefill_threshold = 8;
    begin(&f);
    add(&f, asked(0, 24, 1), 24);
    add(&f, asked(1, 24, 1), 20);
    add(&f, asked(2, 3, 1), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 2);
    check_chunk(&f, 0, 0, 0, 8);
    check_chunk(&f, 1, 2, 0, 3);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 5);
    teardown(&f);
}

/* The one that computes the prefix gives way to an urgent request: the one that waits computes for itself. */
static void who_waits_for_a_preempted_request_goes_on(void) {
    fixture f;
    setup(&f, 1, 8, 8);
    begin(&f);
    cpa_scheduler_request computing = asked(0, 30, 1), waiting = asked(1, 30, 1), urgent = asked(2, 28, 1);
    computing.priority = waiting.priority = 5;
    add(&f, computing, 30);
    add(&f, waiting, 28);
    step(&f, 0);
    step(&f, 0);
    urgent.arrival = 1;
    add(&f, urgent, 0);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, 3);
    teardown(&f);
}

static void salts_do_not_share(void) {
    fixture f;
    setup(&f, 1, 64, 64);
    begin(&f);
    cpa_scheduler_request a = asked(0, 12, 1), b = asked(1, 12, 1), c = asked(2, 12, 1);
    a.salt = "a";
    b.salt = "b";
    c.salt = "a";
    add(&f, a, 12);
    step(&f, 0);
    add(&f, b, 12);
    step(&f, 0);
    check_chunk(&f, 0, 1, 0, 12);
    add(&f, c, 12);
    step(&f, 0);
    check_chunk(&f, 0, 2, 11, 1);
    teardown(&f);
}

static void without_the_cache_only_samples_of_a_prompt_share(void) {
    fixture f;
    setup(&f, 1, 64, 64);
    f.options.prefix_caching = 0;
    begin(&f);
    for (uint64_t id = 0; id < 4; id++) {
        cpa_scheduler_request request = asked(id, 12, 3);
        request.group = id < 2 ? 0 : 9;
        add(&f, request, 12);
    }
    CU_ASSERT_EQUAL(step(&f, 0), 3);
    check_chunk(&f, 1, 1, 0, 12);
    check_chunk(&f, 2, 2, 0, 12);
    CU_ASSERT_EQUAL(step(&f, 0), 4);
    check_chunk(&f, 3, 3, 11, 1);
    CU_ASSERT_EQUAL(f.stats.cow_copies, 1);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, 4);
    teardown(&f);
}

/* Four blocks: two are kept from an earlier request. One that needs three takes one of them, its second block, since a
 * prefix is worth more than what follows. */
static void the_end_of_a_prefix_is_evicted_before_its_beginning(void) {
    fixture f;
    setup(&f, 1, 4, 64);
    begin(&f);
    add(&f, asked(0, 8, 1), 8);
    step(&f, 0);
    add(&f, asked(1, 12, 1), 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(f.stats.evictions, 1);
    add(&f, asked(2, 8, 1), 8);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 0, 2, 4, 4);
    teardown(&f);
}

/* The blocks that a running request shares are not taken, however short the pool is. */
static void a_referenced_block_is_never_evicted(void) {
    fixture f;
    setup(&f, 1, 6, 64);
    begin(&f);
    add(&f, asked(0, 8, 8), 8);
    step(&f, 0);
    int32_t held[2] = {f.plan.block_ids[0], f.plan.block_ids[1]};
    for (uint64_t id = 1; id < 6; id++) {
        add(&f, asked(id, 12, 1), 0);
        step(&f, 0);
        for (int64_t i = 0; i < f.plan.n_appends; i++) {
            const cpa_plan_append *append = &f.plan.appends[i];
            for (int32_t b = 0; b < append->count; b++) {
                int32_t block = f.plan.block_ids[append->blocks + b];
                CU_ASSERT(block != held[0] && block != held[1]);
            }
        }
    }
    CPA_ASSERT_ORDER(f.stats.evictions, >, 0);
    teardown(&f);
}

/* As above, two sequences outgrow the pool; the younger moves out, comes back, and is given tokens two plans later. */
static void a_swapped_sequence_goes_on_where_it_was(void) {
    fixture f;
    setup(&f, 1, 4, 64);
    f.options.preemption = CPA_PREEMPT_SWAP;
    f.options.groups.list[0].host_blocks = 4;
    f.options.prefix_caching = 0;
    begin(&f);
    add(&f, asked(0, 7, 4), 0);
    cpa_scheduler_request young = asked(1, 6, 5);
    add(&f, young, 0);
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_swap_outs, 2);
    CU_ASSERT_EQUAL(f.plan.swap_outs[0].request, 1);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(step(&f, 0), 0); /* the older is done, its blocks are free */
    CU_ASSERT_EQUAL_FATAL(f.plan.n_swap_ins, 2);
    CU_ASSERT_EQUAL(f.next, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 0, 1, 7, 1);
    CU_ASSERT(f.plan.chunks[0].flags & CPA_CHUNK_FIRST);
    CU_ASSERT_EQUAL(f.stats.swapped_out, 2);
    CU_ASSERT_EQUAL(f.stats.swapped_in, 2);
    finish(&f);
    teardown(&f);
}

static void what_comes_back_damaged_is_computed_again(void) {
    fixture f;
    setup(&f, 1, 4, 64);
    f.options.preemption = CPA_PREEMPT_SWAP;
    f.options.groups.list[0].host_blocks = 4;
    f.options.prefix_caching = 0;
    begin(&f);
    add(&f, asked(0, 7, 4), 0);
    add(&f, asked(1, 6, 5), 0);
    for (int i = 0; i < 5; i++) step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_swap_ins, 2);
    step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_swap_failed(f.scheduler, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 0, 1, 0, 8);
    CU_ASSERT_EQUAL(f.stats.swap_failures, 1);
    CU_ASSERT_EQUAL(cpa_scheduler_swap_failed(f.scheduler, 0, NULL), CPA_INVALID);
    finish(&f);
    teardown(&f);
}

/* The same shortage under two links to the host: over the fast one blocks move, over the slow one they are dropped. */
static void the_cost_model_decides_between_swapping_and_computing(void) {
    for (int fast = 0; fast < 2; fast++) {
        fixture f;
        setup(&f, 1, 4, 64);
        f.options.preemption = CPA_PREEMPT_AUTO;
        f.options.groups.list[0].host_blocks = 4;
        f.options.groups.list[0].layers = 4;
        f.options.groups.list[0].block_bytes = 1 << 20;
        f.options.host_bandwidth = fast ? 1e15 : 1e3;
        begin(&f);
        add(&f, asked(0, 7, 4), 0);
        add(&f, asked(1, 6, 5), 0);
        finish(&f);
        CU_ASSERT_EQUAL(f.stats.preemptions, 1);
        CU_ASSERT_EQUAL(f.stats.swapped_out, fast ? 2 : 0);
        teardown(&f);
    }
}

static void a_tenant_over_its_quota_waits_and_others_pass(void) {
    fixture f;
    setup(&f, 1, 64, 64);
    f.options.tenant_block_quota = 4;
    begin(&f);
    for (uint64_t id = 0; id < 3; id++) {
        cpa_scheduler_request request = asked(id, 10, 4);
        request.salt = id < 2 ? "greedy" : "other";
        add(&f, request, 0);
    }
    CU_ASSERT_EQUAL(step(&f, 0), 2);
    check_chunk(&f, 0, 0, 0, 10);
    check_chunk(&f, 1, 2, 0, 10);
    cpa_error err = {0};
    cpa_scheduler_request large = asked(9, 17, 1);
    CU_ASSERT_EQUAL(cpa_scheduler_add(f.scheduler, &large, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected tenant_block_quota of 5 or more"));
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, 3);
    teardown(&f);
}

/* Steps until a request of another tenant is admitted, behind so many of one that has a quota. */
static int64_t steps_behind(uint64_t flood, int64_t shared) {
    fixture f;
    setup(&f, 1, 64, 64);
    f.options.tenant_block_quota = 8;
    begin(&f);
    for (uint64_t id = 0; id <= flood; id++) {
        cpa_scheduler_request request = asked(id, 28, 4);
        request.salt = id < flood ? "flood" : "other";
        add(&f, request, shared);
    }
    for (int64_t steps = 1;; steps++) {
        CU_ASSERT_FATAL(step(&f, 0) > 0);
        for (int64_t i = 0; i < f.plan.n_chunks; i++) {
            if (f.plan.chunks[i].request != flood) continue;
            CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->tenants.by_name), 2);
            finish(&f);
            CU_ASSERT_EQUAL(f.stats.finished, (int64_t)flood + 1);
            CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->tenants.by_name), 0);
            teardown(&f);
            return steps;
        }
    }
}

static void a_flood_of_one_tenant_does_not_starve_another(void) {
    CU_ASSERT_EQUAL(steps_behind(12, 0), steps_behind(200, 0));
    CU_ASSERT_EQUAL(steps_behind(12, 20), steps_behind(200, 20)); /* those of the flood wait for one prefix */
}

static void tenants_are_forgotten_when_they_hold_nothing(void) {
    fixture f;
    int ended;
    setup(&f, 1, 64, 64);
    begin(&f);
    for (uint64_t id = 0; id < 100; id++) {
        char salt[16];
        cpa_scheduler_request request = asked(id, 6, 2);
        snprintf(salt, sizeof salt, "%d", (int)id);
        request.salt = salt;
        add(&f, request, 0);
        if (id % 10 == 9) finish(&f);
        CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->tenants.by_name), id % 10 == 9 ? 0 : id % 10 + 1);
    }
    CPA_ASSERT_ORDER(f.scheduler->tenants.numbers, <=, 10); /* pools keep a list for each */
    cpa_scheduler_request waits = asked(100, 6, 2);
    waits.salt = "waits";
    add(&f, waits, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_end(f.scheduler, 100, &ended, NULL), CPA_OK);
    CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->tenants.by_name), 0);
    teardown(&f);
}

/* One at a time: strictly by priority, by arrival alone, or with waiting that makes up for priority. */
static void policy_and_ageing_decide_who_goes_first(void) {
    static const struct {
        cpa_policy policy;
        double ageing_s;
        uint64_t order[3];
    } cases[] = {
        {CPA_POLICY_PRIORITY, 0, {2, 1, 0}}, {CPA_POLICY_FCFS, 10, {0, 1, 2}}, {CPA_POLICY_PRIORITY, 10, {1, 0, 2}}};
    for (int i = 0; i < 3; i++) {
        fixture f;
        setup(&f, 1, 16, 64);
        f.options.policy = cases[i].policy;
        f.options.ageing_s = cases[i].ageing_s;
        f.options.max_num_seqs = 1;
        begin(&f);
        /* With 10 s a level: due at 0 + 20, 5 + 10, 45 + 0. */
        static const double arrivals[] = {0, 5, 45};
        for (uint64_t id = 0; id < 3; id++) {
            cpa_scheduler_request request = asked(id, 3, 1);
            request.arrival = arrivals[id];
            request.priority = 2 - (int32_t)id;
            add(&f, request, 0);
        }
        for (int k = 0; k < 3; k++) {
            CU_ASSERT_EQUAL(step(&f, 50), 1);
            check_chunk(&f, 0, cases[i].order[k], 0, 3);
        }
        teardown(&f);
    }
}

static void a_long_prefill_leaves_room_for_others(void) {
    fixture f;
    setup(&f, 1, 64, 32);
    f.options.long_prefill_threshold = 10;
    begin(&f);
    add(&f, asked(0, 40, 1), 0);
    add(&f, asked(1, 40, 1), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 2);
    check_chunk(&f, 0, 0, 0, 10);
    check_chunk(&f, 1, 1, 0, 10);
    teardown(&f);
}

/* With a window of 8 and 1 sink, a sequence of 60 tokens never holds more than it sees. */
static void blocks_before_the_window_are_given_back_during_the_run(void) {
    fixture f;
    setup(&f, 1, 16, 4);
    f.options.groups.list[0].window = 8;
    f.options.groups.list[0].sinks = 1;
    begin(&f);
    add(&f, asked(0, 60, 4), 0);
    int64_t nulled = 0;
    while (step(&f, 0) > 0) {
        nulled += f.plan.n_nulled;
        int64_t used = f.options.groups.list[0].num_blocks - cpa_block_pool_free_count(f.scheduler->pools[0]);
        CPA_ASSERT_ORDER(used, <=, 1 + 4);
        for (int64_t i = 0; i < f.plan.n_nulled; i++) CPA_ASSERT_ORDER(f.plan.nulled[i].entry, >, 0);
    }
    CU_ASSERT_EQUAL(nulled, 12);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"full blocks of an equal beginning are shared", full_blocks_of_an_equal_beginning_are_shared},
    {"blocks are found once they are confirmed", blocks_are_found_once_they_are_confirmed},
    {"of a prompt that is all there, one token is computed, in a copy",
     of_a_prompt_that_is_all_there_one_token_is_computed_in_a_copy},
    {"the partly filled last block of an equal prompt is copied",
     the_partly_filled_last_block_of_an_equal_prompt_is_copied},
    {"a request waits for a prefix that another one computes", a_request_waits_for_a_prefix_that_another_one_computes},
    {"others pass a request that waits for its prefix", others_pass_a_request_that_waits_for_its_prefix},
    {"who waits for a preempted request goes on", who_waits_for_a_preempted_request_goes_on},
    {"salts do not share", salts_do_not_share},
    {"without the cache only samples of a prompt share", without_the_cache_only_samples_of_a_prompt_share},
    {"the end of a prefix is evicted before its beginning", the_end_of_a_prefix_is_evicted_before_its_beginning},
    {"a referenced block is never evicted", a_referenced_block_is_never_evicted},
    {"a swapped sequence goes on where it was", a_swapped_sequence_goes_on_where_it_was},
    {"what comes back damaged is computed again", what_comes_back_damaged_is_computed_again},
    {"the cost model decides between swapping and computing", the_cost_model_decides_between_swapping_and_computing},
    {"a tenant over its quota waits and others pass", a_tenant_over_its_quota_waits_and_others_pass},
    {"a flood of one tenant does not starve another", a_flood_of_one_tenant_does_not_starve_another},
    {"tenants are forgotten when they hold nothing", tenants_are_forgotten_when_they_hold_nothing},
    {"policy and ageing decide who goes first", policy_and_ageing_decide_who_goes_first},
    {"a long prefill leaves room for others", a_long_prefill_leaves_room_for_others},
    {"blocks before the window are given back during the run", blocks_before_the_window_are_given_back_during_the_run},
};

CPA_TEST_MAIN("prefix", tests)
