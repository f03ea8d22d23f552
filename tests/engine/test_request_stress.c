/* Four threads submit, cancel, stop, drain and read statistics at random while an engine serves: every request that was
 * taken is told once, and every block is back in the end. Ranks are threads of this process, which meet over TCP, so
 * that the thread sanitizer sees all of them; MPI is not started. CPATTN_TEST_OPS sets how many operations there
 * are. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/hash.h"
#include "src/engine/engine_internal.h"
#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/free_port.h"
#include "tests/fixtures/unit.h"

enum { DEFAULT_OPS = 3000, ACTORS = 4, MOST_RANKS = 3 };

/* One engine, on all its ranks. */
typedef struct stress {
    int32_t ranks, port;
    int64_t ops;
    cpa_engine *engine; /* of rank 0, once it is there */
    pthread_barrier_t ready;
    atomic_llong done; /* operations */
    atomic_ullong ids;
    atomic_uchar *told; /* by id */
    atomic_llong taken, busy, refused, cancelled, stops, drains, ends;
    atomic_llong reasons[CPA_FINISH_FAILED + 1];
} stress;

static void nap(long microseconds) {
    const struct timespec time = {.tv_nsec = microseconds * 1000};
    nanosleep(&time, NULL);
}

/* ---- the threads that act ---- */

static uint64_t draw(uint64_t *state, uint64_t n) {
    *state += CPA_GOLDEN;
    return cpa_mix64(*state) % n;
}

static void submit(stress *s, uint64_t *state) {
    static const char *const salts[] = {NULL, "a", "b"};
    const uint64_t id = s->ids++;
    const cpa_request request = {
        .size = sizeof request,
        .id = id,
        .prompt_tokens = 1 + (int64_t)draw(state, 60),
        .output_tokens = 1 + (int64_t)draw(state, 8),
        .arrival_s = draw(state, 8) == 0 ? 1e-4 * (double)draw(state, 50) : 0,
        .priority = (int32_t)draw(state, 3),
        .salt = salts[draw(state, 3)],
        .deadline_s = draw(state, 6) == 0 ? 1e-4 * (double)(1 + draw(state, 100)) : 0,
    };
    switch (cpa_engine_submit(s->engine, &request)) {
        case CPA_OK: s->taken++; break;
        case CPA_BUSY:
            s->busy++;
            nap(200);
            break;
        case CPA_STOPPED:
            s->refused++;
            nap(2000);
            break;
        default: CU_FAIL("submit");
    }
}

static void act(stress *s, uint64_t *state) {
    const uint64_t choice = draw(state, 1000), ids = s->ids;
    cpa_engine_stats stats;
    if (choice < 600) {
        submit(s, state);
    } else if (choice < 900) {
        const uint64_t recent = ids < 40 ? ids : 40;
        if (recent > 0 && cpa_engine_cancel(s->engine, ids - 1 - draw(state, recent)) == CPA_OK) s->cancelled++;
    } else if (choice < 990) {
        CU_ASSERT_EQUAL(cpa_engine_get_stats(s->engine, &stats, sizeof stats), CPA_OK);
        CPA_ASSERT_ORDER(stats.requests_finished, <=, s->taken);
    } else if (choice < 995) {
        cpa_engine_stop(s->engine);
        s->stops++;
    } else {
        (void)cpa_engine_drain(s->engine, 1e-3 * (double)draw(state, 5));
        s->drains++;
    }
}

static void *act_at_random(void *ctx) {
    stress *s = ctx;
    static atomic_ullong seeds;
    uint64_t state = cpa_mix64(++seeds);
    while (s->done++ < s->ops) act(s, &state);
    (void)cpa_engine_drain(s->engine, 0); /* the engine serves no longer than there is someone who acts */
    return NULL;
}

/* ---- the ranks ---- */

static void on_finish(void *ctx, const cpa_request_result *result) {
    stress *s = ctx;
    s->told[result->id]++;
    s->ends++;
    s->reasons[result->reason]++;
    /* From here, too. */
    if (result->id % 7 == 0) (void)cpa_engine_cancel(s->engine, result->id + 1);
}

static cpa_engine_options engine_options(void) {
    return (cpa_engine_options){.size = sizeof(cpa_engine_options),
                                .device = {.size = sizeof(cpa_device_options)},
                                .model = {.layers = 1,
                                          .attention.q_heads = 1,
                                          .attention.kv_heads = 1,
                                          .attention.k_dim = 8,
                                          .attention.v_dim = 8,
                                          .mask = {.causal = 1}},
                                .block_size = 4,
                                .num_blocks = 40, /* too few for those that run at once */
                                .max_num_batched_tokens = 64,
                                .max_num_seqs = 8,
                                .preemption = CPA_PREEMPT_SWAP,
                                .swap_bytes = 1 << 16,
                                .tenant_block_quota = 30,
                                .max_queued_requests = 24,
                                .skip_self_test = 1};
}

