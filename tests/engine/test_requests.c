/* Requests that come and go while the engine runs, from any thread of rank 0. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/hash.h"
#include "src/check/verify_internal.h"
#include "src/engine/engine_internal.h"
#include "src/schedule/scheduler_internal.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { MOST = 512 };

/* What rank 0 heard of its requests, by id. */
typedef struct heard {
    cpa_engine *engine;
    atomic_int told[MOST];
    cpa_finish_reason reason[MOST];
    int64_t tokens[MOST];
    double arrival_s[MOST], scheduled_s[MOST], first_token_s[MOST], finish_s[MOST];
    atomic_int ends, steps;
    int step_of_end[MOST];
    void (*on_step)(struct heard *heard);
    atomic_int mark; /* of the test */
    double check_began_s;
    uint64_t first_id;
} heard;

static void on_finish(void *ctx, const cpa_request_result *result) {
    heard *h = ctx;
    CU_ASSERT_FATAL(result->id < MOST);
    h->reason[result->id] = result->reason;
    h->tokens[result->id] = result->output_tokens;
    h->arrival_s[result->id] = result->arrival_s;
    h->scheduled_s[result->id] = result->scheduled_s;
    h->first_token_s[result->id] = result->first_token_s;
    h->finish_s[result->id] = result->finish_s;
    h->step_of_end[result->id] = h->steps;
    h->told[result->id]++;
    h->ends++;
}

static void on_progress(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    heard *h = ctx;
    (void)tokens, (void)requests, (void)elapsed_s;
    h->steps++;
    if (h->on_step) h->on_step(h);
}

static cpa_engine_options quick_options(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.verify = 0;
    return options;
}

static cpa_status submit(cpa_engine *engine, uint64_t id, int64_t prompt, int64_t output, double deadline_s) {
    const cpa_request request = {
        .size = sizeof request, .id = id, .prompt_tokens = prompt, .output_tokens = output, .deadline_s = deadline_s};
    return cpa_engine_submit(engine, &request);
}

/* Every block of every rank without an owner, as far as rank 0 knows. */
static int all_blocks_are_back(const cpa_engine *engine) {
    const cpa_scheduler *s = engine->scheduler;
    for (int32_t r = 0; s && r < s->options.map.cp_size; r++)
        if (cpa_block_pool_free_count(s->pools[r]) != s->options.groups.list[0].num_blocks) return 0;
    return 1;
}

/* Runs `act` on rank 0 beside the engine, which serves on all ranks until `act` has drained it. */
static void serve_beside(heard *h, const cpa_engine_options *options, void *(*act)(void *)) {
    pthread_t thread;
    h->engine = cpa_test_engine(options, NULL, 0);
    CU_ASSERT_PTR_NOT_NULL(h->engine);
    if (!h->engine) return;
    const int acts = cpa_test_rank() == 0;
    if (acts) pthread_create(&thread, NULL, act, h);
    cpa_status status = cpa_engine_serve(h->engine, on_finish, on_progress, h);
    if (status != CPA_OK) printf("%s\n", cpa_engine_error(h->engine));
    CU_ASSERT_EQUAL(status, CPA_OK);
    if (acts) pthread_join(thread, NULL);
    CU_ASSERT(all_blocks_are_back(h->engine));
    cpa_engine_destroy(h->engine);
}

static void nap(double seconds) {
    const struct timespec left = {.tv_sec = (time_t)seconds,
                                  .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&left, NULL);
}

/* ---- submit ---- */

static void *submit_some(void *ctx) {
    heard *h = ctx;
    for (uint64_t id = 0; id < 20; id++) {
        CU_ASSERT_EQUAL(submit(h->engine, id, 1 + (int64_t)id * 7 % 50, 1 + (int64_t)id % 4, 0), CPA_OK);
        if (id % 5 == 0) nap(0.01);
    }
    nap(0.02); /* the engine has nothing to do by now, or soon */
    CU_ASSERT_EQUAL(submit(h->engine, 20, 30, 3, 0), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_OK);
    for (uint64_t id = 0; id <= 20; id++) {
        CU_ASSERT_EQUAL(h->told[id], 1);
        CU_ASSERT_EQUAL(h->reason[id], CPA_FINISH_LENGTH);
    }
    return NULL;
}

static void requests_from_another_thread_finish_while_it_serves(void) {
    const cpa_engine_options options = quick_options();
    heard h = {.engine = NULL};
    serve_beside(&h, &options, submit_some);
}

