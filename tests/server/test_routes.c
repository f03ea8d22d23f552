/* What the server answers by path, and what it refuses before the engine hears of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

static const cpa_server_options plain = {.model_name = "tiny"};

/* The status of a request, and the error's fields, which every refusal has. */
static int status_of(int port, const char *method, const char *path, const char *headers, const char *body) {
    cpa_http_reply reply;
    cpa_http_request(port, method, path, headers, body, &reply);
    if (reply.status >= 400 && strcmp(method, "HEAD") != 0) {
        json_t *error = cpa_http_json(&reply);
        CPA_ASSERT_ORDER(strlen(cpa_json_text_at(error, "error.message")), >, 0);
        CPA_ASSERT_ORDER(strlen(cpa_json_text_at(error, "error.type")), >, 0);
        json_decref(error);
    }
    const int status = reply.status;
    cpa_http_reply_free(&reply);
    return status;
}

static int health(int port) {
    cpa_http_reply reply;
    cpa_http_request(port, "GET", "/health", "", NULL, &reply);
    const int status = reply.status;
    cpa_http_reply_free(&reply);
    return status;
}

static char *two_metrics(void *ctx) {
    (void)ctx;
    return strdup("cpattn_num_requests_running 2\n");
}

static char *a_page(void *ctx) {
    return strdup(ctx);
}

static void status_routes_tell_of_the_server(void) {
    static char two_charts[] = "two charts";
    cpa_server_options options = plain;
    options.metrics = two_metrics;
    options.status_page = a_page;
    options.status_ctx = two_charts;
    cpa_fake_engine *engine = cpa_fake_engine_start_alone(options, 0);
    const int port = cpa_fake_engine_port(engine);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/live", "", NULL), 200);
    CU_ASSERT_EQUAL(health(port), 503);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", "{\"prompt\": [1]}"), 503);
    cpa_fake_engine_attach(engine);
    CU_ASSERT_EQUAL(health(port), 200);
    cpa_http_reply reply;
    cpa_http_request(port, "GET", "/metrics", "", NULL, &reply);
    CU_ASSERT_STRING_EQUAL(reply.body, "cpattn_num_requests_running 2\n");
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.head, "Content-Type: text/plain; version=0.0.4"));
    cpa_http_reply_free(&reply);
    cpa_http_request(port, "GET", "/status", "", NULL, &reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.head, "Content-Type: text/html; charset=utf-8"));
    CU_ASSERT_STRING_EQUAL(reply.body, "two charts");
    cpa_http_reply_free(&reply);
    cpa_http_request(port, "GET", "/v1/models", "", NULL, &reply);
    json_t *models = cpa_http_json(&reply);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(models, "data.0.id"), "tiny");
    CU_ASSERT_EQUAL(json_integer_value(cpa_json_at(models, "data.0.max_model_len")), CPA_FAKE_LENGTH);
    json_decref(models);
    cpa_http_reply_free(&reply);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models/tiny", "", NULL), 200);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models/other", "", NULL), 404);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/version", "", NULL), 200);
    cpa_http_request(port, "HEAD", "/v1/models", "", NULL, &reply);
    CU_ASSERT_EQUAL(reply.status, 200);
    CU_ASSERT_EQUAL(reply.bytes, 0);
    cpa_http_reply_free(&reply);
    cpa_server_drain(engine->server);
    CU_ASSERT_EQUAL(health(port), 503);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/live", "", NULL), 200);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", "{\"prompt\": [1]}"), 503);
    cpa_fake_engine_stop(engine);
}

