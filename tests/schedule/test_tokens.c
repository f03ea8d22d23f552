/* Tokens that are drawn, and known one step late: what plans say of them, what can be found after them, and requests
 * that end before their last token. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "src/schedule/scheduler_internal.h"
#include "src/schedule/scheduler_tokens.h"
#include "tests/fixtures/scheduler_fixture.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 4 };

static void setup(fixture *f, int64_t num_blocks) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){1, BLOCK}, BLOCK, num_blocks, 64, 4);
    prepare(f, &options);
}

static void add_drawing(fixture *f, uint64_t id, int64_t prompt, int64_t output) {
    cpa_scheduler_request request = asked(id, prompt, output);
    request.draws = 1;
    add(f, request, 0);
}

static void report(fixture *f, uint64_t request, uint32_t token) {
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_report(f->scheduler, request, token, NULL), CPA_OK);
}

static void end(fixture *f, uint64_t request) {
    int ended;
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_end(f->scheduler, request, &ended, NULL), CPA_OK);
    CU_ASSERT(ended);
}

/* Nothing is left of any request: every block free, every index too. */
static void check_empty(fixture *f) {
    step(f, 100);
    CU_ASSERT_EQUAL(f->plan.n_chunks, 0);
    CU_ASSERT(isinf(f->next));
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(f->scheduler->pools[0]), f->options.groups.list[0].num_blocks);
    CU_ASSERT_EQUAL(f->scheduler->n_free_indices, f->options.max_num_seqs);
    CU_ASSERT_EQUAL(HASH_COUNT(f->scheduler->by_id), 0);
}

static void check_chunk(const fixture *f, int64_t start, int64_t count, uint32_t flags) {
    CU_ASSERT_EQUAL_FATAL(f->plan.n_chunks, 1);
    CU_ASSERT_EQUAL(f->plan.chunks[0].start, start);
    CU_ASSERT_EQUAL(f->plan.chunks[0].count, count);
    CU_ASSERT_EQUAL(f->plan.chunks[0].flags, flags);
    CU_ASSERT_EQUAL(f->plan.chunks[0].given, -1);
}

static void what_is_being_drawn_goes_on_by_name_and_what_is_known_by_value(void) {
    const uint32_t decodes = CPA_CHUNK_DECODE | CPA_CHUNK_EMITS;
    fixture f;
    setup(&f, 16);
    begin(&f);
    add_drawing(&f, 0, 6, 5);
    step(&f, 0);
    check_chunk(&f, 0, 6, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS);
    step(&f, 0);
    check_chunk(&f, 6, 1, decodes | CPA_CHUNK_DRAWN);
    report(&f, 0, 70);
    step(&f, 0);
    check_chunk(&f, 7, 1, decodes | CPA_CHUNK_DRAWN);
    report(&f, 0, 71);
    report(&f, 0, 72); /* this plan is made late */
    step(&f, 0);
    check_chunk(&f, 8, 1, decodes);
    CU_ASSERT_EQUAL(f.plan.token_ids[f.plan.chunks[0].tokens], 72);
    step(&f, 0);
    check_chunk(&f, 9, 1, decodes | CPA_CHUNK_DRAWN | CPA_CHUNK_FINISHES);
    check_empty(&f);
    teardown(&f);
}

static void a_token_that_no_plan_emits_cannot_be_reported(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    add_drawing(&f, 0, 6, 5);
    CU_ASSERT_EQUAL(cpa_scheduler_report(f.scheduler, 0, 1, NULL), CPA_INTERNAL);
    CU_ASSERT_EQUAL(cpa_scheduler_report(f.scheduler, 9, 1, NULL), CPA_OK); /* nobody's: it has ended */
    teardown(&f);
}

static void a_preempted_sequence_comes_back_with_what_was_drawn(void) {
    fixture f;
    setup(&f, 4);
    begin(&f);
    add(&f, asked(0, 8, 8), 0);
    add_drawing(&f, 1, 7, 4);
    step(&f, 0); /* both: 2 and 2 blocks; request 0 needs a third one next */
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.stats.preemptions, 1);
    report(&f, 1, 77);
    for (int i = 0; i < 20 && (f.plan.n_chunks == 0 || f.plan.chunks[0].request != 1); i++) step(&f, 0);
    check_chunk(&f, 0, 8, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS);
    CU_ASSERT_EQUAL(f.plan.token_ids[f.plan.chunks[0].tokens + 7], 77);
    teardown(&f);
}

