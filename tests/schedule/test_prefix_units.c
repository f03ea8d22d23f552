/* What the scheduler shares where runs are shorter than blocks: units, a block of every rank, that are found, copied
 * and evicted as one. */
#include <math.h>
#include <string.h>

#include "src/schedule/scheduler_internal.h"
#include "src/schedule/unconfirmed.h"
#include "tests/fixtures/scheduler_fixture.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 4, MOST_RANKS = 3 };

static void setup(fixture *f, int32_t ranks, int32_t interleave, int64_t num_blocks, int64_t tokens) {
    cpa_scheduler_options options = options_of((cpa_owner_map){ranks, interleave}, BLOCK, num_blocks, tokens, 8);
    options.local_context = CPA_LOCAL_CONTEXT_NONE;
    prepare(f, &options);
}

static const cpa_plan_chunk *chunk_of(const fixture *f, uint64_t request) {
    for (int64_t i = 0; i < f->plan.n_chunks; i++)
        if (f->plan.chunks[i].request == request) return &f->plan.chunks[i];
    CU_FAIL_FATAL("a request without a chunk");
    return NULL;
}

/* The blocks that the plan adds to the table of a request on a rank; how many. */
static int64_t appended(const fixture *f, uint64_t request, int32_t rank, const int32_t **blocks) {
    const int32_t seq = chunk_of(f, request)->seq;
    for (int64_t i = 0; i < f->plan.n_appends; i++) {
        const cpa_plan_append *append = &f->plan.appends[i];
        if (append->seq != seq || append->rank != rank) continue;
        *blocks = f->plan.block_ids + append->blocks;
        return append->count;
    }
    return 0;
}

static void whole_units_of_an_equal_beginning_are_shared_on_all_ranks(void) {
    for (int32_t interleave = 1; interleave < BLOCK; interleave *= 2) {
        fixture f;
        int32_t held[MOST_RANKS][2];
        const int32_t *blocks = NULL;
        setup(&f, 3, interleave, 16, 64);
        begin(&f);
        add(&f, asked(0, 30, 4), 29); /* units of 12 tokens */
        step(&f, 0);
        const int32_t first_rank = chunk_of(&f, 0)->placement.rank;
        for (int32_t r = 0; r < 3; r++) {
            CU_ASSERT_EQUAL_FATAL(appended(&f, 0, r, &blocks), 3);
            memcpy(held[r], blocks, sizeof held[r]);
        }
        add(&f, asked(1, 40, 1), 29);
        CU_ASSERT_EQUAL(step(&f, 0), 2);
        CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, 24);
        CU_ASSERT_EQUAL(chunk_of(&f, 1)->placement.rank, first_rank);
        CU_ASSERT_EQUAL(f.plan.n_copies, 0);
        for (int32_t r = 0; r < 3; r++) {
            const int64_t tokens = cpa_shard_len(f.options.map, (r - first_rank + 3) % 3, 40);
            CU_ASSERT_EQUAL_FATAL(appended(&f, 1, r, &blocks), (tokens + BLOCK - 1) / BLOCK);
            CU_ASSERT_EQUAL(memcmp(held[r], blocks, sizeof held[r]), 0);
        }
        CU_ASSERT_EQUAL(f.stats.prefix_queries, 2 * 3 + 3 * 3);
        CU_ASSERT_EQUAL(f.stats.prefix_hits, 2 * 3);
        /* Of what is not a whole unit nothing is shared: 11 tokens in common. */
        add(&f, asked(2, 20, 1), 11);
        step(&f, 0);
        CU_ASSERT_EQUAL(chunk_of(&f, 2)->start, 0);
        finish(&f);
        teardown(&f);
    }
}

