/* The scheduler: its rules one by one, then thousands of random steps beside a plain model. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "src/schedule/step_plan_wire.h"
#include "tests/fixtures/planner_fixture.h"
#include "tests/fixtures/scheduler_model.h"
#include "tests/fixtures/unit.h"

static cpa_scheduler_options options_for(int32_t ranks, int32_t block_size, int64_t num_blocks, int64_t tokens,
                                         int32_t seqs) {
    return (cpa_scheduler_options){
        .map = {ranks, block_size},
        .block_size = block_size,
        .groups = {1, {{.num_blocks = num_blocks}}},
        .max_num_batched_tokens = tokens,
        .max_num_seqs = seqs,
        .planner = cpa_test_planner(ranks),
    };
}

static void start(scheduler_model *m, int32_t ranks, int32_t block_size, int64_t num_blocks, int64_t tokens,
                  int32_t seqs) {
    cpa_scheduler_options options = options_for(ranks, block_size, num_blocks, tokens, seqs);
    scheduler_model_start(m, &options);
}

static void check_chunk(const scheduler_model *m, int64_t index, int64_t request, int64_t first, int64_t count,
                        uint32_t flags) {
    CU_ASSERT_FATAL(index < m->plan.n_chunks);
    const cpa_plan_chunk *chunk = &m->plan.chunks[index];
    CU_ASSERT_EQUAL(chunk->request, (uint64_t)request);
    CU_ASSERT_EQUAL(chunk->start, first);
    CU_ASSERT_EQUAL(chunk->count, count);
    CU_ASSERT_EQUAL(chunk->flags, flags);
}

static void a_request_is_prefilled_in_chunks_and_then_decoded(void) {
    scheduler_model m;
    start(&m, 2, 4, 8, 6, 4);
    int64_t id = scheduler_model_add(&m, 10, 3, 0, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    check_chunk(&m, 0, id, 0, 6, CPA_CHUNK_FIRST);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    check_chunk(&m, 0, id, 6, 4, CPA_CHUNK_EMITS);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    check_chunk(&m, 0, id, 10, 1, CPA_CHUNK_EMITS | CPA_CHUNK_DECODE);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    check_chunk(&m, 0, id, 11, 1, CPA_CHUNK_EMITS | CPA_CHUNK_DECODE | CPA_CHUNK_FINISHES);
    CU_ASSERT_EQUAL(m.plan.n_releases, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 0);
    CU_ASSERT_EQUAL(m.plan.n_releases, 1);
    CU_ASSERT(isinf(m.next_arrival));
    scheduler_model_end(&m);
}

static void a_prompt_with_one_output_token_finishes_with_its_prefill(void) {
    scheduler_model m;
    start(&m, 3, 4, 8, 64, 4);
    int64_t id = scheduler_model_add(&m, 10, 1, 0, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    check_chunk(&m, 0, id, 0, 10, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES);
    scheduler_model_finish(&m, 1);
    scheduler_model_end(&m);
}

static void decodes_come_first_and_prefill_gets_what_is_left(void) {
    scheduler_model m;
    start(&m, 1, 4, 64, 8, 8);
    int64_t a = scheduler_model_add(&m, 3, 5, 0, 0), b = scheduler_model_add(&m, 30, 2, 0, 0);
    scheduler_model_step(&m, 0);
    check_chunk(&m, 0, a, 0, 3, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS);
    check_chunk(&m, 1, b, 0, 5, CPA_CHUNK_FIRST);
    int64_t c = scheduler_model_add(&m, 2, 5, 1, -1);
    scheduler_model_step(&m, 1);
    check_chunk(&m, 0, a, 3, 1, CPA_CHUNK_EMITS | CPA_CHUNK_DECODE);
    check_chunk(&m, 1, b, 5, 7, 0);
    CU_ASSERT_EQUAL(m.plan.n_chunks, 2);
    scheduler_model_finish(&m, 1);
    CU_ASSERT(m.requests[c].done);
    scheduler_model_end(&m);
}

static void admission_goes_by_priority_then_arrival_then_id(void) {
    scheduler_model m;
    start(&m, 1, 4, 64, 100, 1);
    int64_t late = scheduler_model_add(&m, 4, 1, 2, 0), second = scheduler_model_add(&m, 4, 1, 1, 0);
    int64_t third = scheduler_model_add(&m, 4, 1, 1, 0), low = scheduler_model_add(&m, 4, 1, 0, 5);
    int64_t urgent = scheduler_model_add(&m, 4, 1, 3, -5), order[] = {urgent, second, third, late, low};
    for (int i = 0; i < 5; i++) {
        CU_ASSERT_EQUAL(scheduler_model_step(&m, 10), 1);
        check_chunk(&m, 0, order[i], 0, 4, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES);
    }
    scheduler_model_end(&m);
}

static void a_request_is_left_alone_until_it_arrives(void) {
    scheduler_model m;
    start(&m, 2, 4, 64, 100, 8);
    scheduler_model_add(&m, 4, 1, 7.5, 0);
    scheduler_model_add(&m, 4, 1, 2.5, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 0);
    CU_ASSERT_EQUAL(m.next_arrival, 2.5);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 2.5), 1);
    CU_ASSERT_EQUAL(m.next_arrival, 7.5);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 7.4), 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 7.5), 1);
    CU_ASSERT(isinf(m.next_arrival));
    scheduler_model_end(&m);
}

/* Six of eight blocks are in use; the next in line needs four, the one behind it only one. */
static void nobody_overtakes_the_head_of_the_line(void) {
    scheduler_model m;
    start(&m, 1, 4, 8, 64, 8);
    scheduler_model_add(&m, 21, 4, 0, 0);
    scheduler_model_step(&m, 0);
    int64_t big = scheduler_model_add(&m, 16, 1, 1, 0), small = scheduler_model_add(&m, 4, 1, 2, 0);
    for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL(scheduler_model_step(&m, 3), 1);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 3), 2);
    CU_ASSERT_EQUAL(m.plan.chunks[0].request, (uint64_t)big);
    CU_ASSERT_EQUAL(m.plan.chunks[1].request, (uint64_t)small);
    CU_ASSERT_EQUAL(m.preemptions, 0);
    scheduler_model_end(&m);
}