static void what_is_not_there_is_refused_by_its_header(void) {
    cpa_server_options options = plain;
    options.max_body_bytes = 1000;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    const int port = cpa_fake_engine_port(engine);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/", "", NULL), 404);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/embeddings", "", "{}"), 404);
    cpa_http_reply reply;
    cpa_http_request(port, "GET", "/v1/completions", "", NULL, &reply);
    CU_ASSERT_EQUAL(reply.status, 405);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.head, "Allow: POST, OPTIONS\r\n"));
    cpa_http_reply_free(&reply);
    CU_ASSERT_EQUAL(status_of(port, "DELETE", "/health", "", NULL), 405);
    cpa_http_request(port, "OPTIONS", "/v1/chat/completions", "Origin: http://a\r\n", NULL, &reply);
    CU_ASSERT_EQUAL(reply.status, 204);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.head, "Allow: POST, OPTIONS\r\n"));
    CU_ASSERT_PTR_NULL(strstr(reply.head, "Access-Control-Allow-Origin"));
    cpa_http_reply_free(&reply);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "Content-Type: image/png\r\n", "x"), 415);
    char body[6000];
    memset(body, ' ', sizeof body);
    body[1500] = 0;
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", body), 413);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "Expect: 100-continue\r\n", body), 413);
    static const char chunked[] =
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        "Transfer-Encoding: chunked\r\n\r\n5dc\r\n%s\r\n0\r\n\r\n";
    char request[4000];
    const int n = snprintf(request, sizeof request, chunked, body);
    cpa_http_talk(port, request, (size_t)n, &reply);
    CU_ASSERT_EQUAL(reply.status, 413);
    cpa_http_reply_free(&reply);
    CU_ASSERT_EQUAL(engine->n, 0);
    cpa_fake_engine_stop(engine);
}

static void headers_are_bounded(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    static char request[50000];
    static const char *const begins[] = {"GET /live?", "GET /live HTTP/1.1\r\nHost: a\r\nX: "};
    static const int statuses[] = {414, 431};
    for (int i = 0; i < 2; i++) {
        memset(request, 'x', sizeof request);
        memcpy(request, begins[i], strlen(begins[i]));
        cpa_http_reply reply;
        cpa_http_talk(cpa_fake_engine_port(engine), request, sizeof request, &reply);
        CU_ASSERT(reply.status == statuses[i] || reply.status == 0); /* 0: the end came before the reply was read */
        cpa_http_reply_free(&reply);
    }
    CU_ASSERT_EQUAL(health(cpa_fake_engine_port(engine)), 200);
    cpa_fake_engine_stop(engine);
}

static _Atomic int log_lines, log_tells_prompts;
static void count_line(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx, (void)level;
    log_lines++;
    if (strstr(line, "nonsense")) log_tells_prompts = 1;
}

/* Each is refused, or the connection is closed; and a line tells of it. */
static void what_is_no_request_is_told_of(void) {
    static const struct {
        const char *request;
        int status;
    } cases[] = {
        {"GARBAGE\r\n\r\n", 0},
        {"GET\r\n\r\n", 0},
        {"GET /live HTTP/9.9\r\nHost: a\r\n\r\n", 505},
        {"GET /live HTTP/1.1\r\n\r\n", 400},
        {"GET /live HTTP/1.1\r\nHost a\r\n\r\n", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 5x\r\n\r\n", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n", 413},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length : 2\r\n\r\n{}", 400},
        {"GET /live HTTP/1.1\r\nHost: a\r\nContent-Length : 32\r\n\r\nGET /live HTTP/1.1\r\nHost: a\r\n\r\n", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n{}", 400},
        {"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}", 400},
    };
    cpa_log_set(count_line, NULL, CPA_LOG_WARN);
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_http_reply reply;
        const int before = log_lines;
        cpa_http_talk(cpa_fake_engine_port(engine), cases[i].request, strlen(cases[i].request), &reply);
        CU_ASSERT_EQUAL(reply.status, cases[i].status);
        for (int wait = 0; log_lines == before && wait < 2000; wait++) usleep(1000);
        CPA_ASSERT_ORDER(log_lines, >, before);
        cpa_http_reply_free(&reply);
    }
    CU_ASSERT_EQUAL(health(cpa_fake_engine_port(engine)), 200);
    cpa_fake_engine_stop(engine);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
}