/* A request whose prompt is another's prompt and output. */
static void a_block_is_found_in_the_plan_after_the_one_that_fills_it_with_what_was_drawn(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    f.common[1] = 64;
    add_drawing(&f, 0, 6, 9);
    f.common[0] = 64; /* its outputs are those of token_at, as if they had been drawn so */
    step(&f, 0);      /* [0, 6) */
    step(&f, 0);      /* token 6, drawn */
    report(&f, 0, 6);
    step(&f, 0); /* token 7, drawn: block 1 is full */
    add(&f, asked(1, 12, 2), 64);
    report(&f, 0, 7);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_chunks, 2);
    CU_ASSERT_EQUAL(f.plan.chunks[1].request, 1);
    CU_ASSERT_EQUAL(f.plan.chunks[1].start, 8);
    teardown(&f);
}

static void the_last_block_of_a_request_that_has_finished_is_found_too(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    f.common[0] = 64;
    cpa_scheduler_request request = asked(0, 6, 3);
    request.draws = 1;
    add(&f, request, 64);
    step(&f, 0);
    step(&f, 0);
    report(&f, 0, 6);
    step(&f, 0); /* token 7 fills block 1, and the last output comes of it */
    CU_ASSERT_FATAL(f.plan.chunks[0].flags & CPA_CHUNK_FINISHES);
    report(&f, 0, 7);
    CU_ASSERT_EQUAL(HASH_CNT(pending, f.scheduler->pending), 0);
    add(&f, asked(1, 12, 2), 64);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_chunks, 1);
    CU_ASSERT_EQUAL(f.plan.chunks[0].start, 8);
    teardown(&f);
}

static void a_request_that_ends_gives_its_place_back_with_the_next_plan(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    add_drawing(&f, 0, 6, 50);
    step(&f, 0);
    int32_t index = f.plan.chunks[0].seq;
    step(&f, 0);
    report(&f, 0, 70);
    end(&f, 0);               /* of the token that was reported; the one that this plan emits is not wanted */
    add_drawing(&f, 0, 5, 1); /* another one of that id */
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_releases, 1);
    CU_ASSERT_EQUAL(f.plan.releases[0], index);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_discards, 1);
    CU_ASSERT_EQUAL(f.plan.discards[0].request, 0);
    CU_ASSERT_EQUAL(f.plan.discards[0].position, 7);
    check_chunk(&f, 4, 1, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES); /* its first block is found */
    CU_ASSERT_EQUAL(f.stats.ended, 1);
    check_empty(&f);
    CU_ASSERT_EQUAL(f.plan.n_discards, 0);
    teardown(&f);
}

static void what_was_reported_before_the_end_is_wanted(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    add(&f, asked(0, 6, 50), 0); /* given tokens are reported as well */
    step(&f, 0);
    report(&f, 0, 1);
    end(&f, 0);
    int again;
    CU_ASSERT_EQUAL(cpa_scheduler_end(f.scheduler, 0, &again, NULL), CPA_OK);
    CU_ASSERT(!again);
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.n_discards, 0);
    CU_ASSERT_EQUAL(f.stats.ended, 1);
    check_empty(&f);
    teardown(&f);
}

static void a_request_whose_last_token_is_on_its_way_can_end(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    add_drawing(&f, 0, 6, 2);
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_FATAL(f.plan.chunks[0].flags & CPA_CHUNK_FINISHES);
    report(&f, 0, 70);
    end(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_discards, 1);
    CU_ASSERT_EQUAL(f.plan.discards[0].position, 7);
    CU_ASSERT_EQUAL(f.stats.finished, 0);
    CU_ASSERT_EQUAL(f.stats.ended, 1);
    check_empty(&f);
    teardown(&f);
}

static void a_request_that_waits_can_end(void) {
    fixture f;
    setup(&f, 4);
    begin(&f);
    for (uint64_t id = 0; id < 8; id++) {
        cpa_scheduler_request request = asked(id, 10, 3);
        request.arrival = id % 2 ? 0 : 50; /* these have not even arrived */
        add(&f, request, 0);
    }
    step(&f, 0);
    for (uint64_t id = 0; id < 8; id++)
        if (id != 1 && id != 5) end(&f, id);
    CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->by_id), 2);
    int64_t steps = 0;
    while (step(&f, 100) > 0) CU_ASSERT_FATAL(++steps < 100);
    CU_ASSERT_EQUAL(f.stats.finished, 2);
    check_empty(&f);
    teardown(&f);
}

