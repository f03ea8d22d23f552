/* Who listens to events knows after each plan what can be found, and nothing else. */
#include <stdlib.h>

#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/scheduler_fixture.h"

enum { MOST = 512, BLOCK = 4 };

/* A listener, who keeps the digests of what is stored and not removed. */
typedef struct listener {
    cpa_block_event known[MOST];
    int n, stored, removed, wrong;
} listener;

static int index_of(const listener *l, int32_t group, const uint8_t *digest) {
    for (int i = 0; i < l->n; i++)
        if (l->known[i].group == group && memcmp(l->known[i].digest, digest, sizeof l->known[i].digest) == 0) return i;
    return -1;
}

static void listen(void *ctx, const cpa_block_event *event) {
    listener *l = ctx;
    const int at = index_of(l, event->group, event->digest);
    if (event->kind == CPA_BLOCK_STORED) {
        static const uint8_t none[32];
        l->wrong += at >= 0 || l->n == MOST || event->n_tokens % BLOCK != 0 || event->tokens[0] == UINT32_MAX;
        l->wrong += (memcmp(event->parent, none, sizeof none) == 0) != (event->first_token == 0);
        l->known[l->n++] = *event;
        l->stored++;
    } else {
        l->wrong += at < 0;
        if (at >= 0) l->known[at] = l->known[--l->n];
        l->removed++;
    }
}

/* What can be found of full units is what the listener knows. */
static void compare(const fixture *f, const listener *l) {
    const cpa_scheduler_options *o = &f->options;
    int found[MOST] = {0}, n = 0;
    for (int32_t p = 0; p < cpa_pools(o); p++)
        for (int32_t block = 0; block < cpa_pool_group(o, p)->num_blocks; block++) {
            const int32_t group = p / o->map.cp_size;
            const cpa_prefix_digest *digest =
                cpa_prefix_cache_digest(f->scheduler->caches[group], cpa_pool_rank(o, p), block);
            const int at = digest ? index_of(l, group, digest->bytes) : -1;
            CU_ASSERT(!digest || at >= 0);
            if (at >= 0) n += !found[at];
            if (at >= 0) found[at] = 1;
        }
    CU_ASSERT_EQUAL(n, l->n);
}

/* Requests that begin alike, in little memory, so that blocks are found, evicted and stored again. */
static void run(int32_t ranks, int32_t interleave, int32_t groups) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){ranks, interleave}, BLOCK, 24 / ranks, 64, 4);
    listener l = {.n = 0};
    fixture f;
    prepare(&f, &options);
    f.options.groups = (cpa_layer_groups){groups, {{.num_blocks = 24 / ranks}, {.num_blocks = 18, .window = 9}}};
    f.options.on_block_event = listen;
    f.options.block_event_ctx = &l;
    begin(&f);
    srand(5);
    for (uint64_t id = 0; id < 60; id++) {
        add(&f, asked(id, 10 + rand() % 30, 1 + rand() % 6), rand() % 3 ? 10 + rand() % 20 : 0);
        step(&f, 0);
        compare(&f, &l);
    }
    while (step(&f, 0) > 0) compare(&f, &l);
    CU_ASSERT_EQUAL(l.wrong, 0);
    CPA_ASSERT_ORDER(l.stored, >, 100 / ranks);
    CPA_ASSERT_ORDER(l.removed, >, 50 / ranks);
    teardown(&f);
}

static void a_listener_knows_what_can_be_found(void) {
    run(1, BLOCK, 1);
    run(3, BLOCK, 1);
}

static void units_of_all_ranks_come_and_go_as_one(void) {
    run(2, 1, 1);
}

static void each_group_of_layers_is_told_of_by_itself(void) {
    run(2, BLOCK, 2);
}

/* The chain of a prompt: each block names the one before. */
static void blocks_of_a_prompt_name_their_parents(void) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){1, BLOCK}, BLOCK, 16, 64, 4);
    listener l = {.n = 0};
    fixture f;
    prepare(&f, &options);
    f.options.on_block_event = listen;
    f.options.block_event_ctx = &l;
    begin(&f);
    add(&f, asked(0, 14, 1), 0);
    finish(&f);
    CU_ASSERT_EQUAL_FATAL(l.n, 3);
    for (int i = 0; i < 3; i++) {
        CU_ASSERT_EQUAL(l.known[i].first_token, i * BLOCK);
        CU_ASSERT_EQUAL(l.known[i].n_tokens, BLOCK);
        if (i > 0) CU_ASSERT_EQUAL(memcmp(l.known[i].parent, l.known[i - 1].digest, 32), 0);
    }
    teardown(&f);
}

static const cpa_test tests[] = {
    {"a listener knows what can be found", a_listener_knows_what_can_be_found},
    {"units of all ranks come and go as one", units_of_all_ranks_come_and_go_as_one},
    {"each group of layers is told of by itself", each_group_of_layers_is_told_of_by_itself},
    {"blocks of a prompt name their parents", blocks_of_a_prompt_name_their_parents},
};

CPA_TEST_MAIN("block events", tests)