/* What a finished sequence held is free for the plan that releases it, not earlier. */
static void blocks_of_a_finished_request_are_free_in_the_next_plan(void) {
    scheduler_model m;
    start(&m, 1, 4, 2, 64, 1);
    int64_t a = scheduler_model_add(&m, 8, 1, 0, 0), b = scheduler_model_add(&m, 8, 1, 0, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    CU_ASSERT_EQUAL(m.plan.chunks[0].request, (uint64_t)a);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    CU_ASSERT_EQUAL(m.plan.chunks[0].request, (uint64_t)b);
    CU_ASSERT_EQUAL(m.plan.n_releases, 1);
    CU_ASSERT_EQUAL(m.plan.releases[0], m.plan.chunks[0].seq);
    scheduler_model_end(&m);
}

/* Two sequences of two blocks each fill the pool; the third block of the older one comes from the younger, which then
 * computes prompt and output again and emits only what it had not. */
static void the_youngest_is_preempted_and_resumes_where_its_output_stopped(void) {
    scheduler_model m;
    start(&m, 1, 4, 4, 64, 8);
    int64_t old = scheduler_model_add(&m, 7, 4, 0, 0), young = scheduler_model_add(&m, 6, 5, 1, 0);
    scheduler_model_step(&m, 1);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 2);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 1);
    check_chunk(&m, 0, old, 8, 1, CPA_CHUNK_EMITS | CPA_CHUNK_DECODE);
    CU_ASSERT_EQUAL(m.plan.n_releases, 1);
    CPA_ASSERT_ORDER(m.requests[young].preempted_at, >, 0);
    CU_ASSERT_EQUAL(m.requests[young].emitted, 2);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 1);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 1);
    check_chunk(&m, 0, young, 0, 8, CPA_CHUNK_FIRST | CPA_CHUNK_EMITS);
    CU_ASSERT_EQUAL(m.plan.chunks[0].first_output, 7);
    scheduler_model_finish(&m, 1);
    scheduler_model_end(&m);
}

