/* What a tenant with many requests adds to a step while others are about, on a machine whose steps take a given time. */
#include <stdlib.h>

#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/scheduler_fixture.h"

enum { BLOCK = 16, MOST_IDS = 1024 };

/* Milliseconds of a step, a sequence that decodes, and a token of a prompt. */
typedef struct machine {
    double step, sequence, token;
} machine;

/* Plan after plan, each asked for when the step before it begins. */
typedef struct simulation {
    fixture f;
    machine costs;
    double asked, begins;                                      /* s: the next plan is asked for, and its step begins */
    double arrived[MOST_IDS], first[MOST_IDS], last[MOST_IDS]; /* of each request, its first token and its latest one */
    int64_t emitted[MOST_IDS];
    int64_t decoded; /* sequences of the last step */
} simulation;

static void open_on(simulation *m, machine costs, int64_t blocks) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){1, BLOCK}, BLOCK, blocks, 2048, 256);
    *m = (simulation){.costs = costs};
    prepare(&m->f, &options);
    begin(&m->f);
}

static void open_simulation(simulation *m, machine costs) {
    open_on(m, costs, 65536);
}

static void close_simulation(simulation *m) {
    teardown(&m->f);
}

/* A request that arrives when the next plan is asked for, or so many seconds later. */
static void ask(simulation *m, const char *tenant, uint64_t id, int64_t prompt, int64_t output, double later) {
    cpa_scheduler_request request = asked(id, prompt, output);
    request.tenant = tenant;
    request.arrival = m->arrived[id] = m->asked + later;
    add(&m->f, request, 0);
}

/* One step; returns what it took. */
static double advance(simulation *m) {
    const cpa_step_plan *plan = &m->f.plan;
    double took = 1e-3 * m->costs.step;
    step(&m->f, m->asked);
    m->decoded = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const int decodes = (plan->chunks[i].flags & CPA_CHUNK_DECODE) != 0;
        m->decoded += decodes;
        took += 1e-3 * (decodes ? m->costs.sequence : m->costs.token) * (double)plan->chunks[i].count;
    }
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const uint64_t id = plan->chunks[i].request;
        if (!(plan->chunks[i].flags & CPA_CHUNK_EMITS)) continue;
        m->last[id] = m->begins + took;
        if (m->emitted[id]++ == 0) m->first[id] = m->last[id];
    }
    m->asked = m->begins;
    m->begins += took;
    return took;
}

static void advance_until(simulation *m, double time) {
    while (m->asked < time) advance(m);
}

static int ascending(const void *a, const void *b) {
    const double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* Median seconds to the first token of requests of 64 + 8 tokens, one every 0.3 s, beside `flood` of another tenant. */
static double first_token_beside(int64_t flood, int64_t prompt, int64_t output, machine costs) {
    enum { OTHERS = 9 };
    static simulation m;
    double waits[OTHERS];
    open_simulation(&m, costs);
    for (int64_t id = 0; id < flood; id++) ask(&m, "flood", (uint64_t)id, prompt, output, 0);
    for (int64_t i = 0; i < OTHERS; i++) {
        const uint64_t id = (uint64_t)(flood + i);
        advance_until(&m, 0.5 + 0.3003 * (double)i);
        ask(&m, "other", id, 64, 8, 0.0001 * (double)i); /* in the middle of a step as well */
        while (m.emitted[id] == 0) advance(&m);
        waits[i] = m.first[id] - m.arrived[id];
    }
    CPA_ASSERT_ORDER(m.f.stats.finished, <, flood); /* it was there all the time */
    close_simulation(&m);
    qsort(waits, OTHERS, sizeof *waits, ascending);
    return waits[OTHERS / 2];
}

static void a_first_token_does_not_wait_for_how_many_another_tenant_has(void) {
    static const machine machines[] = {{0.1, 0.06, 0.01}, {1, 0.04, 0.01}, {6, 0.05, 0.02}};
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const double few = first_token_beside(12, 64, 4000, machines[i]);
        const double many = first_token_beside(500, 64, 4000, machines[i]);
        CPA_ASSERT_ORDER(many, <=, 2 * few);
        if (many > 2 * few) printf("machine %zu: %g s beside 12, %g s beside 500\n", i, few, many);
    }
}

/* Prompts that take a step each, and answers so short that prompts never end. */
static void nor_for_how_long_its_prompts_are(void) {
    static const machine costs = {0.1, 0.06, 0.01};
    const double few = first_token_beside(12, 64, 4000, costs), many = first_token_beside(500, 1900, 20, costs);
    CPA_ASSERT_ORDER(many, <=, 3 * few);
    if (many > 3 * few) printf("%g s beside 12, %g s beside long prompts\n", few, many);
}