static void a_request_in_host_memory_can_end(void) {
    fixture f;
    setup(&f, 4);
    f.options.preemption = CPA_PREEMPT_SWAP;
    f.options.groups.list[0].host_blocks = 4;
    begin(&f);
    add(&f, asked(0, 8, 8), 0);
    add_drawing(&f, 1, 7, 4);
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_swap_outs, 2);
    end(&f, 1);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(f.scheduler->host_pools[0]), 4);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_discards, 1);
    CU_ASSERT_EQUAL(f.plan.discards[0].position, 7);
    end(&f, 0);
    check_empty(&f);
    teardown(&f);
}

static int key_before(const cpa_sequence *a, const cpa_sequence *b) {
    return a->key < b->key;
}

static void a_queue_stays_in_order_when_any_of_it_leaves(void) {
    enum { MANY = 40 };
    static cpa_sequence sequences[MANY];
    cpa_sequence_queue queue = {.before = key_before};
    srand(1);
    for (int round = 0; round < 200; round++) {
        CU_ASSERT_FATAL(cpa_sequence_queue_reserve(&queue, MANY));
        for (int i = 0; i < MANY; i++) sequences[i].key = rand() % 100;
        for (int i = 0; i < MANY; i++) cpa_sequence_queue_push(&queue, &sequences[i]);
        for (int i = 0; i < MANY; i += 1 + rand() % 3) cpa_sequence_queue_remove(&queue, &sequences[i]);
        for (double last = 0; queue.count > 0;) {
            const cpa_sequence *first = cpa_sequence_queue_pop(&queue);
            CU_ASSERT_FATAL(first->key >= last);
            last = first->key;
        }
    }
    cpa_sequence_queue_destroy(&queue);
}

static void how_tokens_are_drawn_comes_with_the_first_chunk_where_it_is_not_plain(void) {
    fixture f;
    setup(&f, 16);
    begin(&f);
    cpa_scheduler_request request = asked(0, 6, 3);
    request.draws = 1;
    request.sampling = (cpa_plan_sampling){.temperature = 0.5f, .top_p = 1, .repetition_penalty = 1, .seed = 3};
    add(&f, request, 0);
    request = asked(1, 6, 3);
    request.draws = 1;
    request.sampling = (cpa_plan_sampling){.top_p = 1, .repetition_penalty = 1, .seed = 4};
    add(&f, request, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL_FATAL(f.plan.n_samplings, 1);
    CU_ASSERT_EQUAL(f.plan.samplings[0].seed, 3);
    CU_ASSERT_EQUAL(f.plan.samplings[0].prompt_tokens, 6);
    CU_ASSERT_EQUAL(f.plan.chunks[0].sampling, 0);
    CU_ASSERT_EQUAL(f.plan.chunks[1].sampling, -1);
    step(&f, 0);
    CU_ASSERT_EQUAL(f.plan.n_samplings, 0);
    CU_ASSERT_EQUAL(f.plan.chunks[0].sampling, -1);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"what is being drawn goes on by name and what is known by value",
     what_is_being_drawn_goes_on_by_name_and_what_is_known_by_value},
    {"a token that no plan emits cannot be reported", a_token_that_no_plan_emits_cannot_be_reported},
    {"a preempted sequence comes back with what was drawn", a_preempted_sequence_comes_back_with_what_was_drawn},
    {"a block is found in the plan after the one that fills it with what was drawn",
     a_block_is_found_in_the_plan_after_the_one_that_fills_it_with_what_was_drawn},
    {"the last block of a request that has finished is found too",
     the_last_block_of_a_request_that_has_finished_is_found_too},
    {"a request that ends gives its place back with the next plan",
     a_request_that_ends_gives_its_place_back_with_the_next_plan},
    {"what was reported before the end is wanted", what_was_reported_before_the_end_is_wanted},
    {"a request whose last token is on its way can end", a_request_whose_last_token_is_on_its_way_can_end},
    {"a request that waits can end", a_request_that_waits_can_end},
    {"a request in host memory can end", a_request_in_host_memory_can_end},
    {"a queue stays in order when any of it leaves", a_queue_stays_in_order_when_any_of_it_leaves},
    {"how tokens are drawn comes with the first chunk where it is not plain",
     how_tokens_are_drawn_comes_with_the_first_chunk_where_it_is_not_plain},
};

CPA_TEST_MAIN("tokens", tests)