/* Each end brings a new request with the same id, ten times. */
static void submit_again(void *ctx, const cpa_request_result *result) {
    heard *h = ctx;
    CU_ASSERT_EQUAL(cpa_engine_run(h->engine, NULL, NULL, NULL), CPA_INVALID);
    if (++h->ends < 10) CU_ASSERT_EQUAL(submit(h->engine, result->id, 20, 2, 0), CPA_OK);
}

static void callbacks_submit_and_may_not_run(void) {
    const cpa_engine_options options = quick_options();
    const cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 20, .output_tokens = 1};
    heard h = {.engine = cpa_test_engine(&options, &request, 1)};
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, submit_again, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(h.ends, 10);
    cpa_engine_destroy(h.engine);
}

/* ---- cancel ---- */

static void cancel_at_step_five(heard *h) {
    if (h->steps == 5) {
        CU_ASSERT_EQUAL(cpa_engine_cancel(h->engine, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_engine_cancel(h->engine, 1), CPA_OK); /* twice is once */
        CU_ASSERT_EQUAL(cpa_engine_cancel(h->engine, 3), CPA_OK);
        CU_ASSERT_EQUAL(cpa_engine_cancel(h->engine, 77), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(h->engine), "request 77"));
    }
}

/* The first runs, and has half of the blocks; the third waits for them. */
static void a_cancelled_request_ends_within_two_steps(void) {
    cpa_engine_options options = quick_options();
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    options.num_blocks = 24;
    options.tenant_block_quota = 24;
    const int64_t most = (int64_t)options.num_blocks * 16 * size;
    const cpa_request requests[] = {
        {.size = sizeof *requests, .id = 1, .prompt_tokens = 40, .output_tokens = most / 2},
        {.size = sizeof *requests, .id = 2, .prompt_tokens = 20, .output_tokens = 12},
        {.size = sizeof *requests, .id = 3, .prompt_tokens = most - 40, .output_tokens = 1},
        {.size = sizeof *requests, .id = 4, .prompt_tokens = 20, .output_tokens = 4},
    };
    heard h = {.engine = cpa_test_engine(&options, requests, 4), .on_step = cancel_at_step_five};
    cpa_engine_stats stats;
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, on_progress, &h), CPA_OK);
    CU_ASSERT(all_blocks_are_back(h.engine));
    cpa_engine_get_stats(h.engine, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.requests_finished, 2);
    CU_ASSERT_EQUAL(stats.requests_cancelled, 2);
    if (cpa_test_rank() == 0) {
        CU_ASSERT_EQUAL(h.reason[1], CPA_FINISH_CANCELLED);
        CU_ASSERT_EQUAL(h.reason[3], CPA_FINISH_CANCELLED);
        CU_ASSERT_EQUAL(h.reason[2], CPA_FINISH_LENGTH);
        CU_ASSERT_EQUAL(h.reason[4], CPA_FINISH_LENGTH);
        CU_ASSERT(h.tokens[1] >= 4 && h.tokens[1] <= 7);
        CU_ASSERT_EQUAL(h.tokens[3], 0);
        CU_ASSERT(h.step_of_end[1] <= 7 && h.step_of_end[3] <= 7);
        for (int id = 1; id <= 4; id++) CU_ASSERT_EQUAL(h.told[id], 1);
    }
    cpa_engine_destroy(h.engine);
}

/* ---- deadlines ---- */

static void *submit_what_expires(void *ctx) {
    heard *h = ctx;
    const cpa_request later = {
        .size = sizeof later, .id = 2, .prompt_tokens = 10, .output_tokens = 1, .arrival_s = 0.1, .deadline_s = 0.0001};
    cpa_engine_stats stats;
    CU_ASSERT_EQUAL(submit(h->engine, 1, 10, 900, 0.005), CPA_OK);
    CU_ASSERT_EQUAL(submit(h->engine, 3, 10, 2, 60), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_submit(h->engine, &later), CPA_OK);
    for (int i = 0; i < 1000 && h->ends < 3; i++) nap(0.01); /* without any word to the engine */
    CU_ASSERT_EQUAL(h->ends, 3);
    CU_ASSERT_EQUAL(h->reason[1], CPA_FINISH_EXPIRED);
    CPA_ASSERT_ORDER(h->tokens[1], <, 900);
    CU_ASSERT_EQUAL(h->reason[3], CPA_FINISH_LENGTH);
    CU_ASSERT_EQUAL(h->told[2], 1); /* it may have been quick enough */
    cpa_engine_get_stats(h->engine, &stats, sizeof stats);
    CPA_ASSERT_ORDER(stats.requests_expired, >=, 1);
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_OK);
    return NULL;
}

