/* Tenants: who of them goes first, and what one below its share takes from the others. */
#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/scheduler_fixture.h"

enum { BLOCK = 4 };

static void setup(fixture *f, int64_t blocks, int64_t tokens, int32_t seqs) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){1, BLOCK}, BLOCK, blocks, tokens, seqs);
    prepare(f, &options);
}

/* A request of a tenant, which arrives at once. */
static cpa_scheduler_request of(const char *tenant, uint64_t id, int64_t prompt, int64_t output) {
    cpa_scheduler_request request = asked(id, prompt, output);
    request.tenant = tenant;
    return request;
}

static int has_chunk(const fixture *f, uint64_t request) {
    for (int64_t i = 0; i < f->plan.n_chunks; i++)
        if (f->plan.chunks[i].request == request) return 1;
    return 0;
}

/* Steps until a request has a chunk; returns how many that took. */
static int64_t steps_until(fixture *f, uint64_t request) {
    int64_t steps = 0;
    do {
        CU_ASSERT_FATAL(step(f, 0) > 0 && ++steps < 10000);
    } while (!has_chunk(f, request));
    return steps;
}

static const cpa_tenant *tenant_of(const fixture *f, const char *name) {
    cpa_tenant *tenant;
    HASH_FIND_STR(f->scheduler->tenants.by_name, name, tenant);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tenant);
    return tenant;
}

/* One at a time: requests of 8 + 4 tokens, of which the last is never computed, count 8 + 2 * 4, those of 4 + 1 tokens
 * 4 + 2: three of the latter go to one of the former. */
static void the_tenant_that_was_served_least_goes_first(void) {
    static const uint64_t order[] = {0, 10, 11, 12, 1, 13, 14, 15, 2};
    fixture f;
    setup(&f, 64, 8, 1);
    begin(&f);
    for (uint64_t id = 0; id < 4; id++) add(&f, of("long", id, 8, 4), 0);
    for (uint64_t id = 10; id < 18; id++) add(&f, of("short", id, 4, 1), 0);
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) steps_until(&f, order[i]);
    CU_ASSERT_EQUAL(tenant_of(&f, "long")->service, 2 * 16 + 8 + 2);
    CU_ASSERT_EQUAL(tenant_of(&f, "short")->service, 6 * 6);
    teardown(&f);
}

static void a_tenant_that_comes_later_has_no_claim_to_what_it_did_not_ask_for(void) {
    fixture f;
    setup(&f, 64, 8, 1);
    begin(&f);
    for (uint64_t id = 0; id < 10; id++) add(&f, of("first", id, 8, 1), 0);
    for (uint64_t id = 0; id < 5; id++) steps_until(&f, id);
    for (uint64_t id = 10; id < 14; id++) add(&f, of("late", id, 8, 1), 0);
    /* From now on in turn. */
    static const uint64_t order[] = {5, 10, 6, 11, 7, 12, 8, 13, 9};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) CU_ASSERT_EQUAL(steps_until(&f, order[i]), 1);
    teardown(&f);
}

static void coming_and_going_gains_nothing(void) {
    fixture f;
    setup(&f, 64, 32, 4);
    begin(&f);
    add(&f, of("stays", 0, 4, 200), 0);
    add(&f, of("goes", 1, 28, 1), 0); /* ends at once */
    for (int i = 0; i < 3; i++) step(&f, 0);
    CU_ASSERT_EQUAL(HASH_COUNT(f.scheduler->tenants.by_name), 1);
    const int64_t served = tenant_of(&f, "stays")->service;
    CPA_ASSERT_ORDER(served, <, 30);
    add(&f, of("goes", 2, 28, 1), 0);
    CU_ASSERT_EQUAL(tenant_of(&f, "goes")->service, 28 + 2);
    add(&f, of("new", 3, 28, 1), 0);
    step(&f, 0);
    CU_ASSERT(has_chunk(&f, 3) && tenant_of(&f, "new")->service >= served);
    teardown(&f);
}

static void service_counts_within_a_priority_alone(void) {
    fixture f;
    setup(&f, 64, 8, 1);
    begin(&f);
    for (uint64_t id = 0; id < 6; id++) {
        cpa_scheduler_request request = of("served", id, 8, 1);
        request.priority = id < 3 ? 1 : 0;
        add(&f, request, 0);
    }
    cpa_scheduler_request other = of("other", 9, 8, 1);
    other.priority = 1;
    add(&f, other, 0);
    static const uint64_t order[] = {3, 4, 5, 9, 0, 1, 2};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) CU_ASSERT_EQUAL(steps_until(&f, order[i]), 1);
    teardown(&f);
}

static void first_come_first_served_knows_no_tenants(void) {
    fixture f;
    setup(&f, 64, 8, 2);
    f.options.policy = CPA_POLICY_FCFS;
    begin(&f);
    for (uint64_t id = 0; id < 6; id++) add(&f, of("flood", id, 8, 4), 0);
    add(&f, of("other", 6, 8, 1), 0);
    for (uint64_t id = 0; id < 7; id++) steps_until(&f, id);
    CU_ASSERT_EQUAL(f.stats.preemptions, 0);
    teardown(&f);
}