/* The second of two equal prompts computes the last token in copies of the blocks that hold tokens before it. */
static void the_blocks_of_a_unit_that_goes_on_are_copied_on_every_rank(void) {
    static const struct {
        int64_t prompt;
        int32_t interleave, copies;
    } cases[] = {{30, 1, 3}, {30, 2, 3}, {26, 1, 1}, {27, 1, 2}, {27, 2, 1},
                 {24, 1, 3}, {24, 2, 3}, {5, 1, 3},  {2, 2, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        fixture f;
        setup(&f, 3, cases[c].interleave, 16, 64);
        begin(&f);
        add(&f, asked(0, cases[c].prompt, 8), cases[c].prompt);
        step(&f, 0);
        const int32_t first_rank = chunk_of(&f, 0)->placement.rank;
        add(&f, asked(1, cases[c].prompt, 8), cases[c].prompt);
        step(&f, 0);
        const int64_t unit = (cases[c].prompt - 1) / 12;
        CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, cases[c].prompt - 1);
        CU_ASSERT_EQUAL(f.stats.cow_copies, cases[c].copies);
        CU_ASSERT_EQUAL_FATAL(f.plan.n_copies, cases[c].copies);
        int32_t copied = 0;
        for (int64_t i = 0; i < f.plan.n_copies; i++) {
            const cpa_block_move *copy = &f.plan.copies[i];
            const int32_t *blocks = NULL;
            copied |= 1 << (copy->rank - first_rank + 3) % 3;
            CU_ASSERT_FATAL(appended(&f, 1, copy->rank, &blocks) > unit);
            CU_ASSERT_EQUAL(copy->to, blocks[unit]);
            CU_ASSERT(copy->from != copy->to);
        }
        CU_ASSERT_EQUAL(copied, (1 << cases[c].copies) - 1); /* the first shards */
        finish(&f);
        CU_ASSERT_EQUAL(f.stats.finished, 2);
        teardown(&f);
    }
}

/* Blocks that can be found and nobody has, on all ranks. */
static int64_t kept(const fixture *f) {
    int64_t count = 0;
    for (int32_t r = 0; r < f->options.map.cp_size; r++) count += cpa_block_pool_kept_count(f->scheduler->pools[r]);
    return count;
}

/* Requests that lie on one rank take its blocks alone, those of a unit among them: the others' are empty at once. */
static void a_unit_goes_when_one_of_its_blocks_is_needed(void) {
    fixture f;
    setup(&f, 2, 1, 8, 64);
    f.options.local_context = 32;
    begin(&f);
    add(&f, asked(0, 48, 1), 48); /* six blocks on each rank */
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(kept(&f), 12);
    add(&f, asked(1, 16, 1), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    const cpa_placement placement = chunk_of(&f, 1)->placement;
    CU_ASSERT_EQUAL(placement.kind, CPA_ON_RANK);
    /* Two were empty, the last two units give theirs. */
    CU_ASSERT_EQUAL(f.stats.evictions, 4);
    CU_ASSERT_EQUAL(kept(&f), 8);
    CU_ASSERT_EQUAL(cpa_block_pool_kept_count(f.scheduler->pools[!placement.rank]), 4);
    add(&f, asked(2, 48, 1), 48);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(chunk_of(&f, 2)->start, 32);
    finish(&f);
    teardown(&f);
}

/* What lies on one rank is shared block by block there, whatever the interleave. */
static void rank_local_requests_share_blocks(void) {
    fixture f;
    setup(&f, 3, 1, 16, 64);
    f.options.local_context = 64;
    begin(&f);
    add(&f, asked(0, 22, 1), 20);
    step(&f, 0);
    step(&f, 0);
    add(&f, asked(1, 30, 1), 20);
    step(&f, 0);
    CU_ASSERT_EQUAL(chunk_of(&f, 1)->placement.kind, CPA_ON_RANK);
    CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, 20);
    CU_ASSERT_EQUAL(f.stats.prefix_hits, 5);
    finish(&f);
    teardown(&f);
}

/* What a request has computed that is not finite is found on no rank. */
static void a_unit_that_is_not_finite_is_found_by_nobody(void) {
    for (int finite = 0; finite <= 1; finite++) {
        for (int64_t output = 1; output <= 5; output += 4) {
            fixture f;
            setup(&f, 2, 2, 16, 64);
            f.options.confirms = 1;
            begin(&f);
            add(&f, asked(0, 17, output), 17);
            step(&f, 0);
            add(&f, asked(1, 20, 1), 17);
            step(&f, 0);
            if (!finite) cpa_scheduler_forget_blocks(f.scheduler, 0);
            step(&f, 0);
            CU_ASSERT_EQUAL(chunk_of(&f, 1)->start, finite ? 16 : 0);
            if (!finite && output == 1) CU_ASSERT_EQUAL(kept(&f), 0);
            finish(&f);
            teardown(&f);
        }
    }
}