static void requests_expire_at_their_deadline(void) {
    cpa_engine_options options = quick_options();
    heard h = {.engine = NULL};
    serve_beside(&h, &options, submit_what_expires);
    const cpa_request wrong = {.size = sizeof wrong, .prompt_tokens = 1, .output_tokens = 1, .deadline_s = -1};
    cpa_engine *engine = cpa_test_engine(&options, NULL, 0);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(cpa_engine_submit(engine, &wrong), CPA_INVALID);
    cpa_engine_destroy(engine);
}

/* ---- bounds ---- */

static void a_full_queue_is_busy(void) {
    cpa_engine_options options = quick_options();
    options.max_queued_requests = 3;
    options.max_queued_tokens = 100;
    heard h = {.engine = cpa_test_engine(&options, NULL, 0)};
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    if (cpa_test_rank() == 0) {
        CU_ASSERT_EQUAL(submit(h.engine, 1, 200, 1, 0), CPA_OK); /* alone it may wait */
        CU_ASSERT_EQUAL(submit(h.engine, 2, 1, 1, 0), CPA_BUSY);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(h.engine), "max_queued_tokens"));
    }
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) {
        for (uint64_t id = 1; id <= 3; id++) CU_ASSERT_EQUAL(submit(h.engine, id, 10, 1, 0), CPA_OK);
        CU_ASSERT_EQUAL(submit(h.engine, 4, 10, 1, 0), CPA_BUSY);
    }
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) {
        CU_ASSERT_EQUAL(submit(h.engine, 4, 10, 1, 0), CPA_OK);
        CU_ASSERT_EQUAL(h.ends, 4);
    }
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    cpa_engine_destroy(h.engine);
}

/* ---- drain ---- */

/* Submits as fast as it can until the engine takes nothing more. What comes after the run has ended is for the next. */
static void *flood(void *ctx) {
    heard *h = ctx;
    cpa_status status = CPA_OK;
    for (uint64_t i = 0; i < MOST / 2 && status == CPA_OK; i++) {
        status = submit(h->engine, h->first_id + i, 3, 1 + (int64_t)i % 2, 0);
        if (status == CPA_OK) h->mark++;
    }
    CU_ASSERT(status == CPA_OK || status == CPA_STOPPED);
    return NULL;
}

static void *flood_and_drain(void *ctx) {
    heard *h = ctx;
    pthread_t thread;
    pthread_create(&thread, NULL, flood, h);
    nap(0.0005);
    const int admitted = h->mark;
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_OK);
    CPA_ASSERT_ORDER(h->ends, >=, admitted); /* all of them are done once it returns */
    pthread_join(thread, NULL);
    return NULL;
}

static void drains_under_load_lose_no_request(void) {
    cpa_engine_options options = quick_options();
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    options.max_num_seqs = 64;
    options.model.layers = 1;
    heard h = {.engine = cpa_test_engine(&options, NULL, 0)};
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    for (int i = 0; h.engine && i < 200 / size; i++) {
        pthread_t thread;
        h.first_id = i % 2 ? MOST / 2 : 0; /* what the run before has left keeps its ids */
        if (cpa_test_rank() == 0) pthread_create(&thread, NULL, flood_and_drain, &h);
        CU_ASSERT_EQUAL(cpa_engine_serve(h.engine, on_finish, on_progress, &h), CPA_OK);
        if (cpa_test_rank() == 0) pthread_join(thread, NULL);
    }
    if (h.engine) CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, on_progress, &h), CPA_OK);
    CU_ASSERT_EQUAL(h.ends, h.mark);
    if (cpa_test_rank() == 0) CPA_ASSERT_ORDER(h.mark, >, 100);
    cpa_engine_destroy(h.engine);
}

static void drain_at_step_three(heard *h) {
    if (h->steps != 3) return;
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_BUSY); /* it does not wait here */
    CU_ASSERT_EQUAL(submit(h->engine, 9, 1, 1, 0), CPA_STOPPED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(h->engine), "drained"));
}

static void a_drained_engine_cancels_what_has_not_arrived(void) {
    const cpa_engine_options options = quick_options();
    const cpa_request requests[] = {
        {.size = sizeof *requests, .id = 1, .prompt_tokens = 40, .output_tokens = 30},
        {.size = sizeof *requests, .id = 2, .prompt_tokens = 40, .output_tokens = 30, .arrival_s = 3600},
    };
    heard h = {.engine = cpa_test_engine(&options, requests, 2), .on_step = drain_at_step_three};
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    CU_ASSERT_EQUAL(cpa_engine_serve(h.engine, on_finish, on_progress, &h), CPA_OK);
    if (cpa_test_rank() == 0) {
        CU_ASSERT_EQUAL(h.reason[1], CPA_FINISH_LENGTH);
        CU_ASSERT_EQUAL(h.tokens[1], 30);
        CU_ASSERT_EQUAL(h.reason[2], CPA_FINISH_CANCELLED);
        CU_ASSERT_EQUAL(submit(h.engine, 9, 1, 1, 0), CPA_OK); /* the next run takes requests again */
    }
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    cpa_engine_destroy(h.engine);
}