/* The sequences of one tenant take turns: no step is long, and none is behind. */
static void sequences_decode_in_turn(void) {
    enum { FLOOD = 200 };
    static simulation m;
    int64_t before[MOST_IDS], least = INT64_MAX, most = 0;
    open_simulation(&m, (machine){0.1, 0.06, 0.01});
    for (uint64_t id = 0; id < FLOOD; id++) ask(&m, "flood", id, 64, 4000, 0);
    advance_until(&m, 0.5);
    CU_ASSERT_EQUAL(m.decoded, FLOOD); /* nobody else is there */
    ask(&m, "other", FLOOD, 64, 4000, 0);
    for (int i = 0; i < 300; i++) advance(&m);
    memcpy(before, m.emitted, sizeof before);
    for (int i = 0; i < 1000; i++) {
        CU_ASSERT_FATAL(advance(&m) < 1.6e-3 && m.decoded > 12); /* 1.5 times 0.1 + 12 * 0.06, and the other's token */
    }
    for (uint64_t id = 1; id < FLOOD; id++) { /* the first goes on in every step */
        const int64_t tokens = m.emitted[id] - before[id];
        if (tokens < least) least = tokens;
        if (tokens > most) most = tokens;
    }
    CU_ASSERT(least > 80 && most - least <= 1);
    close_simulation(&m);
}

static void alone_a_tenant_has_no_bounds(void) {
    enum { FLOOD = 200 };
    static simulation m;
    open_simulation(&m, (machine){0.1, 0.06, 0.01});
    for (uint64_t id = 0; id < FLOOD; id++) ask(&m, "flood", id, 64, 40000, 0);
    advance_until(&m, 0.5);
    ask(&m, "other", FLOOD, 64, 8, 0);
    while (m.emitted[FLOOD] < 8) advance(&m);
    const double gone = m.asked;
    advance_until(&m, gone + 9);
    CPA_ASSERT_ORDER(m.decoded, <, 50);
    advance_until(&m, gone + 11);
    CU_ASSERT_EQUAL(m.decoded, FLOOD);
    close_simulation(&m);
}

/* As where weights are read for all of them at once. */
static void where_a_sequence_costs_little_all_decode(void) {
    enum { FLOOD = 200 };
    static simulation m;
    open_simulation(&m, (machine){10, 0.01, 0.01});
    for (uint64_t id = 0; id < FLOOD; id++) ask(&m, "flood", id, 64, 4000, 0);
    advance_until(&m, 2);
    ask(&m, "other", FLOOD, 64, 4000, 0);
    int64_t decoded = 0;
    for (int i = 0; i < 2000; i++, decoded += m.decoded) advance(&m);
    CPA_ASSERT_ORDER(decoded, >, 2000 * FLOOD * 95 / 100);
    close_simulation(&m);
}

static void first_come_first_served_has_no_bounds(void) {
    static simulation m;
    open_simulation(&m, (machine){0.1, 0.06, 0.01});
    teardown(&m.f);
    m.f.options.policy = CPA_POLICY_FCFS;
    cpa_step_plan_init(&m.f.plan);
    begin(&m.f);
    for (uint64_t id = 0; id < 100; id++) ask(&m, "flood", id, 64, 4000, 0);
    ask(&m, "other", 100, 64, 4000, 0);
    advance_until(&m, 0.5);
    CU_ASSERT_EQUAL(m.decoded, 101);
    close_simulation(&m);
}

/* Whatever the bounds, and where blocks are short: every plan has something, and every request comes to its end. */
static void everything_finishes(void) {
    static simulation m;
    for (int64_t blocks = 60; blocks < 2000; blocks *= 2) {
        open_on(&m, (machine){0.1, 0.06, 0.01}, blocks);
        for (uint64_t id = 0; id < 300; id++)
            ask(&m, id % 3 ? "a" : "b", id, 1 + (int64_t)(id * 37 % 300), 1 + (int64_t)(id * 7 % 500),
                0.001 * (double)(id / 2));
        for (int i = 0; m.f.stats.finished < 300; i++) {
            advance(&m);
            CU_ASSERT_FATAL(i < 100000 && (m.f.plan.n_chunks > 0 || isfinite(m.f.next)));
        }
        close_simulation(&m);
    }
}

