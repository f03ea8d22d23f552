/* The page of a server, of made-up requests, steps and ranks. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/output/live_page.h"
#include "tests/fixtures/unit.h"

#define START_S 1000.0

/* The picture of that title in the page, up to its end, which the caller frees; NULL: there is none. */
static char *picture_of(const char *page, const char *title) {
    char head[128];
    snprintf(head, sizeof head, "<h2>%s</h2>", title);
    const char *at = strstr(page, head), *end = at ? strstr(at, "</figure>") : NULL;
    return end ? strndup(at, (size_t)(end - at)) : NULL;
}

/* Whether the picture of that title has this text. */
static int shows(const char *page, const char *title, const char *text) {
    char element[128];
    char *picture = picture_of(page, title);
    snprintf(element, sizeof element, ">%s</t", text); /* of text or title */
    const int found = picture && strstr(picture, element);
    if (!found) printf("missing in '%s': %s\n%s\n", title, text, picture ? picture : "");
    free(picture);
    return found;
}

/* The points of the first series of a picture; how many there are, up to `most`. */
static int points_of(const char *page, const char *title, double (*points)[2], int most) {
    char *picture = picture_of(page, title);
    const char *at = picture ? strstr(picture, "class=\"s2\"") : NULL;
    int n = 0, length;
    at = at ? strstr(at, "points=\"") : NULL;
    for (at = at ? at + strlen("points=\"") : NULL; at && n < most; n++, at += length)
        if (sscanf(at, " %lf,%lf%n", &points[n][0], &points[n][1], &length) != 2) break;
    free(picture);
    return n;
}

/* A request of two tokens that arrived at 0. */
static void add_request(cpa_live_history *h, cpa_finish_reason reason, double ttft_s, double itl_s) {
    const double token_s[] = {ttft_s, ttft_s + itl_s};
    const cpa_request_result result = {
        .output_tokens = 2, .first_token_s = ttft_s, .finish_s = token_s[1], .token_s = token_s, .reason = reason};
    cpa_live_history_add_result(h, &result, START_S + 1);
}

#define TTFT "Time to the first token (TTFT)"
#define ITL "Time between two tokens of a request (ITL)"

static void shares_are_of_requests_that_were_completed(void) {
    double points[16][2];
    cpa_live_history *h = cpa_live_history_create(1, START_S);
    char *page = cpa_live_page_render(h, "x", START_S + 1);
    CU_ASSERT_PTR_NULL(picture_of(page, TTFT));
    free(page);
    for (int i = 3; i >= 0; i--) add_request(h, CPA_FINISH_LENGTH, 0.1 * (1 << i), 0.01);
    add_request(h, CPA_FINISH_CANCELLED, 5, 5);
    page = cpa_live_page_render(h, "x", START_S + 5);
    CU_ASSERT(shows(page, TTFT, "the last 4 requests") && shows(page, ITL, "the last 4 tokens"));
    CU_ASSERT_EQUAL(points_of(page, TTFT, points, 16), 5);
    for (int i = 2; i < 5; i++) { /* each at twice the time of the one before, with a quarter more of them */
        CU_ASSERT_DOUBLE_EQUAL(points[i][0] - points[i - 1][0], points[4][0] - points[3][0], 0.11);
        CU_ASSERT_DOUBLE_EQUAL(points[i - 1][1] - points[i][1], points[3][1] - points[4][1], 0.11);
    }
    CPA_ASSERT_ORDER(points[4][0], >, points[3][0] + 100);
    CPA_ASSERT_ORDER(points[4][1], <, points[3][1] - 30);
    CU_ASSERT(shows(page, "Latency of requests that ended", "first token 0.375")); /* the mean */
    CU_ASSERT(shows(page, "Latency of requests that ended", "whole 0.385"));
    free(page);
    cpa_live_history_release(h);
}

static void only_the_last_latencies_count(void) {
    cpa_live_history *h = cpa_live_history_create(1, START_S);
    for (int i = 0; i < 1000; i++) add_request(h, CPA_FINISH_STOP, 9, 9);
    for (int i = 0; i < CPA_LIVE_LATENCIES; i++) add_request(h, CPA_FINISH_STOP, i % 2 ? 0.25 : 0.5, 0.125);
    char *page = cpa_live_page_render(h, "x", START_S + 5);
    CU_ASSERT(shows(page, TTFT, "the last 4096 requests") && shows(page, ITL, "the last 4096 tokens"));
    free(page);
    cpa_live_figures *figures = cpa_live_history_copy(h);
    int64_t quarters = 0, halves = 0;
    for (int i = 0; i < CPA_LIVE_LATENCIES; i++) {
        quarters += figures->ttft.ms[i] == 250;
        halves += figures->ttft.ms[i] == 500;
        CU_ASSERT_EQUAL(figures->itl.ms[i], 125);
    }
    CPA_ASSERT_ORDER(quarters, ==, CPA_LIVE_LATENCIES / 2);
    CPA_ASSERT_ORDER(halves, ==, CPA_LIVE_LATENCIES / 2);
    free(figures);
    cpa_live_history_release(h);
}