/* Heads that libmicrohttpd takes, each at its own length: some have a NUL in them. */
static void heads_that_others_may_read_otherwise_are_refused(void) {
#define HEAD(text)                                                                                                     \
    { text, sizeof text - 1 }
    static const struct {
        const char *bytes;
        size_t n;
    } wrong[] = {
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX: a\rY: b\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX: a\r\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX: a\0Y: b\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\0b\r\nX: b\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX: a\0\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX:\0a\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\nY: c\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\r\nX: a\r\n\r\n"),
        HEAD("GET /live%00 HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET /live%00/../x?a=b HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET /live\0x HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET /live  HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET  /live HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET /live x HTTP/1.1\r\nHost: a\r\n\r\n"),
    };
    static const struct {
        const char *bytes;
        size_t n;
    } right[] = {
        HEAD("GET /live HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET /live HTTP/1.1\nHost: a\nX: b\n\n"), /* RFC 9112, section 2.2 */
        HEAD("GET /live HTTP/1.1\r\nhost:a\r\nX: \t \r\nY:\r\nZ: a b \t\r\nCookie: a=b; c=d\r\n\r\n"),
        HEAD("GET /%6cive?x=%00&y=a+b HTTP/1.1\r\nHost: a\r\n\r\n"),
        HEAD("GET /live HTTP/1.0\r\n\r\n"),
        HEAD("GET /live HTTP/1.0\r\nX: a\r\n\r\n"),
    };
#undef HEAD
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char reply[2000];
        const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
        cpa_http_send(fd, wrong[i].bytes, wrong[i].n);
        cpa_http_read_until(fd, "}}", reply, sizeof reply);
        CU_ASSERT_EQUAL(strncmp(reply, "HTTP/1.1 400 ", 13), 0);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, "Connection: close\r\n"));
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, "\r\n\r\n{\"error\":"));
        close(fd);
    }
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        char reply[2000];
        const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
        cpa_http_send(fd, right[i].bytes, right[i].n);
        cpa_http_read_until(fd, "}", reply, sizeof reply);
        CU_ASSERT_PTR_NOT_NULL(strstr(reply, " 200 OK\r\n"));
        close(fd);
    }
    cpa_fake_engine_stop(engine);
}

static void a_key_is_wanted_where_there_is_one(void) {
    static const char *const keys[] = {"secret"};
    cpa_server_options options = plain;
    options.api_keys = keys;
    options.n_api_keys = 1;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    const int port = cpa_fake_engine_port(engine);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models", "", NULL), 401);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models", "Authorization: Bearer secre\r\n", NULL), 401);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models", "Authorization: Bearer secret1\r\n", NULL), 401);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", "{\"prompt\": [1]}"), 401);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models", "Authorization: Bearer secret\r\n", NULL), 200);
    CU_ASSERT_EQUAL(health(port), 200);
    cpa_fake_engine_stop(engine);
}

/* Posts a prompt with a key, and returns what the engine has got. */
static const cpa_fake_request *ask_with_key(cpa_fake_engine *engine, const char *key, const char *body) {
    char header[100];
    const int64_t before = engine->n;
    snprintf(header, sizeof header, "Authorization: Bearer %s\r\n", key);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(fd, "POST", "/v1/completions", header, body);
    cpa_fake_engine_await(engine, before + 1);
    close(fd);
    return &engine->requests[before];
}

static void each_of_several_keys_is_a_tenant(void) {
    static const char *const keys[] = {"first", "second"};
    cpa_server_options options = plain;
    options.api_keys = keys;
    options.n_api_keys = 2;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    const int port = cpa_fake_engine_port(engine);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models", "Authorization: Bearer third\r\n", NULL), 401);
    CU_ASSERT_EQUAL(status_of(port, "GET", "/v1/models", "Authorization: Bearer second\r\n", NULL), 200);
    const cpa_fake_request *a = ask_with_key(engine, "first", "{\"prompt\": [1]}");
    const cpa_fake_request *b = ask_with_key(engine, "second", "{\"prompt\": [1], \"cache_salt\": \"pepper\"}");
    const cpa_fake_request *c = ask_with_key(engine, "second", "{\"prompt\": [1]}");
    CU_ASSERT_STRING_NOT_EQUAL(a->tenant, b->tenant);
    CU_ASSERT_STRING_EQUAL(b->tenant, c->tenant); /* whatever the salt */
    CU_ASSERT_STRING_NOT_EQUAL(a->salt, c->salt);
    CU_ASSERT_STRING_NOT_EQUAL(b->salt, c->salt);
    cpa_fake_engine_stop(engine);
}

