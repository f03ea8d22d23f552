/* Many connections: of clients that leave, that are too many, and that all speak at the same time. */
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

static const cpa_server_options plain = {.model_name = "tiny"};

static int ask(cpa_fake_engine *engine, const char *body) {
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(fd, "POST", "/v1/completions", "", body);
    return fd;
}

/* Many at once, of which some leave; the others get what is theirs. */
static void many_connections_are_served_at_once(void) {
    enum { COUNT = 1000 };
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    const int count = files.rlim_cur > 2 * COUNT + 100 ? COUNT : (int)(files.rlim_cur / 2) - 100;
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    static int fds[COUNT];
    for (int i = 0; i < count; i++) {
        fds[i] = ask(engine, i % 2 ? "{\"prompt\": [7], \"max_tokens\": 4, \"stream\": true}"
                                   : "{\"prompt\": [7], \"max_tokens\": 4}");
    }
    cpa_fake_engine_await(engine, count);
    for (int i = 0; i < count; i += 5) close(fds[i]);
    cpa_fake_engine_await_cancels(engine, (count + 4) / 5);
    cpa_fake_engine_step(engine, 5);
    int right = 0, expected = 0;
    for (int i = 0; i < count; i++) {
        if (i % 5 == 0) continue;
        char reply[4000];
        const char *last = i % 2 ? "[DONE]" : "\"usage\"";
        cpa_http_read_until(fds[i], last, reply, sizeof reply);
        right += strstr(reply, last) != NULL;
        expected++;
        close(fds[i]);
    }
    CU_ASSERT_EQUAL(right, expected);
    CU_ASSERT_EQUAL(cpa_server_wait(engine->server, 20), 0);
    cpa_fake_engine_stop(engine);
}

static void connections_beyond_the_bound_are_told_so(void) {
    cpa_server_options options = plain;
    options.max_connections = 2;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    static const char two[] = "{\"prompt\": [7], \"n\": 2, \"max_tokens\": 50}";
    const int fds[] = {ask(engine, two), ask(engine, two)};
    cpa_fake_engine_await(engine, 4);
    static const char request[] = "GET /version HTTP/1.1\r\nHost: test\r\n\r\n";
    cpa_http_reply reply;
    cpa_http_talk(cpa_fake_engine_port(engine), request, sizeof request - 1, &reply);
    CU_ASSERT_EQUAL(reply.status, 503);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.head, "Connection: close")); /* on another one there may be room */
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "too many connections"));
    cpa_http_reply_free(&reply);
    for (int i = 0; i < 2; i++) close(fds[i]);
    cpa_fake_engine_await_cancels(engine, 4);
    cpa_fake_engine_stop(engine);
}

/* Of which each sends a part of a request, and there are more than libmicrohttpd takes. */
static void probes_come_through_beside_any_number_of_others(void) {
    enum { CLIENTS = 400 };
    static const char *const paths[] = {"/live", "/health"};
    cpa_server_options options = plain;
    options.max_connections = 8;
    options.threads = 2;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    static int fds[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = cpa_http_connect(cpa_fake_engine_port(engine));
        cpa_http_send(fds[i], "GET /live HTTP/1.1\r\nHo", 22);
        if (i % 20) continue;
        cpa_http_reply reply;
        cpa_http_request(cpa_fake_engine_port(engine), "GET", paths[i / 20 % 2], "", NULL, &reply);
        CU_ASSERT_EQUAL(reply.status, 200);
        CU_ASSERT(i < 20 || strstr(reply.head, "Connection: close"));
        cpa_http_reply_free(&reply);
    }
    for (int i = 0; i < CLIENTS; i++) close(fds[i]);
    cpa_fake_engine_stop(engine);
}

/* What /metrics waits for. */
typedef struct hold {
    sem_t has_begun, may_end;
} hold;

static char *hold_metrics(void *ctx) {
    hold *p = ctx;
    sem_post(&p->has_begun);
    while (sem_wait(&p->may_end)) {}
    return strdup("");
}

static int is_answered(int fd) {
    char reply[1000];
    cpa_http_read_until(fd, "\"live\"}", reply, sizeof reply);
    return strstr(reply, "HTTP/1.1 200") != NULL;
}

/* As many as a thread takes events at a time, and twice as many, while it is busy. */
static void requests_that_come_at_the_same_time_are_answered(void) {
    enum { EVENTS = 128 };
    hold p;
    sem_init(&p.has_begun, 0, 0);
    sem_init(&p.may_end, 0, 0);
    cpa_server_options options = plain;
    options.threads = 1;
    options.metrics = hold_metrics;
    options.metrics_ctx = &p;
    for (int clients = EVENTS; clients <= 2 * EVENTS; clients += EVENTS) {
        cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
        const int busy = cpa_http_connect(cpa_fake_engine_port(engine));
        int fds[2 * EVENTS], answered = 0;
        for (int i = 0; i < clients; i++) {
            fds[i] = cpa_http_connect(cpa_fake_engine_port(engine));
            cpa_http_ask(fds[i], "GET", "/live", "", NULL);
            CU_ASSERT(is_answered(fds[i]));
        }
        cpa_http_ask(busy, "GET", "/metrics", "", NULL);
        while (sem_wait(&p.has_begun)) {}
        for (int i = 0; i < clients; i++) cpa_http_ask(fds[i], "GET", "/live", "", NULL);
        sem_post(&p.may_end);
        while (answered < clients && is_answered(fds[answered])) answered++;
        CU_ASSERT_EQUAL(answered, clients);
        for (int i = 0; i < clients; i++) close(fds[i]);
        close(busy);
        cpa_fake_engine_stop(engine);
    }
    sem_destroy(&p.has_begun);
    sem_destroy(&p.may_end);
}

static const cpa_test tests[] = {
    {"many connections are served at once", many_connections_are_served_at_once},
    {"connections beyond the bound are told so", connections_beyond_the_bound_are_told_so},
    {"probes come through beside any number of others", probes_come_through_beside_any_number_of_others},
    {"requests that come at the same time are answered", requests_that_come_at_the_same_time_are_answered},
};

CPA_TEST_MAIN("connections", tests)