static void figures_are_drawn_by_time(void) {
    double points[16][2];
    cpa_live_history *h = cpa_live_history_create(1, START_S);
    cpa_engine_stats stats = {
        .requests_running = 3, .requests_waiting = 1, .kv_blocks = 40, .kv_used = 10, .output_tokens = 100};
    cpa_live_history_add_step(h, &stats, START_S + 1);
    stats.output_tokens = 180;
    cpa_live_history_add_step(h, &stats, START_S + 2.5);
    stats.output_tokens = 300, stats.requests_waiting = 0, stats.verify_rows = 12345;
    cpa_live_history_add_step(h, &stats, START_S + 3); /* in the same period */
    char *page = cpa_live_page_render(h, "x", START_S + 4.5);
    CU_ASSERT(shows(page, "Requests", "running 3") && shows(page, "Requests", "waiting 0"));
    CU_ASSERT(shows(page, "Blocks of the cache that requests have", "taken 25"));
    CU_ASSERT(shows(page, "Results checked, and wrong", "checked 12345"));
    CU_ASSERT(shows(page, "Tokens", "answers 100"));
    CU_ASSERT_PTR_NULL(picture_of(page, "Bytes that ranks sent")); /* there is one rank */
    /* 50 a second in the first two seconds, then 100, of axes of 620 x 110 pixels; a young server has 60 s of them. */
    static const double expected[][2] = {{-4.5, 55}, {-2.5, 55}, {-2.5, 0}, {-0.5, 0}, {-0.5, 0}};
    CU_ASSERT_EQUAL(points_of(page, "Tokens", points, 16), 5);
    for (int i = 0; i < 5; i++) {
        CU_ASSERT_DOUBLE_EQUAL(points[i][0], 70 + 620 * (1 + expected[i][0] / 60), 0.11);
        CU_ASSERT_DOUBLE_EQUAL(points[i][1], 32 + expected[i][1], 0.11);
    }
    free(page);
    page = cpa_live_page_render(h, "x", START_S + 7); /* a period later nothing has happened */
    CU_ASSERT(shows(page, "Tokens", "answers 0") && shows(page, "Requests", "running 3"));
    free(page);
    page = cpa_live_page_render(h, "x", START_S + 1e6); /* nor in the last ten minutes */
    CU_ASSERT(shows(page, "Tokens", "answers 0") && shows(page, "Requests", "running 3"));
    free(page);
    cpa_live_history_release(h);
}

static void periods_beyond_the_last_are_forgotten(void) {
    enum { ROUNDS = 1000 };
    cpa_live_history *h = cpa_live_history_create(1, START_S);
    for (int i = 0; i < ROUNDS; i += 2) { /* every other period */
        const cpa_engine_stats stats = {.output_tokens = i};
        cpa_live_history_add_step(h, &stats, START_S + i * CPA_LIVE_PERIOD_S + 0.5);
    }
    cpa_live_figures *figures = cpa_live_history_copy(h);
    for (int64_t period = ROUNDS - CPA_LIVE_PERIODS - 1; period < ROUNDS; period++) {
        const cpa_live_sample *sample = cpa_live_figures_at(figures, period);
        CU_ASSERT_FATAL(sample != NULL);
        CU_ASSERT_EQUAL(sample->values[CPA_LIVE_OUTPUT_TOKENS], (double)(period / 2 * 2));
    }
    CU_ASSERT_PTR_NULL(cpa_live_figures_at(figures, ROUNDS - 2 * CPA_LIVE_SAMPLES - 1));
    free(figures);
    cpa_live_history_release(h);
}

#define RANKS_BY_TIME "Ranks by time: the last steps"

/* Step number `step` of a rank, of the whole time until the next begins. */
static void add_step(cpa_live_history *h, int32_t rank, int64_t step, double seconds, double attend_s, double wait_s) {
    const cpa_rank_stats stats = {.steps = step,
                                  .step_begin_s = (double)(step - 1) * seconds,
                                  .step_end_s = (double)step * seconds,
                                  .attend_s = (double)step * attend_s,
                                  .exposed_comm_s = (double)step * wait_s};
    const int64_t bytes_to[] = {rank == 0 ? 0 : 3072 * step, rank == 0 ? 4096 * step : 0};
    cpa_live_history_add_rank(h, rank, &stats, bytes_to);
}