/* A body of /v1/completions, or of chats where it has messages, and the field that its refusal names. */
typedef struct wrong_body {
    const char *body, *param;
    int status;
} wrong_body;

static const wrong_body wrong_bodies[] = {
    {"", "", 400},
    {"{", "", 400},
    {"[]", "", 400},
    {"nonsense", "", 400},
    {"{\"prompt\": [1]} more", "", 400},
    {"{\"prompt\": [1], \"prompt\": [2]}", "", 400},
    {"{\"prompt\": \"\xff\"}", "", 400},
    {"{\"prompt\": [1], \"a\\u0000b\": 1}", "", 400},
    {"{\"prompt\": \"\\ud800\"}", "", 400},
    {"{\"prompt\": [1], \"temperature\": NaN}", "", 400},
    {"{\"prompt\": [1], \"temperature\": 1e999}", "", 400},
    {"{\"prompt\": [1], \"n\": 123456789012345678901234567890}", "", 400},
    {"{}", "prompt", 400},
    {"{\"prompt\": null}", "prompt", 400},
    {"{\"prompt\": {}}", "prompt", 400},
    {"{\"prompt\": []}", "prompt", 400},
    {"{\"prompt\": \"\"}", "prompt", 400},
    {"{\"prompt\": [[]]}", "prompt", 400},
    {"{\"prompt\": [1, 300]}", "prompt", 400},
    {"{\"prompt\": \"<|beyond|>\"}", "prompt", 400},
    {"{\"prompt\": [-1]}", "prompt", 400},
    {"{\"prompt\": [1.5]}", "prompt", 400},
    {"{\"prompt\": [true]}", "prompt", 400},
    {"{\"prompt\": [[1], 2]}", "prompt", 400},
    {"{\"prompt\": [[1], \"a\", null]}", "prompt", 400},
    {"{\"prompt\": [1], \"model\": \"other\"}", "model", 404},
    {"{\"prompt\": [1], \"model\": 7}", "model", 400},
    {"{\"prompt\": [1], \"model\": \"tiny\\u0000\"}", "model", 400},
    {"{\"prompt\": [1], \"max_tokens\": 0}", "max_tokens", 400},
    {"{\"prompt\": [1], \"max_tokens\": -1}", "max_tokens", 400},
    {"{\"prompt\": [1], \"max_tokens\": 1.5}", "max_tokens", 400},
    {"{\"prompt\": [1], \"max_tokens\": \"5\"}", "max_tokens", 400},
    {"{\"prompt\": [1], \"max_tokens\": 5000}", "prompt", 400},
    {"{\"prompt\": [1], \"n\": 0}", "n", 400},
    {"{\"prompt\": [1], \"n\": 1000}", "n", 400},
    {"{\"prompt\": [1], \"temperature\": -1}", "temperature", 400},
    {"{\"prompt\": [1], \"temperature\": \"hot\"}", "temperature", 400},
    {"{\"prompt\": [1], \"top_p\": 1.1}", "top_p", 400},
    {"{\"prompt\": [1], \"top_k\": -2}", "top_k", 400},
    {"{\"prompt\": [1], \"min_p\": 2}", "min_p", 400},
    {"{\"prompt\": [1], \"repetition_penalty\": 0}", "repetition_penalty", 400},
    {"{\"prompt\": [1], \"presence_penalty\": 3}", "presence_penalty", 400},
    {"{\"prompt\": [1], \"seed\": 1.5}", "seed", 400},
    {"{\"prompt\": [1], \"ignore_eos\": 1}", "ignore_eos", 400},
    {"{\"prompt\": [1], \"stream\": \"yes\"}", "stream", 400},
    {"{\"prompt\": [1], \"stream_options\": {}}", "stream_options", 400},
    {"{\"prompt\": [1], \"stream\": true, \"stream_options\": 5}", "stream_options", 400},
    {"{\"prompt\": [1], \"stream\": true, \"stream_options\": {\"include_usge\": true}}",
     "stream_options.include_usage", 400},
    {"{\"prompt\": [1], \"stop\": \"\"}", "stop", 400},
    {"{\"prompt\": [1], \"stop\": [1]}", "stop", 400},
    {"{\"prompt\": [1], \"stop\": ["
     "\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
     "\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
     "\"a\"]}",
     "stop", 400},
    {"{\"prompt\": [1], \"return_tokens_as_token_ids\": true}", "return_tokens_as_token_ids", 400},
    {"{\"prompt\": [1], \"stop\": {}}", "stop", 400},
    {"{\"prompt\": [1], \"stop\": \"a\\u0000\"}", "stop", 400},
    {"{\"prompt\": [1], \"stop_token_ids\": [900]}", "stop_token_ids", 400},
    {"{\"prompt\": [1], \"stop_token_ids\": 9}", "stop_token_ids", 400},
    {"{\"prompt\": [1], \"logprobs\": 21}", "logprobs", 400},
    {"{\"prompt\": [1], \"logprobs\": -1}", "logprobs", 400},
    {"{\"prompt\": [1], \"logprobs\": true}", "logprobs", 400},
    {"{\"prompt\": [1], \"cache_salt\": \"\"}", "cache_salt", 400},
    {"{\"prompt\": [1], \"cache_salt\": \"a\\u0000b\"}", "cache_salt", 400},
    {"{\"prompt\": [1], \"kv_transfer_params\": 1}", "kv_transfer_params", 400},
    {"{\"prompt\": [1], \"kv_transfer_params\": {\"do_remote_prefill\": 2}}", "kv_transfer_params.do_remote_prefill",
     400},
    {"{\"prompt\": [1], \"kv_transfer_params\": {\"do_remote_decode\": true}}", "kv_transfer_params", 400},
    {"{\"prompt\": [1], \"priority\": 1e10}", "priority", 400},
    {"{\"prompt\": [1], \"echo\": \"yes\"}", "echo", 400},
    {"{\"prompt\": [1], \"echo\": false, \"max_tokens\": 0}", "max_tokens", 400},
    {"{\"prompt\": [1], \"echo\": true, \"max_tokens\": -1}", "max_tokens", 400},
    {"{\"prompt\": [1], \"echo\": true, \"max_tokens\": 0, \"min_tokens\": 1}", "min_tokens", 400},
    {"{\"prompt\": [1], \"best_of\": 3}", "best_of", 400},
    {"{\"prompt\": [1], \"suffix\": \"end\"}", "suffix", 400},
    {"{\"prompt\": [1], \"logit_bias\": [1]}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"5\": 101}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"5\": -100.5}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"5\": \"1\"}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"5\": null}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"300\": 1}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"99999999999999999999\": 1}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"-1\": 1}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"05\": 1}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"\": 1}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"logit_bias\": {\"Hello\": 1}}", "logit_bias", 400},
    {"{\"prompt\": [1], \"min_tokens\": -1}", "min_tokens", 400},
    {"{\"prompt\": [1], \"min_tokens\": 1.5}", "min_tokens", 400},
    {"{\"prompt\": [1], \"min_tokens\": 6, \"max_tokens\": 5}", "min_tokens", 400},
    {"{\"prompt\": [1], \"min_tokens\": 17}", "min_tokens", 400},
    {"{\"prompt\": [1], \"frequency_penalty\": 2.5}", "frequency_penalty", 400},
    {"{\"prompt\": [1], \"response_format\": {\"type\": \"grammar\"}}", "response_format.type", 400},
    {"{\"prompt\": [1], \"max_token\": 5}", "max_tokens", 400},
    {"{\"prompt\": [1], \"temprature\": 0.5}", "temperature", 400},
    {"{\"prompt\": [1], \"prompt_logprobs\": -1}", "prompt_logprobs", 400},
    {"{\"prompt\": [1], \"prompt_logprobs\": 21}", "prompt_logprobs", 400},
    {"{\"prompt\": [1], \"prompt_logprobs\": true}", "prompt_logprobs", 400},
    {"{\"prompt\": [1], \"prompt_logprobs\": 0, \"stream\": true}", "prompt_logprobs", 400},
    {"{\"prompt\": [1], \"typical_p\": 0.5}", "typical_p", 400},
    {"{\"prompt\": [1], \"thinking_token_budget\": 100}", "thinking_token_budget", 400},
    {"{\"prompt\": [1], \"reasoning_effort\": \"low\"}", "reasoning_effort", 400},
    {"{\"prompt\": [1], \"modalities\": [\"text\", \"audio\"]}", "modalities", 400},
    {"{\"prompt\": [1], \"modalities\": \"audio\"}", "modalities", 400},
    {"{\"prompt\": [1], \"modalities\": [\"text\\u0000\"]}", "modalities", 400},
    {"{\"prompt\": [1], \"response_format\": {\"type\": \"text\\u0000\"}}", "response_format.type", 400},
    {"{\"prompt\": [1], \"lora_name\": \"a\"}", "lora_name", 400},
    {"{\"prompt\": [1], \"dry_multiplier\": 0.8}", "dry_multiplier", 400},
    {"{\"prompt\": [1], \"xtc_probability\": 0.5}", "xtc_probability", 400},
    {"{\"prompt\": [1], \"mirostat_mode\": 2}", "mirostat_mode", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"echo\": true}", "echo", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"max_tokens\": 0}", "max_tokens", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"min_tokens\": 4096}", "min_tokens", 400},
    {"{\"messages\": []}", "messages", 400},
    {"{\"messages\": \"hello\"}", "messages", 400},
    {"{\"messages\": [5]}", "messages", 400},
    {"{\"messages\": [{\"content\": \"a\"}]}", "messages[0].role", 400},
    {"{\"messages\": [{\"role\": \"user\\u0000\", \"content\": \"a\"}]}", "messages[0].role", 400},
    {"{\"messages\": [{\"role\": \"user\"}]}", "messages[0].content", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}", "messages[0].content", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{}]}", "tools", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"top_logprobs\": 1}", "top_logprobs", 400},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"logprobs\": 1}", "logprobs", 400},
};

