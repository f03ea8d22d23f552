/* The life of answers: clients that leave or do not read, engines that are busy, drained or lost, the end of a
 * server. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

static const cpa_server_options plain = {.model_name = "tiny"};
static const char whole[] = "{\"prompt\": [7], \"n\": 2, \"max_tokens\": 50}";
static const char streamed[] = "{\"prompt\": [7], \"n\": 2, \"max_tokens\": 50, \"stream\": true}";

static int ask(cpa_fake_engine *engine, const char *body) {
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(fd, "POST", "/v1/completions", "", body);
    return fd;
}

static void await_delivery(cpa_fake_engine *engine) {
    CU_ASSERT_EQUAL(cpa_server_wait(engine->server, 20), 0);
}

/* Whether or not tokens come, and whether the client closes before it has read anything, after, or resets. */
static void requests_of_a_client_that_leaves_are_cancelled(void) {
    const char *const bodies[] = {whole, streamed};
    for (int b = 0; b < 2; b++) {
        for (int way = 0; way < 3; way++) {
            cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
            const int fd = ask(engine, bodies[b]);
            cpa_fake_engine_await(engine, 2);
            CU_ASSERT_EQUAL(cpa_server_undelivered(engine->server), 1);
            const struct linger reset = {.l_onoff = 1};
            char head[1000];
            if (way == 1 && b == 1) cpa_http_read_until(fd, "\r\n\r\n", head, sizeof head);
            if (way == 2) setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            close(fd);
            cpa_fake_engine_await_cancels(engine, 2);
            cpa_fake_engine_step(engine, 1); /* the engine ends them after the server has forgotten them */
            await_delivery(engine);
            CU_ASSERT_EQUAL(engine->cancels, 2);
            cpa_fake_engine_stop(engine);
        }
    }
}

/* As curl and proxies do when the request is sent. */
static void a_client_that_sends_no_more_gets_its_answer(void) {
    const char *const bodies[] = {whole, streamed}, *const ends[] = {"\"usage\"", "[DONE]"};
    for (int b = 0; b < 2; b++) {
        cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
        const int fd = ask(engine, bodies[b]);
        shutdown(fd, SHUT_WR);
        cpa_fake_engine_await(engine, 2);
        char reply[1 << 15];
        /* What it is sent to find out whether it is there: an interim reply, or a comment. */
        cpa_http_read_until(fd, b == 0 ? "100 Continue\r\n\r\n" : ": \n\n", reply, sizeof reply);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, b == 0 ? "100 Continue" : ": \n\n"));
        cpa_fake_engine_step(engine, 50);
        cpa_http_read_until(fd, ends[b], reply, sizeof reply);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, ends[b]));
        CU_ASSERT_EQUAL(engine->cancels, 0);
        await_delivery(engine);
        close(fd);
        cpa_fake_engine_stop(engine);
    }
}

static void a_text_that_stops_it_cancels_a_request(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    const int fd = ask(engine, "{\"prompt\": [7], \"max_tokens\": 50, \"stop\": \"el\"}");
    cpa_fake_engine_await(engine, 1);
    cpa_fake_engine_step(engine, 3);
    cpa_fake_engine_await_cancels(engine, 1);
    char reply[2000];
    cpa_http_read_until(fd, "}}", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "\"text\":\"H\""));
    close(fd);
    cpa_fake_engine_stop(engine);
}