/* A request that finds no room comes at any moment, also when those whose turn it is lack blocks. */
static void a_plan_has_something_where_blocks_are_short(void) {
    enum { FLOOD = 13, BLOCKS = 20 };
    static simulation m;
    for (int moment = 0; moment < 60; moment += 3) {
        open_on(&m, (machine){0.1, 0.06, 0.01}, BLOCKS);
        for (uint64_t id = 0; id < FLOOD; id++) ask(&m, "flood", id, 4, 100, 0);
        ask(&m, "other", FLOOD, 4, 1, 0);
        for (int i = 0; i < moment; i++) advance(&m);
        ask(&m, "other", FLOOD + 1, (BLOCKS - 4) * BLOCK, 1, 0);
        while (m.f.stats.finished < FLOOD + 2) {
            advance(&m);
            CU_ASSERT_FATAL(m.f.plan.n_chunks > 0 || isfinite(m.f.next));
        }
        close_simulation(&m);
    }
}

/* ---- what steps cost ---- */

static void note(cpa_step_cost *cost, machine costs, cpa_step_load load) {
    const double took = costs.step + costs.sequence * (double)cost->last[1].decoding +
                        costs.token * (double)cost->last[1].prompt_tokens;
    cpa_step_cost_note(cost, cost->asked + 1e-3 * took, load);
}

static void costs_are_found_from_the_times_of_plans(void) {
    static const machine costs = {2, 0.05, 0.01};
    cpa_step_cost cost = {.asked = 0};
    for (int i = 0; i < 8; i++) {
        CU_ASSERT_FALSE(cpa_step_cost_is_known(&cost));
        note(&cost, costs, (cpa_step_load){10 + i, 0});
    }
    for (int i = 0; i < 500; i++) note(&cost, costs, (cpa_step_load){20 + 17 * i % 50, i % 3 ? 0 : 64 + 29 * i % 100});
    CU_ASSERT(cpa_step_cost_is_known(&cost));
    CU_ASSERT_DOUBLE_EQUAL(cost.seconds[CPA_STEP_ITSELF], 2e-3, 2e-4);
    CU_ASSERT_DOUBLE_EQUAL(cost.seconds[CPA_STEP_DECODE], 5e-5, 3e-6);
    CU_ASSERT_DOUBLE_EQUAL(cost.seconds[CPA_STEP_PROMPT], 1e-5, 1e-6);
    /* A pause between two plans is no step, and a step that something holds up counts little. */
    cpa_step_cost_note(&cost, cost.asked, (cpa_step_load){0, 0});
    cpa_step_cost_note(&cost, cost.asked + 100, (cpa_step_load){30, 0});
    cpa_step_cost_note(&cost, cost.asked, (cpa_step_load){30, 0});
    CU_ASSERT_DOUBLE_EQUAL(cost.seconds[CPA_STEP_DECODE], 5e-5, 3e-6);
    cpa_step_cost_note(&cost, cost.asked + 100, (cpa_step_load){30, 0});
    CU_ASSERT_DOUBLE_EQUAL(cost.seconds[CPA_STEP_ITSELF] + 30 * cost.seconds[CPA_STEP_DECODE], 3.5e-3, 1e-3);
}

static void of_steps_that_are_alike_the_sequences_cost_all(void) {
    cpa_step_cost cost = {.asked = 0};
    for (int i = 0; i < 100; i++) note(&cost, (machine){2, 0.05, 0}, (cpa_step_load){40, 0});
    CU_ASSERT_DOUBLE_EQUAL(cost.seconds[CPA_STEP_DECODE], 1e-4, 1e-6);
    CPA_ASSERT_ORDER(cost.seconds[CPA_STEP_ITSELF], <, 1e-4);
    CU_ASSERT_EQUAL(cost.seconds[CPA_STEP_PROMPT], 0);
}

static const cpa_test tests[] = {
    {"a first token does not wait for how many another tenant has",
     a_first_token_does_not_wait_for_how_many_another_tenant_has},
    {"nor for how long its prompts are", nor_for_how_long_its_prompts_are},
    {"sequences decode in turn", sequences_decode_in_turn},
    {"alone, a tenant has no bounds", alone_a_tenant_has_no_bounds},
    {"where a sequence costs little, all decode", where_a_sequence_costs_little_all_decode},
    {"first come, first served has no bounds", first_come_first_served_has_no_bounds},
    {"everything finishes", everything_finishes},
    {"a plan has something where blocks are short", a_plan_has_something_where_blocks_are_short},
    {"costs are found from the times of plans", costs_are_found_from_the_times_of_plans},
    {"of steps that are alike, the sequences cost all", of_steps_that_are_alike_the_sequences_cost_all},
};
CPA_TEST_MAIN("fair step", tests)