/* The urgent prefill needs the blocks of a sequence whose decode already stands in the plan. */
static void a_victim_that_was_already_scheduled_is_withdrawn(void) {
    scheduler_model m;
    start(&m, 1, 4, 6, 8, 8);
    int64_t victim = scheduler_model_add(&m, 4, 9, 0, 1);
    scheduler_model_step(&m, 0);
    int64_t urgent = scheduler_model_add(&m, 24, 1, 1, 0);
    for (int i = 0; i < 2; i++) CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 2);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 1);
    check_chunk(&m, 0, urgent, 14, 7, 0);
    CU_ASSERT_EQUAL(m.requests[victim].preempted_at, m.steps);
    scheduler_model_finish(&m, 1);
    scheduler_model_end(&m);
}

/* A prefix whose requests of that many tokens, at most a block, start at that rank. */
static int64_t prefix_that_starts_at(int32_t ranks, int32_t block_size, int64_t tokens, int32_t rank) {
    scheduler_model m;
    start(&m, ranks, block_size, 8, 64, 1);
    do {
        m.prefix++;
        scheduler_model_add(&m, tokens, 1, 0, 0);
        scheduler_model_step(&m, 0);
        CU_ASSERT_FATAL(m.prefix < 1000);
    } while (m.plan.chunks[0].placement.rank != rank);
    int64_t prefix = m.prefix;
    scheduler_model_end(&m);
    return prefix;
}

/* Rank 0 runs full: the one that holds a block there must go, though the one on rank 1 is younger. */
static void only_sequences_with_blocks_on_the_full_rank_are_preempted(void) {
    scheduler_model m;
    start(&m, 2, 4, 3, 12, 8);
    m.prefix = prefix_that_starts_at(2, 4, 4, 0);
    int64_t victim = scheduler_model_add(&m, 4, 1 + 4, 0, 1), grows = scheduler_model_add(&m, 20, 1, 1, 0);
    m.prefix = prefix_that_starts_at(2, 4, 1, 1);
    int64_t bystander = scheduler_model_add(&m, 1, 4, 0.5, 1);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0.5), 2);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 3);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 2);
    check_chunk(&m, 0, bystander, 2, 1, CPA_CHUNK_EMITS | CPA_CHUNK_DECODE);
    check_chunk(&m, 1, grows, 10, 10, CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES);
    CU_ASSERT_EQUAL(m.requests[victim].preempted_at, m.steps);
    CU_ASSERT_EQUAL(m.preemptions, 1);
    scheduler_model_finish(&m, 1);
    scheduler_model_end(&m);
}

/* The younger needs a third block and the older has the rest: it keeps its two until the older is done. */
static void a_sequence_without_younger_ones_waits_with_what_it_holds(void) {
    scheduler_model m;
    start(&m, 1, 4, 4, 64, 8);
    int64_t old = scheduler_model_add(&m, 5, 3, 0, 0), young = scheduler_model_add(&m, 8, 2, 0, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 2);
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
        CU_ASSERT_EQUAL(m.plan.chunks[0].request, (uint64_t)old);
        CU_ASSERT_EQUAL(m.plan.n_releases, 0);
    }
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 1);
    check_chunk(&m, 0, young, 8, 1, CPA_CHUNK_EMITS | CPA_CHUNK_DECODE | CPA_CHUNK_FINISHES);
    CU_ASSERT_EQUAL(m.preemptions, 0);
    scheduler_model_end(&m);
}

/* The prefill in the middle lacks three blocks, of which the youngest holds two: preempting it would not help. */
static void nobody_is_preempted_in_vain(void) {
    scheduler_model m;
    start(&m, 1, 2, 9, 8, 8);
    int64_t old = scheduler_model_add(&m, 5, 3, 0, 0), young = scheduler_model_add(&m, 1, 4, 0, 1);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 2);
    int64_t middle = scheduler_model_add(&m, 15, 1, 1, 0);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 3);
    check_chunk(&m, 2, middle, 0, 6, CPA_CHUNK_FIRST);
    CU_ASSERT_EQUAL(scheduler_model_step(&m, 1), 2);
    CU_ASSERT(m.requests[old].done);
    CU_ASSERT_EQUAL(m.requests[young].computed, 3);
    scheduler_model_finish(&m, 1);
    CU_ASSERT_EQUAL(m.preemptions, 0);
    scheduler_model_end(&m);
}