static void a_client_that_does_not_read_slows_no_other(void) {
    cpa_server_options options = plain;
    options.idle_timeout_s = 2;
    options.threads = 1;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine)), least = 1;
    const int silent = cpa_http_connect(cpa_fake_engine_port(engine));
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &least, sizeof least);
    cpa_http_ask(
        fd, "POST", "/v1/completions", "",
        "{\"prompt\": [7], \"n\": 128, \"max_tokens\": 1000, \"ignore_eos\": true, \"stream\": true, \"logprobs\": 0}");
    cpa_fake_engine_await(engine, 128);
    const double begin = cpa_clock_now();
    for (int i = 0; i < 40; i++) { /* 10 MB, more than all buffers on the way */
        cpa_fake_engine_step(engine, 25);
        cpa_http_reply reply;
        cpa_http_request(cpa_fake_engine_port(engine), "GET", "/live", "", NULL, &reply);
        CU_ASSERT_EQUAL(reply.status, 200);
        cpa_http_reply_free(&reply);
        if (i % 10 == 0) {
            cpa_fake_engine_post(engine, "/v1/completions", whole, &reply);
            CU_ASSERT_EQUAL(reply.status, 200);
            cpa_http_reply_free(&reply);
        }
    }
    await_delivery(engine); /* its time is over */
    CPA_ASSERT_ORDER(cpa_clock_now() - begin, >, 1.5);
    char nothing[2];
    CU_ASSERT_EQUAL(recv(silent, nothing, 1, 0), 0); /* and so is that of one that has said nothing */
    close(silent);
    close(fd);
    cpa_fake_engine_stop(engine);
}

/* Its own buffer is full, and those of this system have room for what has come so far: it ends all the same. */
static void a_client_that_does_not_read_keeps_no_request(void) {
    cpa_server_options options = plain;
    options.idle_timeout_s = 1;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine)), least = 1;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &least, sizeof least);
    cpa_http_ask(fd, "POST", "/v1/completions", "",
                 "{\"prompt\": [7], \"max_tokens\": 4000, \"ignore_eos\": true, \"stream\": true, \"logprobs\": 0}");
    cpa_fake_engine_await(engine, 1);
    cpa_fake_engine_step(engine, 1000); /* 100 KB */
    const double begin = cpa_clock_now();
    cpa_fake_engine_await_cancels(engine, 1);
    CPA_ASSERT_ORDER(cpa_clock_now() - begin, >, 0.5);
    await_delivery(engine);
    close(fd);
    cpa_fake_engine_stop(engine);
}

/* Each byte begins the idle time anew, but not the time that a request has in all. */
static void a_request_that_comes_byte_by_byte_is_cut_off(void) {
    static const char *const begun[] = {"GET /li", "GET /live HTTP/1.1\r\nX: ",
                                        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n"};
    enum { CLIENTS = 100, WAYS = sizeof begun / sizeof *begun };
    cpa_server_options options = plain;
    options.idle_timeout_s = 1;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    int clients[CLIENTS], n_open = CLIENTS;
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = cpa_http_connect(cpa_fake_engine_port(engine));
        cpa_http_send(clients[i], begun[i % WAYS], strlen(begun[i % WAYS]));
    }
    const double begin = cpa_clock_now();
    while (n_open > 0 && cpa_clock_now() - begin < 10) {
        usleep(100000);
        for (int i = 0; i < CLIENTS; i++) {
            char byte;
            if (clients[i] < 0) continue;
            const ssize_t got = recv(clients[i], &byte, 1, MSG_DONTWAIT);
            if (got > 0 || (got < 0 && errno == EAGAIN)) {
                send(clients[i], "a", 1, MSG_NOSIGNAL);
            } else {
                close(clients[i]);
                clients[i] = -1;
                n_open--;
            }
        }
    }
    const double took = cpa_clock_now() - begin;
    CPA_ASSERT_ORDER(took, >, options.idle_timeout_s);
    CPA_ASSERT_ORDER(took, <, 2 * options.idle_timeout_s + 1); /* of which 1 is for a machine with other work */
    for (int i = 0; i < CLIENTS; i++) {
        if (clients[i] >= 0) close(clients[i]);
    }
    cpa_fake_engine_stop(engine);
}

static void what_the_engine_refuses_is_passed_on(void) {
    static const struct {
        cpa_status refusal;
        int status, retry;
    } cases[] = {{CPA_BUSY, 429, 1}, {CPA_STOPPED, 503, 1}, {CPA_INVALID, 400, 0}, {CPA_NO_MEMORY, 500, 0}};
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        engine->refusal = cases[i].refusal;
        cpa_http_reply reply;
        cpa_http_request(cpa_fake_engine_port(engine), "POST", "/v1/completions", "", streamed, &reply);
        CU_ASSERT_EQUAL(reply.status, cases[i].status);
        CU_ASSERT_EQUAL(strstr(reply.head, "Retry-After: 1") != NULL, cases[i].retry);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "the fake engine is"));
        cpa_http_reply_free(&reply);
    }
    CU_ASSERT_EQUAL(cpa_server_undelivered(engine->server), 0);
    cpa_fake_engine_stop(engine);
}