static void steps_and_bytes_of_ranks_are_drawn(void) {
    enum { LAST_STEP = 100 };
    cpa_live_history *h = cpa_live_history_create(2, START_S);
    add_step(h, 0, 1, 0.1, 0.05, 0.025);
    add_step(h, 0, 1, 0.1, 0.05, 0.025); /* told twice, as that of another rank may be */
    add_step(h, 1, 1, 0.1, 0.01, 0.08);
    char *page = cpa_live_page_render(h, "x", START_S + 1);
    CU_ASSERT(shows(page, RANKS_BY_TIME, "50% attention, 25% waiting"));
    CU_ASSERT(shows(page, RANKS_BY_TIME, "10% attention, 80% waiting"));
    CU_ASSERT(shows(page, "Bytes between ranks since the start", "rank 0 to rank 1: 4096 bytes"));
    CU_ASSERT(shows(page, "Bytes between ranks since the start", "rank 1 to rank 0: 3072 bytes"));
    free(page);
    cpa_live_figures *figures = cpa_live_history_copy(h);
    CU_ASSERT(figures->ranks[0].told == 1 && figures->ranks[1].told == 1);
    free(figures);
    for (int64_t step = 2; step <= LAST_STEP; step++) add_step(h, 0, step, 0.01, 0.005, 0.0025);
    page = cpa_live_page_render(h, "x", START_S + 1);
    CU_ASSERT(shows(page, "Bytes between ranks since the start", "rank 0 to rank 1: 409600 bytes"));
    free(page);
    figures = cpa_live_history_copy(h);
    for (int64_t i = 0; i < CPA_LIVE_STEPS; i++) /* the last ones are left */
        CPA_ASSERT_ORDER(figures->ranks[0].steps[i].begin_s, >=, 0.01 * (LAST_STEP - CPA_LIVE_STEPS) - 1e-9);
    free(figures);
    cpa_live_history_release(h);
}

static void a_step_has_no_more_than_its_time(void) {
    cpa_live_history *h = cpa_live_history_create(1, START_S);
    const int64_t none[] = {0};
    /* The times of two steps with the second one alone; it has been at work for longer than is drawn. */
    const cpa_rank_stats stats = {
        .steps = 2, .step_begin_s = 100, .step_end_s = 130, .attend_s = 15, .exposed_comm_s = 30};
    cpa_live_history_add_rank(h, 0, &stats, none);
    char *page = cpa_live_page_render(h, "x", START_S + 1);
    CU_ASSERT(shows(page, RANKS_BY_TIME, "0% attention, 100% waiting")); /* of the last ten seconds */
    CU_ASSERT_PTR_NULL(picture_of(page, "Bytes between ranks since the start"));
    free(page);
    cpa_live_history_release(h);
}

static void the_page_needs_nothing_else(void) {
    cpa_live_history *h = cpa_live_history_create(2, START_S);
    char *page = cpa_live_page_render(h, "a <b> & c", START_S);
    CU_ASSERT_PTR_NOT_NULL(strstr(page, "<h1>a &lt;b&gt; &amp; c</h1>"));
    CU_ASSERT_PTR_NOT_NULL(strstr(page, "</html>"));
    CU_ASSERT(shows(page, "Bytes between ranks since the start", "MiB; most: 0")); /* nothing has happened */
    CU_ASSERT(shows(page, "Requests", "running 0"));
    for (const char *at = page; (at = strstr(at, "://")); at++) /* but for the name of SVG */
        CU_ASSERT(strncmp(at, "://www.w3.org/2000/svg\"", strlen("://www.w3.org/2000/svg\"")) == 0);
    free(page);
    cpa_live_history_release(h);
}

enum { ADDED = 5000 };

static void *add_many(void *h) {
    for (int i = 1; i <= ADDED; i++) {
        const cpa_engine_stats stats = {.steps = i, .output_tokens = i};
        cpa_live_history_add_step(h, &stats, START_S + i);
        add_step(h, i % 2, i, 0.1, 0.05, 0.02);
        add_request(h, CPA_FINISH_LENGTH, 0.1, 0.01);
    }
    return NULL;
}

static void it_is_drawn_while_threads_add(void) {
    cpa_live_history *h = cpa_live_history_create(2, START_S);
    pthread_t thread;
    pthread_create(&thread, NULL, add_many, h);
    for (int i = 0; i < 20; i++) free(cpa_live_page_render(h, "x", START_S + ADDED));
    pthread_join(thread, NULL);
    cpa_live_figures *figures = cpa_live_history_copy(h);
    CU_ASSERT_EQUAL(figures->itl.added, ADDED);
    CU_ASSERT_EQUAL(figures->ranks[0].last.steps, ADDED);
    free(figures);
    cpa_live_history_release(h);
}

static const cpa_test tests[] = {
    {"shares are of requests that were completed", shares_are_of_requests_that_were_completed},
    {"only the last latencies count", only_the_last_latencies_count},
    {"figures are drawn by time", figures_are_drawn_by_time},
    {"periods beyond the last are forgotten", periods_beyond_the_last_are_forgotten},
    {"steps and bytes of ranks are drawn", steps_and_bytes_of_ranks_are_drawn},
    {"a step has no more than its time", a_step_has_no_more_than_its_time},
    {"the page needs nothing else", the_page_needs_nothing_else},
    {"it is drawn while threads add", it_is_drawn_while_threads_add},
};
CPA_TEST_MAIN("the page of a server", tests)