/* A rank's block is given back as soon as none of its own tokens is seen, and no sooner. */
static void a_window_frees_the_blocks_of_each_rank_by_its_own_tokens(void) {
    enum { WINDOW = 9, SINKS = 3 };
    fixture f;
    int64_t voided[MOST_RANKS] = {0};
    setup(&f, 3, 2, 16, 5);
    f.options.groups.list[0].window = WINDOW;
    f.options.groups.list[0].sinks = SINKS;
    begin(&f);
    add(&f, asked(0, 100, 7), 0);
    while (step(&f, 0) > 0) {
        const cpa_plan_chunk *chunk = chunk_of(&f, 0);
        const int64_t oldest = chunk->start - WINDOW + 1;
        for (int64_t i = 0; i < f.plan.n_nulled; i++) {
            const cpa_plan_nulled *v = &f.plan.nulled[i];
            const int32_t shard = cpa_tokens_on(f.options.map, chunk->placement, v->rank).shard;
            CPA_ASSERT_ORDER(cpa_shard_pos(f.options.map, shard, (v->entry + 1) * BLOCK - 1), <, oldest);
            CPA_ASSERT_ORDER(cpa_shard_pos(f.options.map, shard, v->entry * BLOCK), >=, SINKS);
            voided[v->rank]++;
        }
        for (int32_t r = 0; r < 3 && oldest > 0; r++) {
            const int32_t shard = cpa_tokens_on(f.options.map, chunk->placement, r).shard;
            const int64_t sinks = (cpa_shard_len(f.options.map, shard, SINKS) + BLOCK - 1) / BLOCK;
            const int64_t unseen = cpa_shard_len(f.options.map, shard, oldest) / BLOCK;
            CU_ASSERT_EQUAL(voided[r], unseen > sinks ? unseen - sinks : 0);
        }
    }
    CU_ASSERT(voided[0] > 4 && voided[1] > 4 && voided[2] > 4);
    teardown(&f);
}

/* Two sequences outgrow the pools; the younger leaves them on all ranks, comes back to all, and goes on. */
static void a_sequence_is_swapped_on_all_ranks(void) {
    fixture f;
    setup(&f, 2, 1, 4, 64);
    f.options.preemption = CPA_PREEMPT_SWAP;
    f.options.groups.list[0].host_blocks = 4;
    f.options.prefix_caching = 0;
    begin(&f);
    add(&f, asked(0, 15, 6), 0);
    add(&f, asked(1, 14, 6), 0);
    int64_t outs[2] = {0}, ins[2] = {0};
    for (int64_t steps = 0; step(&f, 0) > 0 || isfinite(f.next); steps++) {
        CU_ASSERT_FATAL(steps < 100);
        for (int64_t i = 0; i < f.plan.n_swap_outs; i++) outs[f.plan.swap_outs[i].rank]++;
        for (int64_t i = 0; i < f.plan.n_swap_ins; i++) ins[f.plan.swap_ins[i].rank]++;
    }
    CU_ASSERT_EQUAL(f.stats.finished, 2);
    CU_ASSERT(outs[0] >= 2 && outs[0] == outs[1]);
    CU_ASSERT(ins[0] == outs[0] && ins[1] == outs[1]);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"whole units of an equal beginning are shared on all ranks",
     whole_units_of_an_equal_beginning_are_shared_on_all_ranks},
    {"the blocks of a unit that goes on are copied on every rank",
     the_blocks_of_a_unit_that_goes_on_are_copied_on_every_rank},
    {"a unit goes when one of its blocks is needed", a_unit_goes_when_one_of_its_blocks_is_needed},
    {"rank-local requests share blocks", rank_local_requests_share_blocks},
    {"a unit that is not finite is found by nobody", a_unit_that_is_not_finite_is_found_by_nobody},
    {"a window frees the blocks of each rank by its own tokens",
     a_window_frees_the_blocks_of_each_rank_by_its_own_tokens},
    {"a sequence is swapped on all ranks", a_sequence_is_swapped_on_all_ranks},
};

CPA_TEST_MAIN("prefix units", tests)