static void a_request_that_fails_is_an_error(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    char reply[4000];
    int fd = ask(engine, whole);
    cpa_fake_engine_await(engine, 2);
    cpa_fake_engine_step(engine, 1);
    cpa_fake_engine_end(engine, 1, CPA_FINISH_FAILED, "its rows are not finite");
    cpa_http_read_until(fd, "}}", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "HTTP/1.1 500"));
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "its rows are not finite"));
    cpa_fake_engine_await_cancels(engine, 1); /* the other sample */
    close(fd);
    fd = ask(engine, streamed);
    cpa_fake_engine_await(engine, 4);
    cpa_fake_engine_step(engine, 1);
    cpa_fake_engine_end(engine, 3, CPA_FINISH_FAILED, "its rows are not finite");
    cpa_http_read_until(fd, "[DONE]", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "HTTP/1.1 200"));
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "data: {\"error\":{\"message\":\"its rows are not finite\""));
    cpa_fake_engine_await_cancels(engine, 2);
    close(fd);
    cpa_fake_engine_stop(engine);
}

static void a_drained_server_delivers_what_it_has(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int fds[] = {ask(engine, whole), ask(engine, streamed)};
    cpa_fake_engine_await(engine, 4);
    cpa_server_drain(engine->server);
    cpa_http_reply refused;
    cpa_http_request(cpa_fake_engine_port(engine), "POST", "/v1/completions", "", whole, &refused);
    CU_ASSERT_EQUAL(refused.status, 503);
    cpa_http_reply_free(&refused);
    CU_ASSERT_EQUAL(cpa_server_undelivered(engine->server), 2);
    cpa_fake_engine_step(engine, 50);
    cpa_server_stop(engine->server, 10);
    engine->server = NULL;
    char reply[1 << 16];
    cpa_http_read_until(fds[0], "\"usage\"", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "\"usage\""));
    cpa_http_read_until(fds[1], "[DONE]", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "[DONE]"));
    for (int i = 0; i < 2; i++) close(fds[i]);
    cpa_fake_engine_stop(engine);
}

/* Its header had come when the server was drained, its body had not. */
static void a_request_that_is_coming_in_is_let_in(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine)),
              late = cpa_http_connect(cpa_fake_engine_port(engine));
    char head[200], reply[1 << 14];
    const int n = snprintf(head, sizeof head, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n",
                           strlen(whole));
    CU_ASSERT_EQUAL(cpa_server_incoming(engine->server), 0);
    cpa_http_send(fd, head, (size_t)n);
    for (int i = 0; i < 1000 && cpa_server_incoming(engine->server) == 0; i++) usleep(5000);
    CU_ASSERT_EQUAL(cpa_server_incoming(engine->server), 1);
    cpa_server_drain(engine->server);
    cpa_http_send(late, head, (size_t)n);
    cpa_http_send(late, whole, strlen(whole));
    cpa_http_read_until(late, "\r\n\r\n", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "HTTP/1.1 503"));
    cpa_http_send(fd, whole, strlen(whole));
    cpa_fake_engine_await(engine, 2);
    for (int i = 0; i < 1000 && cpa_server_incoming(engine->server) > 0; i++) usleep(5000);
    CU_ASSERT_EQUAL(cpa_server_incoming(engine->server), 0);
    cpa_fake_engine_step(engine, 50);
    cpa_http_read_until(fd, "\"usage\"", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "HTTP/1.1 200"));
    close(fd);
    close(late);
    cpa_fake_engine_stop(engine);
}