/* 2 ranks of 3 blocks of 4 tokens hold 24 tokens of one sequence; the last output token is not cached. */
static void a_request_that_just_fits_runs_and_one_token_more_is_refused(void) {
    scheduler_model m;
    cpa_error err = {0};
    start(&m, 2, 4, 3, 7, 8);
    cpa_scheduler_request too_long = {.id = 77, .prompt_tokens = 15, .output_tokens = 11};
    CU_ASSERT_EQUAL(cpa_scheduler_add(m.scheduler, &too_long, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message,
                           "request 77: 15 prompt + 11 output tokens need 4 blocks of 4 tokens on one of 2 "
                           "ranks, which has 3; expected num_blocks of 4 or more");
    scheduler_model_add(&m, 15, 10, 0, 0);
    scheduler_model_finish(&m, 1);
    scheduler_model_end(&m);
}

static void bad_requests_are_refused_and_leave_no_trace(void) {
    static const struct {
        cpa_scheduler_request request;
        const char *message;
    } bad[] = {
        {{.id = 5, .prompt_tokens = 0, .output_tokens = 1}, "request 5: 0 prompt and 1 output tokens"},
        {{.id = 5, .prompt_tokens = -3, .output_tokens = 1}, "request 5: -3 prompt"},
        {{.id = 5, .prompt_tokens = 1, .output_tokens = 0}, "request 5: 1 prompt and 0 output tokens"},
        {{.id = 5, .prompt_tokens = INT64_MAX, .output_tokens = 2}, "request 5: 9223372036854775807 prompt"},
        {{.id = 5, .prompt_tokens = INT64_MAX - 2, .output_tokens = 2},
         "request 5: 9223372036854775805 prompt + 2 output tokens need"},
        {{.id = 5, .prompt_tokens = 1, .output_tokens = 1, .arrival = INFINITY}, "request 5: arrival at inf s"},
        {{.id = 5, .prompt_tokens = 1, .output_tokens = 1, .arrival = NAN}, "request 5: arrival at"},
        {{.id = 0, .prompt_tokens = 1, .output_tokens = 1}, "request 0: another request has this id"},
    };
    scheduler_model m;
    start(&m, 2, 4, 8, 7, 8);
    scheduler_model_add(&m, 4, 4, 0, 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_error err = {0};
        CU_ASSERT_EQUAL(cpa_scheduler_add(m.scheduler, &bad[i].request, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, bad[i].message));
    }
    scheduler_model_finish(&m, 1);
    scheduler_model_end(&m);
}

static void bad_options_are_refused(void) {
    cpa_scheduler_options good = options_for(4, 16, 8, 64, 8), bad[9];
    for (int i = 0; i < 9; i++) bad[i] = good;
    bad[0].map.cp_size = 0;
    bad[1].map.interleave = 24;
    bad[2].map.interleave = 0;
    bad[3].block_size = 0;
    bad[4].groups.list[0].num_blocks = 0;
    bad[5].max_num_batched_tokens = 0;
    bad[6].max_num_seqs = 0;
    bad[7].token_at = NULL;
    bad[8].planner.cp_size = 3;
    for (int i = 0; i < 9; i++) {
        cpa_scheduler *scheduler = NULL;
        cpa_error err = {0};
        CU_ASSERT_EQUAL(cpa_scheduler_create(&bad[i], &scheduler, &err), CPA_INVALID);
        CU_ASSERT_PTR_NULL(scheduler);
        CPA_ASSERT_ORDER(strlen(err.message), >, 0);
    }
}

static void requests_that_begin_alike_share_a_first_rank_and_others_spread(void) {
    enum { RANKS = 5, PREFIXES = 200 };
    scheduler_model m;
    int64_t at[RANKS] = {0};
    start(&m, RANKS, 16, 64, 1000, 4);
    for (m.prefix = 1; m.prefix <= PREFIXES; m.prefix++) {
        scheduler_model_add(&m, 16, 1, 0, 0);
        scheduler_model_add(&m, 60, 1, 0, 0);
        CU_ASSERT_EQUAL(scheduler_model_step(&m, 0), 2);
        CU_ASSERT_EQUAL(m.plan.chunks[0].placement.rank, m.plan.chunks[1].placement.rank);
        at[m.plan.chunks[0].placement.rank]++;
    }
    for (int r = 0; r < RANKS; r++) CPA_ASSERT_ORDER(at[r], >, PREFIXES / RANKS / 2);
    scheduler_model_end(&m);
}

static void chunks_are_counted_by_algorithm_and_reason(void) {
    scheduler_model m;
    cpa_scheduler_stats stats;
    start(&m, 2, 4, 64, 100, 4);
    scheduler_model_add(&m, 30, 5, 0, 0);
    scheduler_model_finish(&m, 1);
    cpa_scheduler_get_stats(m.scheduler, &stats);
    CU_ASSERT_EQUAL(stats.chunks[CPA_PASS_Q][CPA_REASON_DECODE], 4);
    CU_ASSERT_EQUAL(stats.chunks[CPA_PASS_KV][CPA_REASON_OVERLAP] + stats.chunks[CPA_PASS_KV][CPA_REASON_BYTES], 1);
    CU_ASSERT_EQUAL(stats.peak_blocks[0], 5);
    scheduler_model_end(&m);
}

static int64_t between(int64_t low, int64_t high) {
    return low + rand() % (high - low + 1);
}

/* One scheduler of a random shape with random requests, pools from ample to one sequence's worth. Returns its
 * preemptions. */
static int64_t run_random_schedule(void) {
    scheduler_model m;
    int32_t ranks = (int32_t)between(1, 6), block_size = 1 << between(0, 4);
    int64_t longest = between(1, 120), whole = longest * 2 / (block_size * ranks) + 1;
    cpa_scheduler_options options =
        options_for(ranks, block_size, whole * between(1, 6), between(1, 80), (int32_t)between(1, 12));
    /* Shorter than a block, as long, or longer. */
    options.map.interleave = between(0, 2) ? block_size * (int32_t)between(1, 3) : 1 << between(0, 4);
    if (!cpa_interleave_fits(options.map.interleave, block_size)) options.map.interleave = block_size;
    options.groups.list[0].num_blocks += options.map.interleave / block_size + 1;
    options.planner.forced = (cpa_algorithm)between(CPA_AUTO, CPA_PASS_Q);
    options.adaptive_chunks = (int32_t)between(0, 1);
    scheduler_model_start(&m, &options);
    for (int64_t n = between(1, 40); n > 0; n--) {
        m.prefix = between(0, 5);
        scheduler_model_add(&m, between(1, longest), between(1, longest), (double)between(0, 200),
                            (int32_t)between(-1, 1));
        for (int64_t steps = between(0, 3); steps > 0; steps--) scheduler_model_step(&m, m.now + 0.5);
    }
    scheduler_model_finish(&m, (double)between(0, 2));
    int64_t preemptions = m.preemptions;
    scheduler_model_end(&m);
    return preemptions;
}

static void random_schedules_lose_nothing_and_emit_each_token_once(void) {
    int64_t preempted = 0, schedules = 400;
    srand(11);
    for (int64_t i = 0; i < schedules; i++) preempted += run_random_schedule() > 0;
    CPA_ASSERT_ORDER(preempted, >, schedules / 10);
    CPA_ASSERT_ORDER(preempted, <, schedules);
}

/* Every plan of a schedule passes the wire within the limits that its options imply. */
static void plans_survive_the_wire(void) {
    scheduler_model m;
    start(&m, 3, 4, 12, 20, 6);
    cpa_plan_limits limits = {.cp_size = 3, .max_seqs = 6, .groups = {1, {{.num_blocks = 12}}}, .max_tokens = 20};
    cpa_step_plan decoded;
    uint8_t *message = NULL;
    int64_t capacity = 0, bytes = 0;
    cpa_step_plan_init(&decoded);
    for (int i = 0; i < 20; i++) scheduler_model_add(&m, 10 + 5 * i, 30, i, 0);
    while (scheduler_model_step(&m, 20) > 0) {
        CU_ASSERT_EQUAL(cpa_step_plan_encode(&m.plan, &message, &capacity, &bytes, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_step_plan_decode(message, bytes, &limits, &decoded, NULL), CPA_OK);
        CU_ASSERT_EQUAL(decoded.n_chunks, m.plan.n_chunks);
        CU_ASSERT_EQUAL(memcmp(decoded.token_ids, m.plan.token_ids, (size_t)decoded.n_token_ids * 4), 0);
    }
    free(message);
    cpa_step_plan_destroy(&decoded);
    scheduler_model_end(&m);
}

/* No two requests begin alike. */
static uint32_t own_token(void *ctx, uint64_t request, int64_t position) {
    (void)ctx;
    return (uint32_t)(request * 1000003 + (uint64_t)position);
}

static double processor_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 512 sequences of 128K tokens on 8 ranks, with a pool that holds them all; the bound leaves room for sanitizers. */
static void planning_a_step_of_512_long_sequences_takes_about_a_millisecond(void) {
    enum { SEQS = 512, TOKENS = 131072, BLOCK = 64, STEPS = 200 };
    cpa_scheduler_options options = options_for(8, BLOCK, SEQS * (TOKENS / BLOCK / 8 + 8), SEQS * TOKENS, SEQS);
    options.token_at = own_token;
    options.prefix_caching = 1;
    cpa_scheduler *scheduler = NULL;
    cpa_step_plan plan;
    double next;
    cpa_step_plan_init(&plan);
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_create(&options, &scheduler, NULL), CPA_OK);
    for (uint64_t i = 0; i < SEQS; i++) {
        cpa_scheduler_request request = {.id = i, .prompt_tokens = TOKENS, .output_tokens = 2 * STEPS};
        CU_ASSERT_EQUAL_FATAL(cpa_scheduler_add(scheduler, &request, NULL), CPA_OK);
    }
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_plan(scheduler, 0, &plan, &next, NULL), CPA_OK);
    CU_ASSERT_EQUAL(plan.n_chunks, SEQS);
    double begin = processor_seconds();
    for (int i = 0; i < STEPS; i++) {
        CU_ASSERT_EQUAL_FATAL(cpa_scheduler_plan(scheduler, 0, &plan, &next, NULL), CPA_OK);
        CU_ASSERT_EQUAL(plan.n_token_ids, SEQS);
    }
    double per_step = (processor_seconds() - begin) / STEPS;
    printf("%.0f us a step ... ", 1e6 * per_step);
    CPA_ASSERT_ORDER(per_step, <, 20e-3);
    cpa_scheduler_destroy(scheduler);
    cpa_step_plan_destroy(&plan);
}