/* Holds the third step until the test's thread has asked for the end: on a busy machine the request would have ended before. */
static void wait_for_mark(heard *h) {
    while (h->steps >= 3 && !atomic_load(&h->mark)) nap(1e-3);
}

static void *drain_in_vain(void *ctx) {
    heard *h = ctx;
    CU_ASSERT_EQUAL(submit(h->engine, 1, 10, 900, 0), CPA_OK);
    while (atomic_load(&h->steps) < 1) nap(1e-3); /* before the run has begun there is nothing to drain */
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 0.01), CPA_BUSY);
    cpa_engine_stop(h->engine);
    atomic_store(&h->mark, 1);
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_STOPPED);
    return NULL;
}

static void a_drain_hears_of_a_stop(void) {
    cpa_engine_options options = quick_options();
    pthread_t thread;
    heard h = {.engine = cpa_test_engine(&options, NULL, 0), .on_step = wait_for_mark};
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    if (cpa_test_rank() == 0) pthread_create(&thread, NULL, drain_in_vain, &h);
    CU_ASSERT_EQUAL(cpa_engine_serve(h.engine, on_finish, on_progress, &h), CPA_STOPPED);
    if (cpa_test_rank() == 0) pthread_join(thread, NULL);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(cpa_engine_cancel(h.engine, 1), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(h.reason[1], CPA_FINISH_CANCELLED);
    CU_ASSERT(all_blocks_are_back(h.engine));
    cpa_engine_destroy(h.engine);
}

/* ---- callbacks ---- */

/* Runs until nothing is left, while another thread cancels what is to arrive later. */
static void *cancel_the_first(void *ctx) {
    heard *h = ctx;
    nap(0.3);
    CU_ASSERT_EQUAL(cpa_engine_cancel(h->engine, 1), CPA_OK);
    return NULL;
}

static void submit_a_second(void *ctx, const cpa_request_result *result) {
    heard *h = ctx;
    on_finish(ctx, result);
    if (result->id == 1) CU_ASSERT_EQUAL(submit(h->engine, 2, 20, 2, 0), CPA_OK);
}

static void what_the_last_end_brings_is_run(void) {
    const cpa_engine_options options = quick_options();
    const cpa_request later = {.size = sizeof later, .id = 1, .prompt_tokens = 5, .output_tokens = 1, .arrival_s = 60};
    heard h = {.engine = cpa_test_engine(&options, &later, 1)};
    pthread_t thread;
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    if (cpa_test_rank() == 0) pthread_create(&thread, NULL, cancel_the_first, &h);
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, submit_a_second, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) {
        pthread_join(thread, NULL);
        CU_ASSERT_EQUAL(h.reason[1], CPA_FINISH_CANCELLED);
        CU_ASSERT_EQUAL(h.told[2], 1);
        CU_ASSERT_EQUAL(h.tokens[2], 2);
    }
    cpa_engine_destroy(h.engine);
}

/* A thread of the engine asks this one. */
static uint32_t call_the_engine(void *ctx, uint64_t request, int64_t position) {
    heard *h = ctx;
    if (h->engine) h->mark += cpa_engine_cancel(h->engine, 77) == CPA_INVALID;
    return (uint32_t)(request + (uint64_t)position);
}

static void who_gives_tokens_may_call_the_engine(void) {
    cpa_engine_options options = quick_options();
    heard h = {.engine = NULL};
    options.token_at = call_the_engine;
    options.token_ctx = &h;
    h.engine = cpa_test_engine(&options, NULL, 0);
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(submit(h.engine, 1, 50, 20, 0), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) CU_ASSERT(h.told[1] == 1 && h.mark > 0);
    cpa_engine_destroy(h.engine);
}

/* ---- steps ---- */