static void answers_of_a_lost_engine_end_with_an_error(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int fds[] = {ask(engine, whole), ask(engine, streamed)};
    cpa_fake_engine_await(engine, 4);
    cpa_fake_engine_step(engine, 2);
    cpa_server_fail(engine->server, "rank 2 is lost");
    for (int i = 0; i < 2; i++) {
        char reply[4000];
        cpa_http_read_until(fds[i], "rank 2 is lost", reply, sizeof reply);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, "\"error\":{\"message\":\"rank 2 is lost\""));
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, i == 0 ? "HTTP/1.1 503" : "HTTP/1.1 200"));
        close(fds[i]);
    }
    cpa_http_reply reply;
    cpa_http_request(cpa_fake_engine_port(engine), "GET", "/health", "", NULL, &reply);
    CU_ASSERT_EQUAL(reply.status, 503);
    cpa_http_reply_free(&reply);
    await_delivery(engine);
    CU_ASSERT_EQUAL(engine->cancels, 0);
    cpa_fake_engine_step(engine, 1); /* what such an engine still says is passed over */
    cpa_fake_engine_stop(engine);
}

static void a_server_stops_with_answers_under_way(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int fds[] = {ask(engine, whole), ask(engine, streamed)};
    cpa_fake_engine_await(engine, 4);
    const double begin = cpa_clock_now();
    cpa_server_stop(engine->server, 0.1);
    engine->server = NULL;
    CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 30);
    for (int i = 0; i < 2; i++) {
        char reply[4000];
        cpa_http_read_until(fds[i], "the server has stopped", reply, sizeof reply);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, "the server has stopped"));
        close(fds[i]);
    }
    cpa_fake_engine_stop(engine);
}

static void tokens_are_asked_for_by_position(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int fd = ask(engine, "{\"prompt\": [[7, 8], [9]], \"seed\": 5}");
    cpa_fake_engine_await(engine, 2);
    const uint64_t first = engine->requests[0].request.id, second = engine->requests[1].request.id;
    CU_ASSERT_EQUAL(cpa_server_token_at(engine->server, first, 1), 8);
    CU_ASSERT_EQUAL(cpa_server_token_at(engine->server, second, 0), 9);
    const uint32_t drawn = cpa_server_token_at(engine->server, first, 2);
    CPA_ASSERT_ORDER(drawn, <, CPA_FAKE_VOCABULARY);
    CU_ASSERT_EQUAL(cpa_server_token_at(engine->server, second, 2), drawn); /* by seed and position alone */
    CU_ASSERT_EQUAL(cpa_server_token_at(engine->server, 12345, 0), 0);
    close(fd);
    cpa_fake_engine_stop(engine);
}

static void a_large_body_holds_up_no_other_connection(void) {
    enum { WORDS = 400000 };
    static const char word[] = "word ", head[] = "{\"prompt\": \"", tail[] = "\"}";
    cpa_server_options options = plain;
    options.threads = 1;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 1);
    char *body = malloc(sizeof head + WORDS * (sizeof word - 1) + sizeof tail), *end = body, got[64];
    CU_ASSERT_PTR_NOT_NULL_FATAL(body);
    end = stpcpy(end, head);
    for (int i = 0; i < WORDS; i++) end = stpcpy(end, word);
    strcpy(end, tail);
    const int large = cpa_http_connect(cpa_fake_engine_port(engine));
    const double begin = cpa_clock_now();
    cpa_http_ask(large, "POST", "/tokenize", "", body);
    double longest = 0, before = begin;
    while (recv(large, got, 1, MSG_DONTWAIT | MSG_PEEK) < 0) {
        cpa_http_reply reply;
        cpa_http_request(cpa_fake_engine_port(engine), "GET", "/live", "", NULL, &reply);
        CU_ASSERT_EQUAL(reply.status, 200);
        cpa_http_reply_free(&reply);
        if (cpa_clock_now() - before > longest) longest = cpa_clock_now() - before;
        usleep(5000);
        before = cpa_clock_now();
    }
    CPA_ASSERT_ORDER(longest, <, 0.5 * (cpa_clock_now() - begin));
    cpa_http_read_until(large, "\r\n", got, sizeof got);
    CU_ASSERT_PTR_NOT_NULL(strstr(got, "200 OK"));
    close(large);
    free(body);
    cpa_fake_engine_stop(engine);
}