static void each_wrong_body_is_refused_with_a_reason(void) {
    log_lines = log_tells_prompts = 0;
    cpa_log_set(count_line, NULL, CPA_LOG_WARN);
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    const int n = sizeof wrong_bodies / sizeof *wrong_bodies;
    for (int i = 0; i < n; i++) {
        const wrong_body *wrong = &wrong_bodies[i];
        cpa_http_reply reply;
        const char *path = strstr(wrong->body, "messages") ? "/v1/chat/completions" : "/v1/completions";
        cpa_http_request(cpa_fake_engine_port(engine), "POST", path, "", wrong->body, &reply);
        json_t *error = cpa_http_json(&reply);
        const int is_right = reply.status == wrong->status && strlen(cpa_json_text_at(error, "error.message")) > 0 &&
                             strcmp(cpa_json_text_at(error, "error.param"), wrong->param) == 0;
        CU_ASSERT(is_right);
        if (!is_right) fprintf(stderr, "%s: %d %s\n", wrong->body, reply.status, reply.body);
        json_decref(error);
        cpa_http_reply_free(&reply);
    }
    CU_ASSERT_EQUAL(engine->n, 0);
    cpa_fake_engine_stop(engine);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(log_lines, n);
    CU_ASSERT_FALSE(log_tells_prompts);
}