static void a_caller_drives_the_loop_step_by_step(void) {
    const cpa_engine_options options = quick_options();
    heard h = {.engine = cpa_test_engine(&options, NULL, 0)};
    cpa_step_result result = CPA_STEP_RAN;
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    CU_ASSERT_EQUAL(cpa_engine_step(h.engine, on_finish, on_progress, &h, &result), CPA_OK);
    CU_ASSERT_EQUAL(result, CPA_STEP_IDLE);
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, NULL, NULL, NULL), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(h.engine), "cpa_engine_step"));
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(submit(h.engine, 1, 10, 5, 0), CPA_OK);
    int ran = 0, idle = 0;
    for (int i = 0; i < 12; i++) {
        CU_ASSERT_EQUAL(cpa_engine_step(h.engine, on_finish, on_progress, &h, &result), CPA_OK);
        CU_ASSERT(result == CPA_STEP_IDLE || result == CPA_STEP_RAN);
        if (result == CPA_STEP_RAN) ran++;
        if (ran == 0) idle++;
    }
    CU_ASSERT_EQUAL(ran, 5);
    CPA_ASSERT_ORDER(idle, <=, 2);
    if (cpa_test_rank() == 0) {
        CU_ASSERT_EQUAL(h.told[1], 1);
        CU_ASSERT_EQUAL(cpa_engine_drain(h.engine, 60), CPA_OK); /* without waiting: nothing is left */
    }
    for (int i = 0; i < 4 && result != CPA_STEP_LAST; i++)
        CU_ASSERT_EQUAL(cpa_engine_step(h.engine, on_finish, on_progress, &h, &result), CPA_OK);
    CU_ASSERT_EQUAL(result, CPA_STEP_LAST);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(submit(h.engine, 2, 10, 5, 0), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(submit(h.engine, 3, 10, 500, 0), CPA_OK);
    for (int i = 0; i < 9; i++) CU_ASSERT_EQUAL(cpa_engine_step(h.engine, on_finish, on_progress, &h, &result), CPA_OK);
    CU_ASSERT_EQUAL(result, CPA_STEP_RAN);
    cpa_engine_destroy(h.engine); /* in the middle of a run */
}

/* Two steps: a callback of the second one drains. */
static void *drive_two_steps(void *ctx) {
    heard *h = ctx;
    cpa_step_result result;
    for (int i = 0; i < 2; i++) CU_ASSERT_EQUAL(cpa_engine_step(h->engine, on_finish, on_progress, h, &result), CPA_OK);
    return NULL;
}

static void drain_at_a_step_of_another_thread(heard *h) {
    const double before = cpa_clock_now();
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_BUSY);
    CPA_ASSERT_ORDER(cpa_clock_now() - before, <, 30);
    h->on_step = NULL;
    h->mark = 1;
}

/* On one rank: MPI is at home in the thread of the test. */
static void steps_of_several_threads_may_drain(void) {
    const cpa_engine_options options = quick_options();
    if (cpa_comm_size(cpa_test_comm()) > 1) return;
    heard h = {.engine = cpa_test_engine(&options, NULL, 0)};
    cpa_step_result result = CPA_STEP_RAN;
    pthread_t thread;
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    CU_ASSERT_EQUAL(submit(h.engine, 1, 10, 20, 0), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_step(h.engine, on_finish, on_progress, &h, &result), CPA_OK);
    h.on_step = drain_at_a_step_of_another_thread;
    pthread_create(&thread, NULL, drive_two_steps, &h);
    pthread_join(thread, NULL);
    CU_ASSERT_EQUAL(h.mark, 1);
    for (int i = 0; i < 40 && result != CPA_STEP_LAST; i++)
        CU_ASSERT_EQUAL(cpa_engine_step(h.engine, on_finish, on_progress, &h, &result), CPA_OK);
    CU_ASSERT_EQUAL(result, CPA_STEP_LAST);
    CU_ASSERT_EQUAL(h.told[1], 1);
    cpa_engine_destroy(h.engine);
}

/* ---- statistics ---- */

static void *watch_statistics(void *ctx) {
    heard *h = ctx;
    cpa_engine_stats last = {.steps = 0}, stats;
    int ran = 0;
    CU_ASSERT_EQUAL(submit(h->engine, 1, 10, 200, 0), CPA_OK);
    while (h->ends < 1) {
        cpa_engine_get_stats(h->engine, &stats, sizeof stats);
        CU_ASSERT(stats.steps >= last.steps && stats.output_tokens >= last.output_tokens);
        CPA_ASSERT_ORDER(stats.duration_s, >=, last.duration_s);
        ran |= stats.requests_running == 1 && stats.output_tokens > 0;
        last = stats;
        nap(0.0005);
    }
    CU_ASSERT(ran);
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_OK);
    return NULL;
}