/* Stops while large bodies wait to be read. */
static void a_server_stops_with_bodies_unread(void) {
    enum { CLIENTS = 6, BYTES = 1000000 };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    char *body = malloc(BYTES + 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(body);
    memset(body, ' ', BYTES);
    memcpy(body, "{\"tokens\": [72", 14);
    for (int i = 14; i + 3 < BYTES; i += 3) memcpy(body + i, ",72", 3);
    memcpy(body + BYTES - 2, "]}", 3);
    int fds[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = cpa_http_connect(cpa_fake_engine_port(engine));
        cpa_http_ask(fds[i], "POST", "/detokenize", "", body);
    }
    cpa_server_stop(engine->server, 0);
    engine->server = NULL;
    for (int i = 0; i < CLIENTS; i++) close(fds[i]);
    free(body);
    cpa_fake_engine_stop(engine);
}

static void a_body_may_be_announced(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    static const char head[] =
        "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Length: 15\r\n"
        "Expect: 100-continue\r\n\r\n";
    char reply[1000];
    cpa_http_send(fd, head, sizeof head - 1);
    cpa_http_read_until(fd, "\r\n\r\n", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "100 Continue"));
    cpa_http_send(fd, "{\"prompt\": \"a\"}", 15);
    cpa_http_read_until(fd, "[97]", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "[97]"));
    close(fd);
    cpa_fake_engine_stop(engine);
}

static void requests_may_follow_each_other_in_one_packet(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    static const char two[] =
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 32\r\n\r\n"
        "{\"prompt\": [7], \"max_tokens\": 2}"
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
        "10\r\n{\"prompt\": [7], \r\n12\r\n\"max_tokens\": 1}  \r\n0\r\n\r\n";
    cpa_http_send(fd, two, sizeof two - 1);
    cpa_fake_engine_await(engine, 1);
    cpa_fake_engine_step(engine, 2);
    cpa_fake_engine_await(engine, 2);
    cpa_fake_engine_step(engine, 1);
    char reply[4000];
    cpa_http_read_until(fd, "\"total_tokens\":2}", reply, sizeof reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "\"total_tokens\":3}"));
    CU_ASSERT_PTR_NOT_NULL(strstr(reply, "\"total_tokens\":2}"));
    close(fd);
    cpa_fake_engine_stop(engine);
}

static const cpa_test tests[] = {
    {"requests of a client that leaves are cancelled", requests_of_a_client_that_leaves_are_cancelled},
    {"a client that sends no more gets its answer", a_client_that_sends_no_more_gets_its_answer},
    {"a text that stops it cancels a request", a_text_that_stops_it_cancels_a_request},
    {"a client that does not read slows no other", a_client_that_does_not_read_slows_no_other},
    {"a client that does not read keeps no request", a_client_that_does_not_read_keeps_no_request},
    {"a request that comes byte by byte is cut off", a_request_that_comes_byte_by_byte_is_cut_off},
    {"what the engine refuses is passed on", what_the_engine_refuses_is_passed_on},
    {"a request that fails is an error", a_request_that_fails_is_an_error},
    {"a drained server delivers what it has", a_drained_server_delivers_what_it_has},
    {"a request that is coming in is let in", a_request_that_is_coming_in_is_let_in},
    {"answers of a lost engine end with an error", answers_of_a_lost_engine_end_with_an_error},
    {"a server stops with answers under way", a_server_stops_with_answers_under_way},
    {"tokens are asked for by position", tokens_are_asked_for_by_position},
    {"a large body holds up no other connection", a_large_body_holds_up_no_other_connection},
    {"a server stops with bodies unread", a_server_stops_with_bodies_unread},
    {"a body may be announced", a_body_may_be_announced},
    {"requests may follow each other in one packet", requests_may_follow_each_other_in_one_packet},
};

CPA_TEST_MAIN("life", tests)