/* What the engine would copy for each sample. */
static void long_lists_and_salts_are_refused(void) {
    enum { LONG = 1 << 20 };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int port = cpa_fake_engine_port(engine);
    char *list = malloc(2 * LONG + 1), *body = malloc(2 * LONG + 100);
    CU_ASSERT_FATAL(list && body);
    for (int i = 0; i < LONG; i++) memcpy(list + 2 * i, "1,", 2);
    list[2 * LONG - 1] = 0;
    sprintf(body, "{\"prompt\": [1], \"stop_token_ids\": [%s]}", list);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", body), 400);
    sprintf(body, "{\"prompt\": [1], \"cache_salt\": \"%s\"}", list);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", body), 400);
    CU_ASSERT_EQUAL(engine->n, 0);
    free(list);
    free(body);
    cpa_fake_engine_stop(engine);
}

static void bodies_share_what_memory_there_is(void) {
    enum { CLIENTS = 40, BODY = 1000 }; /* more than there is memory for, whoever comes first */
    cpa_server_options options = plain;
    options.max_body_bytes = BODY;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 0);
    const int port = cpa_fake_engine_port(engine);
    char most[BODY];
    memset(most, ' ', sizeof most);
    most[BODY - 1] = 0;
    int fds[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) { /* each without its last byte */
        static const char head[] = "POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n";
        fds[i] = cpa_http_connect(port);
        cpa_http_send(fds[i], head, sizeof head - 1);
        cpa_http_send(fds[i], most, BODY - 1);
    }
    int status = 0;
    for (int wait = 0; status != 503 && wait < 2000; wait++) {
        status = status_of(port, "POST", "/tokenize", "", most);
        usleep(1000);
    }
    CU_ASSERT_EQUAL(status, 503);
    for (int i = 0; i < CLIENTS; i++) close(fds[i]);
    for (int wait = 0; status != 400 && wait < 2000; wait++) {
        status = status_of(port, "POST", "/tokenize", "", most);
        usleep(1000);
    }
    CU_ASSERT_EQUAL(status, 400);
    cpa_fake_engine_stop(engine);
}