static void statistics_are_read_while_it_runs(void) {
    const cpa_engine_options options = quick_options();
    heard h = {.engine = NULL};
    serve_beside(&h, &options, watch_statistics);
}

/* What ranks add up by themselves comes with their reports, a step late. */
static void check_totals(heard *h) {
    const int32_t ranks = h->engine->control.size, last = ranks - 1;
    const cpa_rank_totals *totals = h->engine->totals;
    cpa_engine_stats stats;
    int64_t sent = 0, rows = 0;
    cpa_engine_get_stats(h->engine, &stats, sizeof stats);
    for (int32_t rank = 0; rank < ranks; rank++) {
        sent += totals[rank].context.bytes_sent;
        rows += (int64_t)totals[rank].verify.rows;
    }
    CU_ASSERT_EQUAL(stats.bytes_sent, sent);
    CU_ASSERT_EQUAL(stats.verify_rows, rows);
    CU_ASSERT(stats.kv_used <= stats.kv_blocks && stats.kv_used <= stats.kv_peak);
    CU_ASSERT_EQUAL(stats.prefilled_tokens, stats.output_tokens > 0 ? 300 : 0);
    if (h->steps < 3 || stats.requests_running == 0) return;
    CU_ASSERT_EQUAL(totals[last].context.bytes_sent > 0, ranks > 1);
    CU_ASSERT(totals[last].context.attend_s > 0 && stats.imbalance >= 1 && stats.imbalance <= ranks);
    CPA_ASSERT_ORDER(stats.kv_used, >, 0);
    CPA_ASSERT_ORDER(stats.planned_pass_q + stats.planned_pass_kv + stats.planned_local, >=, stats.steps);
    h->mark++;
}

static void statistics_of_other_ranks_come_while_it_runs(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.verify = 1;
    heard h = {.engine = cpa_test_engine(&options, NULL, 0), .on_step = check_totals};
    CU_ASSERT_PTR_NOT_NULL_FATAL(h.engine);
    cpa_engine_stats stats;
    cpa_engine_get_stats(h.engine, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.kv_blocks, options.num_blocks);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(submit(h.engine, 1, 300, 9, 0), CPA_OK);
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, on_progress, &h), CPA_OK);
    cpa_engine_get_stats(h.engine, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.kv_used, 0);
    CU_ASSERT_EQUAL(stats.requests_running, 0);
    if (cpa_test_rank() == 0) CPA_ASSERT_ORDER(h.mark, >, 0);
    cpa_engine_destroy(h.engine);
}

/* What a server is: idle at first, and now and then. */
static void *idle_between_requests(void *ctx) {
    heard *h = ctx;
    cpa_engine_stats stats;
    for (int i = 1; i <= 2; i++) {
        nap(0.25);
        CU_ASSERT_EQUAL(submit(h->engine, (uint64_t)i, 40, 20, 0), CPA_OK);
        while (h->ends < i) nap(0.001);
    }
    cpa_engine_get_stats(h->engine, &stats, sizeof stats);
    CPA_ASSERT_ORDER(stats.verify_rows, >, 0);
    CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_OK);
    return NULL;
}

/* When the first step began, idle time left out, as the check counts it: later, once the second request runs. */
static void note_pause(heard *h) {
    const cpa_verify *verify = h->engine->verify;
    cpa_engine_stats stats;
    cpa_engine_get_stats(h->engine, &stats, sizeof stats);
    if (stats.output_tokens == 1) h->check_began_s = verify->start_s;
    if (stats.output_tokens > 20) CPA_ASSERT_ORDER(verify->start_s, >, h->check_began_s + 0.2);
}

static void an_idle_engine_checks_as_one_that_runs(void) {
    cpa_engine_options options = quick_options();
    options.verify = CPA_VERIFY_AUTO;
    heard h = {.on_step = note_pause};
    serve_beside(&h, &options, idle_between_requests);
}