static const cpa_test tests[] = {
    {"a request is prefilled in chunks and then decoded", a_request_is_prefilled_in_chunks_and_then_decoded},
    {"a prompt with one output token finishes with its prefill",
     a_prompt_with_one_output_token_finishes_with_its_prefill},
    {"decodes come first and prefill gets what is left", decodes_come_first_and_prefill_gets_what_is_left},
    {"admission goes by priority, then arrival, then id", admission_goes_by_priority_then_arrival_then_id},
    {"a request is left alone until it arrives", a_request_is_left_alone_until_it_arrives},
    {"nobody overtakes the head of the line", nobody_overtakes_the_head_of_the_line},
    {"blocks of a finished request are free in the next plan", blocks_of_a_finished_request_are_free_in_the_next_plan},
    {"the youngest is preempted and resumes where its output stopped",
     the_youngest_is_preempted_and_resumes_where_its_output_stopped},
    {"a victim that was already scheduled is withdrawn", a_victim_that_was_already_scheduled_is_withdrawn},
    {"only sequences with blocks on the full rank are preempted",
     only_sequences_with_blocks_on_the_full_rank_are_preempted},
    {"a sequence without younger ones waits with what it holds",
     a_sequence_without_younger_ones_waits_with_what_it_holds},
    {"nobody is preempted in vain", nobody_is_preempted_in_vain},
    {"a request that just fits runs and one token more is refused",
     a_request_that_just_fits_runs_and_one_token_more_is_refused},
    {"bad requests are refused and leave no trace", bad_requests_are_refused_and_leave_no_trace},
    {"bad options are refused", bad_options_are_refused},
    {"requests that begin alike share a first rank and others spread",
     requests_that_begin_alike_share_a_first_rank_and_others_spread},
    {"chunks are counted by algorithm and reason", chunks_are_counted_by_algorithm_and_reason},
    {"random schedules lose nothing and emit each token once", random_schedules_lose_nothing_and_emit_each_token_once},
    {"plans survive the wire", plans_survive_the_wire},
    {"planning a step of 512 long sequences takes about a millisecond",
     planning_a_step_of_512_long_sequences_takes_about_a_millisecond},
};

CPA_TEST_MAIN("scheduler", tests)