/* Serves until all operations are done, and then runs what is left; every rank does what rank 0 says. */
static void serve(stress *s, cpa_comm *comm, cpa_engine *engine) {
    const int is_first = cpa_comm_rank(comm) == 0;
    pthread_t actors[ACTORS];
    for (int i = 0; is_first && i < ACTORS; i++) pthread_create(&actors[i], NULL, act_at_random, s);
    for (int go_on = 1; go_on;) {
        cpa_status status = cpa_engine_serve(engine, on_finish, NULL, s);
        if (status != CPA_OK && status != CPA_STOPPED) printf("%s\n", cpa_engine_error(engine));
        CU_ASSERT(status == CPA_OK || status == CPA_STOPPED);
        go_on = s->done < s->ops;
        CU_ASSERT_EQUAL(cpa_comm_broadcast(comm, &go_on, sizeof go_on, 0, NULL), CPA_OK);
    }
    for (int i = 0; is_first && i < ACTORS; i++) pthread_join(actors[i], NULL);
    cpa_comm_barrier(comm, NULL);
    cpa_status status = CPA_STOPPED; /* a stop may come late */
    while (status == CPA_STOPPED) status = cpa_engine_run(engine, on_finish, NULL, s);
    if (status != CPA_OK) printf("%s\n", cpa_engine_error(engine));
    CU_ASSERT_EQUAL(status, CPA_OK);
}

static void expect_all_is_back(const stress *s, const cpa_engine *engine) {
    const cpa_scheduler *scheduler = engine->scheduler;
    cpa_engine_stats stats;
    for (int32_t r = 0; r < s->ranks; r++) {
        CU_ASSERT_EQUAL(cpa_block_pool_free_count(scheduler->pools[r]), scheduler->options.groups.list[0].num_blocks);
        CU_ASSERT_EQUAL(cpa_block_pool_free_count(scheduler->host_pools[r]),
                        scheduler->options.groups.list[0].host_blocks);
    }
    CU_ASSERT_EQUAL(HASH_COUNT(scheduler->tenants.by_name), 0);
    CU_ASSERT_EQUAL(engine->inbox->live, 0);
    CU_ASSERT_EQUAL(engine->inbox->queued_requests, 0);
    CU_ASSERT_EQUAL(engine->inbox->queued_tokens, 0);
    CU_ASSERT_EQUAL(engine->inbox->deadlines.count, 0);
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.requests_waiting + stats.requests_running, 0);
    CU_ASSERT_EQUAL(stats.requests_finished + stats.requests_cancelled + stats.requests_expired, s->taken);
    CU_ASSERT_EQUAL(s->reasons[CPA_FINISH_FAILED], 0);
    CU_ASSERT_EQUAL(s->ends, s->taken);
    for (uint64_t id = 0; id < s->ids; id++) CPA_ASSERT_ORDER(s->told[id], <=, 1);
    printf("%lld taken, %lld busy, %lld refused, %lld preempted; %lld finished, %lld cancelled, %lld expired ... ",
           (long long)s->taken, (long long)s->busy, (long long)s->refused, (long long)stats.preemptions,
           (long long)stats.requests_finished, (long long)stats.requests_cancelled, (long long)stats.requests_expired);
}

typedef struct rank_of_stress {
    stress *s;
    int32_t rank;
    pthread_t thread;
} rank_of_stress;

static void *run_rank(void *ctx) {
    const rank_of_stress *r = ctx;
    stress *s = r->s;
    cpa_comm *comm = NULL;
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    const cpa_engine_options options = engine_options();
    cpa_status status = s->ranks == 1 ? cpa_comm_alone(&comm, &err)
                                      : cpa_comm_from_store("127.0.0.1", s->port, r->rank, s->ranks, NULL, &comm, &err);
    if (status == CPA_OK) status = cpa_engine_create(comm, &options, &engine, &err);
    if (status != CPA_OK) printf("%s\n", err.message);
    CU_ASSERT_EQUAL(status, CPA_OK);
    if (r->rank == 0) s->engine = engine;
    pthread_barrier_wait(&s->ready);
    if (engine && s->engine) serve(s, comm, engine);
    if (engine && r->rank == 0) expect_all_is_back(s, engine);
    cpa_engine_destroy(engine);
    cpa_comm_destroy(comm);
    return NULL;
}

static void stress_ranks(int32_t ranks) {
    const char *ops = getenv("CPATTN_TEST_OPS");
    stress s = {.ranks = ranks, .port = cpa_test_free_port(), .ops = ops ? atoll(ops) : DEFAULT_OPS};
    rank_of_stress all[MOST_RANKS];
    s.told = calloc((size_t)s.ops + 1, sizeof *s.told);
    pthread_barrier_init(&s.ready, NULL, (unsigned)ranks);
    for (int32_t r = 0; r < ranks; r++) {
        all[r] = (rank_of_stress){.s = &s, .rank = r};
        pthread_create(&all[r].thread, NULL, run_rank, &all[r]);
    }
    for (int32_t r = 0; r < ranks; r++) pthread_join(all[r].thread, NULL);
    pthread_barrier_destroy(&s.ready);
    free(s.told);
}

static void one_rank_loses_nothing(void) {
    stress_ranks(1);
}

static void three_ranks_lose_nothing(void) {
    stress_ranks(MOST_RANKS);
}

static const cpa_test tests[] = {
    {"one rank loses nothing", one_rank_loses_nothing},
    {"three ranks lose nothing", three_ranks_lose_nothing},
};
CPA_TEST_MAIN("requests at random from four threads", tests)