static void nested_deep_is_no_matter(void) {
    enum { DEPTH = 200000 };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    char *body = malloc(DEPTH + 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(body);
    memset(body, '[', DEPTH);
    body[DEPTH] = 0;
    CU_ASSERT_EQUAL(status_of(cpa_fake_engine_port(engine), "POST", "/v1/completions", "", body), 400);
    free(body);
    cpa_fake_engine_stop(engine);
}

static void text_is_refused_without_a_tokenizer(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    const int port = cpa_fake_engine_port(engine);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", "{\"prompt\": \"Hello\"}"), 400);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/completions", "", "{\"prompt\": [1], \"stop\": \"a\"}"), 400);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/tokenize", "", "{\"prompt\": \"Hello\"}"), 400);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/detokenize", "", "{\"tokens\": [1]}"), 400);
    CU_ASSERT_EQUAL(status_of(port, "POST", "/v1/chat/completions", "",
                              "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"),
                    400);
    cpa_fake_engine_stop(engine);
}

static void text_becomes_ids_and_ids_text(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    const int port = cpa_fake_engine_port(engine);
    cpa_http_reply reply;
    cpa_http_request(port, "POST", "/tokenize", "",
                     "{\"prompt\": \"Hi\\u00e9<|im_end|>\", \"return_token_strs\": true}", &reply);
    json_t *got = cpa_http_json(&reply);
    json_t *wanted =
        json_pack("{s:i,s:i,s:[i,i,i,i,i],s:[s,s,s,s,s]}", "count", 5, "max_model_len", CPA_FAKE_LENGTH, "tokens", 'H',
                  'i', 0xc3, 0xa9, CPA_FAKE_END, "token_strs", "H", "i", "\xef\xbf\xbd", "\xef\xbf\xbd", "<|im_end|>");
    CU_ASSERT(json_equal(got, wanted));
    json_decref(got);
    json_decref(wanted);
    cpa_http_reply_free(&reply);
    static const struct {
        const char *body;
        json_int_t ids[5];
        size_t n;
    } nuls[] = {{"{\"prompt\": \"a\\u0000b\\u0000\"}", {'a', 0, 'b', 0}, 4},
                {"{\"add_generation_prompt\": false, \"messages\": [{\"role\": \"user\", \"content\": \"a\\u0000b\"}]}",
                 {'\n', 'a', 0, 'b', CPA_FAKE_END},
                 5}};
    for (size_t i = 0; i < sizeof nuls / sizeof *nuls; i++) {
        cpa_http_request(port, "POST", "/tokenize", "", nuls[i].body, &reply);
        got = cpa_http_json(&reply);
        const size_t at = i * strlen("<|im_start|>user");
        for (size_t k = 0; k < nuls[i].n; k++)
            CU_ASSERT_EQUAL(json_integer_value(json_array_get(cpa_json_at(got, "tokens"), at + k)), nuls[i].ids[k]);
        json_decref(got);
        cpa_http_reply_free(&reply);
    }
    cpa_http_request(port, "POST", "/detokenize", "", "{\"tokens\": [72, 105, 195, 169, 256]}", &reply);
    got = cpa_http_json(&reply);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(got, "prompt"), "Hi\u00e9<|im_end|>");
    json_decref(got);
    cpa_http_reply_free(&reply);
    cpa_fake_engine_stop(engine);
}