/* One runs at a time: the second request waits until the first has ended, and the third is cancelled before it runs. */
static void the_queue_ends_when_a_request_first_runs(void) {
    cpa_engine_options options = quick_options();
    options.max_num_seqs = 1;
    heard h = {.engine = cpa_test_engine(&options, NULL, 0)};
    CU_ASSERT_PTR_NOT_NULL_FATAL(h.engine);
    if (cpa_test_rank() == 0) {
        for (uint64_t id = 0; id < 3; id++) CU_ASSERT_EQUAL(submit(h.engine, id, 20, 5, 0), CPA_OK);
        CU_ASSERT_EQUAL(cpa_engine_cancel(h.engine, 2), CPA_OK);
    }
    CU_ASSERT_EQUAL(cpa_engine_run(h.engine, on_finish, NULL, &h), CPA_OK);
    if (cpa_test_rank() == 0) {
        for (uint64_t id = 0; id < 2; id++)
            CU_ASSERT(h.arrival_s[id] <= h.scheduled_s[id] && h.scheduled_s[id] < h.first_token_s[id]);
        CU_ASSERT(h.scheduled_s[0] < h.finish_s[0] && h.scheduled_s[1] >= h.finish_s[0]);
        CU_ASSERT_EQUAL(h.reason[2], CPA_FINISH_CANCELLED);
        CU_ASSERT_EQUAL(h.scheduled_s[2], h.finish_s[2]);
    }
    cpa_engine_destroy(h.engine);
}

/* ---- a fault of one request ---- */

enum { CROWD = 64, POISONED = 20, PROMPT = 40 };

/* The synthetic model, with a NaN in a key of one request, and what each request got. On the host. */
static struct {
    cpa_synthetic synthetic;
    cpa_model real;
    int64_t position; /* of the NaN; -1: none */
    uint64_t digests[CROWD], failed_token;
    char error[256];
    int64_t finished, failed;
} poison;

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    cpa_status status = poison.real.layer_in(ctx, layer, step, args, stream);
    for (int64_t row = 0; layer == 1 && row < step->rows.count; row++)
        if (step->rows.requests[row] == POISONED && step->rows.positions[row] == poison.position)
            ((float *)args->k)[row * 2 * 32] = NAN;
    return status;
}

/* The rows that yield tokens, whatever was found in the cache. */
static cpa_status layer_out(void *ctx, int32_t layer, const cpa_model_step *step, const void *out, cpa_stream *stream) {
    const int64_t row_bytes = 4 * 16 * (int64_t)sizeof(float);
    (void)ctx, (void)stream;
    for (int64_t row = 0; row < step->rows.count; row++) {
        const int64_t of[] = {step->rows.positions[row], layer};
        if (of[0] < PROMPT - 1) continue;
        uint64_t hash = cpa_hash_bytes(CPA_HASH_START, of, sizeof of);
        poison.digests[step->rows.requests[row]] +=
            cpa_hash_bytes(hash, (const char *)out + row * row_bytes, (size_t)row_bytes);
    }
    return CPA_OK;
}

/* Three requests, of which the poisoned one is the first, have one prompt. */
static uint32_t token_of_crowd(void *ctx, uint64_t request, int64_t position) {
    (void)ctx;
    const int shares = request > POISONED && request <= POISONED + 2 && position < PROMPT;
    return (uint32_t)cpa_mix64((shares ? POISONED : request) * 1000 + (uint64_t)position);
}

static void note_crowd(void *ctx, const cpa_request_result *result) {
    (void)ctx;
    poison.finished += result->reason == CPA_FINISH_LENGTH;
    if (result->reason != CPA_FINISH_FAILED) return;
    poison.failed++;
    CU_ASSERT_EQUAL(result->id, POISONED);
    snprintf(poison.error, sizeof poison.error, "%s", result->error);
}