/* All places are taken by long answers of one tenant when another comes. */
static void a_tenant_below_its_share_of_places_gets_one_at_once(void) {
    fixture f;
    setup(&f, 256, 64, 4);
    begin(&f);
    for (uint64_t id = 0; id < 20; id++) add(&f, of("flood", id, 4, 100), 0);
    for (int i = 0; i < 3; i++) step(&f, 0);
    CU_ASSERT_EQUAL(tenant_of(&f, "flood")->running, 4);
    for (uint64_t id = 20; id < 24; id++) add(&f, of("other", id, 4, 100), 0);
    step(&f, 0);
    CU_ASSERT(has_chunk(&f, 20) && has_chunk(&f, 21));
    CU_ASSERT(has_chunk(&f, 0) && has_chunk(&f, 1) && !has_chunk(&f, 2)); /* its last ones give way */
    CU_ASSERT_EQUAL(tenant_of(&f, "other")->running, 2);                  /* its share, and no more */
    for (int i = 0; i < 20; i++) step(&f, 0);
    CU_ASSERT_EQUAL(f.stats.preemptions, 2); /* and nobody takes it back */
    CU_ASSERT_EQUAL(tenant_of(&f, "flood")->running, 2);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, 24);
    teardown(&f);
}

/* All blocks are held by one tenant, which needs more and more, when another comes. */
static void a_tenant_below_its_share_of_blocks_gets_them_and_keeps_them(void) {
    fixture f;
    setup(&f, 40, 64, 16);
    begin(&f);
    for (uint64_t id = 0; id < 8; id++) add(&f, of("flood", id, 16, 60), 0);
    while (f.stats.preemptions == 0) step(&f, 0);
    add(&f, of("other", 8, 32, 20), 0);
    CU_ASSERT_EQUAL(steps_until(&f, 8), 1);
    for (int i = 1; i < 20; i++) {
        step(&f, 0);
        CU_ASSERT(has_chunk(&f, 8)); /* 52 tokens are 13 blocks of 40 */
    }
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, 9);
    teardown(&f);
}

static void nobody_of_a_more_urgent_priority_gives_way(void) {
    fixture f;
    setup(&f, 256, 64, 2);
    begin(&f);
    for (uint64_t id = 0; id < 4; id++) {
        cpa_scheduler_request urgent = of("flood", id, 4, 10);
        urgent.priority = -1;
        add(&f, urgent, 0);
    }
    step(&f, 0);
    add(&f, of("other", 4, 4, 10), 0);
    steps_until(&f, 4);
    CU_ASSERT_EQUAL(f.stats.preemptions, 0);
    CU_ASSERT_EQUAL(f.stats.finished, 4);
    teardown(&f);
}

/* Steps until the first token of a tenant's request that comes when a flood of another one runs. */
static int64_t first_token_behind(uint64_t flood) {
    fixture f;
    setup(&f, 1024, 64, 8);
    begin(&f);
    for (uint64_t id = 0; id < flood; id++) add(&f, of("flood", id, 28, 40), 0);
    for (int i = 0; i < 10; i++) step(&f, 0);
    add(&f, of("other", flood, 28, 4), 0);
    const int64_t steps = steps_until(&f, flood);
    teardown(&f);
    return steps;
}

static void a_tenant_waits_no_longer_behind_a_longer_flood(void) {
    CU_ASSERT_EQUAL(first_token_behind(12), 1);
    CU_ASSERT_EQUAL(first_token_behind(200), 1);
}

/* Many tenants at once: what each has been served differs by no more than one request, and everybody is served. */
static void service_stays_even_among_many_tenants(void) {
    enum { TENANTS = 20, EACH = 10, COST = 12 + 2 * 3 };
    fixture f;
    setup(&f, 64, 16, 4);
    begin(&f);
    for (uint64_t id = 0; id < TENANTS * EACH; id++) {
        char name[8];
        snprintf(name, sizeof name, "%d", (int)(id / EACH));
        add(&f, of(name, id, 12, 3), 0);
    }
    while (f.stats.finished < TENANTS * EACH / 2) {
        int64_t least = INT64_MAX, most = 0;
        CU_ASSERT_FATAL(step(&f, 0) > 0);
        for (const cpa_tenant *t = f.scheduler->tenants.by_name; t; t = t->hh.next) {
            if (t->service < least) least = t->service;
            if (t->service > most) most = t->service;
        }
        CU_ASSERT_FATAL(most - least <= 2 * COST);
    }
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.finished, TENANTS * EACH);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"the tenant that was served least goes first", the_tenant_that_was_served_least_goes_first},
    {"a tenant that comes later has no claim to what it did not ask for",
     a_tenant_that_comes_later_has_no_claim_to_what_it_did_not_ask_for},
    {"coming and going gains nothing", coming_and_going_gains_nothing},
    {"service counts within a priority alone", service_counts_within_a_priority_alone},
    {"first come, first served knows no tenants", first_come_first_served_knows_no_tenants},
    {"a tenant below its share of places gets one at once", a_tenant_below_its_share_of_places_gets_one_at_once},
    {"a tenant below its share of blocks gets them and keeps them",
     a_tenant_below_its_share_of_blocks_gets_them_and_keeps_them},
    {"nobody of a more urgent priority gives way", nobody_of_a_more_urgent_priority_gives_way},
    {"a tenant waits no longer behind a longer flood", a_tenant_waits_no_longer_behind_a_longer_flood},
    {"service stays even among many tenants", service_stays_even_among_many_tenants},
};
CPA_TEST_MAIN("fairness", tests)