static void misspelt_fields_of_conversions_are_refused(void) {
    static const char *const cases[][3] = {
        {"/tokenize", "{\"prompt\": \"a\", \"add_special_token\": true}", "add_special_tokens"},
        {"/tokenize", "{\"prompt\": \"a\", \"return_tokens_strs\": true}", "return_token_strs"},
        {"/tokenize", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"add_generation_promt\": true}",
         "add_generation_prompt"},
        {"/detokenize", "{\"tokens\": [1], \"modle\": \"other\"}", ""},
        {"/detokenize", "{\"tokens\": [1], \"model_\": \"other\"}", "model"}};
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_http_reply reply;
        cpa_http_request(cpa_fake_engine_port(engine), "POST", cases[i][0], "", cases[i][1], &reply);
        json_t *error = cpa_http_json(&reply);
        CU_ASSERT_EQUAL(reply.status, *cases[i][2] ? 400 : 200);
        CU_ASSERT_STRING_EQUAL(cpa_json_text_at(error, "error.param"), cases[i][2]);
        json_decref(error);
        cpa_http_reply_free(&reply);
    }
    cpa_fake_engine_stop(engine);
}

static void a_port_that_is_taken_is_named(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    cpa_server_options options = plain;
    options.port = cpa_fake_engine_port(engine);
    cpa_server *second = NULL;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(cpa_server_start(&options, &second, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(second);
    char port[16];
    snprintf(port, sizeof port, "port %d", options.port);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, port));
    options.host = "no.such.host.invalid";
    CU_ASSERT_EQUAL(cpa_server_start(&options, &second, &err), CPA_INVALID);
    cpa_fake_engine_stop(engine);
}

static const cpa_test tests[] = {
    {"status routes tell of the server", status_routes_tell_of_the_server},
    {"what is not there is refused by its header", what_is_not_there_is_refused_by_its_header},
    {"headers are bounded", headers_are_bounded},
    {"what is no request is told of", what_is_no_request_is_told_of},
    {"heads that others may read otherwise are refused", heads_that_others_may_read_otherwise_are_refused},
    {"a key is wanted where there is one", a_key_is_wanted_where_there_is_one},
    {"each wrong body is refused with a reason", each_wrong_body_is_refused_with_a_reason},
    {"each of several keys is a tenant", each_of_several_keys_is_a_tenant},
    {"long lists and salts are refused", long_lists_and_salts_are_refused},
    {"bodies share what memory there is", bodies_share_what_memory_there_is},
    {"nested deep is no matter", nested_deep_is_no_matter},
    {"text is refused without a tokenizer", text_is_refused_without_a_tokenizer},
    {"text becomes ids and ids text", text_becomes_ids_and_ids_text},
    {"misspelt fields of conversions are refused", misspelt_fields_of_conversions_are_refused},
    {"a port that is taken is named", a_port_that_is_taken_is_named},
};

CPA_TEST_MAIN("routes", tests)