/* Runs the crowd with a NaN at that position of the poisoned request. */
static cpa_engine_stats run_crowd(int64_t position) {
    cpa_engine_options options = quick_options();
    cpa_request requests[CROWD];
    cpa_engine_stats stats = {.steps = 0};
    memset(&poison, 0, sizeof poison);
    options.num_blocks = 400;
    options.max_num_seqs = 16;
    options.block_size = 8;
    poison.position = position;
    poison.synthetic = (cpa_synthetic){.shape = options.model.attention, .seed = options.seed};
    poison.synthetic.shape.kv_dtype = CPA_F32;
    cpa_model model = poison.real = cpa_synthetic_model(&poison.synthetic);
    model.layer_in = layer_in;
    model.layer_out = layer_out;
    model.recall = NULL;
    options.network = &model;
    options.token_at = token_of_crowd;
    for (int i = 0; i < CROWD; i++)
        requests[i] = (cpa_request){
            .size = sizeof *requests, .id = (uint64_t)i, .prompt_tokens = PROMPT, .output_tokens = 4 + i % 9};
    requests[POISONED].output_tokens = 12;
    cpa_engine *engine = cpa_test_engine(&options, requests, CROWD);
    CU_ASSERT_PTR_NOT_NULL(engine);
    if (!engine) return stats;
    poison.synthetic.device = engine->device;
    CU_ASSERT_EQUAL(cpa_engine_run(engine, note_crowd, NULL, NULL), CPA_OK);
    CU_ASSERT(all_blocks_are_back(engine));
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    MPI_Allreduce(MPI_IN_PLACE, poison.digests, CROWD, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    cpa_engine_destroy(engine);
    return stats;
}

/* In the prompt, in its last block, in the output, and in the row of its last token. */
static void a_request_that_is_not_finite_fails_alone(void) {
    static const int64_t positions[] = {5, PROMPT - 1, PROMPT + 7, PROMPT + 10};
    uint64_t clean[CROWD];
    if (!cpa_test_promises_bits()) return;
    cpa_engine_stats stats = run_crowd(-1);
    memcpy(clean, poison.digests, sizeof clean);
    CU_ASSERT_EQUAL(stats.requests_finished, CROWD);
    for (int i = 0; i < 4; i++) {
        stats = run_crowd(positions[i]);
        CU_ASSERT_EQUAL(stats.requests_finished, CROWD - 1);
        CU_ASSERT_EQUAL(stats.requests_failed, 1);
        for (int id = 0; id < CROWD; id++)
            if (id != POISONED) CU_ASSERT_EQUAL(poison.digests[id], clean[id]);
        if (cpa_test_rank() != 0) continue;
        CU_ASSERT_EQUAL(poison.finished, CROWD - 1);
        CU_ASSERT_EQUAL(poison.failed, 1);
        CU_ASSERT_PTR_NOT_NULL(strstr(poison.error, "not finite: token"));
    }
}

/* ---- nothing to do ---- */

/* Sanitizers make a rank so much slower, and others that use the same processors. */
enum { IDLE_S = 5, SLOWER = 4 };

/* Seconds of the processor that this process has taken. */
static double processor_seconds(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

static void *measure_idling(void *ctx) {
    heard *h = ctx;
    nap(1);
    const double before = processor_seconds();
    nap(IDLE_S);
    const double used = processor_seconds() - before;
    printf("%.0f ms of the processor in %d s ... ", used * 1e3, IDLE_S);
    CPA_ASSERT_ORDER(used, <, SLOWER * 0.6 * IDLE_S / 60);
    if (cpa_test_rank() == 0) CU_ASSERT_EQUAL(cpa_engine_drain(h->engine, 60), CPA_OK);
    return NULL;
}

/* At most 0.6 s of the processor in a minute, on every rank, where nothing makes it slower. */
static void an_idle_engine_leaves_the_processor_alone(void) {
    const cpa_engine_options options = quick_options();
    const cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 20, .output_tokens = 3};
    heard h = {.engine = cpa_test_engine(&options, &request, 1)};
    pthread_t thread;
    CU_ASSERT_PTR_NOT_NULL(h.engine);
    if (!h.engine) return;
    pthread_create(&thread, NULL, measure_idling, &h);
    CU_ASSERT_EQUAL(cpa_engine_serve(h.engine, on_finish, NULL, &h), CPA_OK);
    pthread_join(thread, NULL);
    cpa_engine_destroy(h.engine);
}

static const cpa_test tests[] = {
    {"an idle engine leaves the processor alone", an_idle_engine_leaves_the_processor_alone},
    {"requests from another thread finish while it serves", requests_from_another_thread_finish_while_it_serves},
    {"callbacks submit and may not run", callbacks_submit_and_may_not_run},
    {"a cancelled request ends within two steps", a_cancelled_request_ends_within_two_steps},
    {"requests expire at their deadline", requests_expire_at_their_deadline},
    {"a full queue is busy", a_full_queue_is_busy},
    {"drains under load lose no request", drains_under_load_lose_no_request},
    {"a drained engine cancels what has not arrived", a_drained_engine_cancels_what_has_not_arrived},
    {"a drain hears of a stop", a_drain_hears_of_a_stop},
    {"what the last end brings is run", what_the_last_end_brings_is_run},
    {"who gives tokens may call the engine", who_gives_tokens_may_call_the_engine},
    {"a caller drives the loop step by step", a_caller_drives_the_loop_step_by_step},
    {"steps of several threads may drain", steps_of_several_threads_may_drain},
    {"statistics are read while it runs", statistics_are_read_while_it_runs},
    {"statistics of other ranks come while it runs", statistics_of_other_ranks_come_while_it_runs},
    {"an idle engine checks as one that runs", an_idle_engine_checks_as_one_that_runs},
    {"the queue ends when a request first runs", the_queue_ends_when_a_request_first_runs},
    {"a request that is not finite fails alone", a_request_that_is_not_finite_fails_alone},
};
CPA_MPI_DEVICE_TEST_MAIN("requests that come and go", tests)
