/* `cp_attn bench serve` against a server that plays given answers. */
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "bench/serve/serve.h"
#include "tests/bench/stub_server.h"
#include "tests/fixtures/unit.h"

#define HEAD "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
#define CHUNK "data: {\"choices\": [{\"text\": \"a\", \"finish_reason\": null}]}\n\n"
#define LAST "data: {\"choices\": [{\"text\": \"b\", \"finish_reason\": \"length\"}]}\n\n"
#define USAGE "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 5, \"completion_tokens\": 3}}\n\n"
#define DONE "data: [DONE]\n\n"
#define GOOD HEAD CHUNK CHUNK LAST USAGE DONE
#define JSON(status, body) "HTTP/1.1 " status "\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" body

#define HEALTHY JSON("200 OK", "")
#define MODELS JSON("200 OK", "{\"data\": [{\"id\": \"tiny\", \"vocab_size\": 50}]}")

static const cpa_stub_answer good = {.bytes = GOOD};

/* What a run of the client leaves. */
typedef struct outcome {
    int code;
    char out[8192], err[4096];
    json_t *result; /* NULL: no file */
} outcome;

static void read_file(const char *path, char *text, size_t bytes) {
    FILE *file = fopen(path, "r");
    text[file ? fread(text, 1, bytes - 1, file) : 0] = 0;
    if (file) fclose(file);
}

/* Sends a stream of this process to a file; the descriptor that leads where it did. */
static int redirect(int descriptor, const char *path) {
    const int before = dup(descriptor), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(file, descriptor);
    close(file);
    return before;
}

static void restore(int descriptor, int before) {
    dup2(before, descriptor);
    close(before);
}

/* Runs `cp_attn bench serve` with the arguments of a line. */
static outcome run_line(const char *key, const char *line) {
    char copy[1024], *argv[64] = {copy};
    int argc = 0;
    snprintf(copy, sizeof copy, "serve %s", line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    outcome o = {.code = -1};
    unlink("client.json");
    fflush(NULL);
    const int out = redirect(STDOUT_FILENO, "client.out"), err = redirect(STDERR_FILENO, "client.err");
    o.code = cpa_bench_serve_main(argc, argv, key);
    fflush(NULL);
    restore(STDOUT_FILENO, out);
    restore(STDERR_FILENO, err);
    read_file("client.out", o.out, sizeof o.out);
    read_file("client.err", o.err, sizeof o.err);
    o.result = json_load_file("client.json", 0, NULL);
    unlink("client.out");
    unlink("client.err");
    unlink("client.json");
    return o;
}

/* The same against a server. */
static outcome run_against(cpa_stub *stub, const char *key, const char *more) {
    char line[512];
    snprintf(line, sizeof line, "--url http://127.0.0.1:%d --ready-timeout 5 --timeout 5 --result-json client.json %s",
             cpa_stub_port(stub), more);
    return run_line(key, line);
}

static double number_of(const outcome *o, const char *key) {
    const json_t *value = json_object_get(o->result, key);
    return json_is_number(value) ? json_number_value(value) : -1;
}

static void answers_are_counted_and_timed(void) {
    static const cpa_stub_answer answers[] = {
        {.bytes = GOOD}, {.bytes = GOOD, .piece = 7}, {.bytes = GOOD, .piece = 90, .delay_ms = 100}};
    static const cpa_stub_script script = {
        .health = HEALTHY, .models = MODELS, .failures = 2, .answers = answers, .n_answers = 3};
    cpa_stub *stub = cpa_stub_start(&script);
    outcome o = run_against(
        stub, NULL, "--requests 6 --input-len 5 --output-len 3 --percentiles 50,90 --goodput ttft:4000 e2el:300");
    CU_ASSERT_EQUAL(o.code, 0);
    CU_ASSERT_STRING_EQUAL(o.err, "");
    CU_ASSERT_PTR_NOT_NULL(strstr(o.out, "6 of 6 completed"));
    CU_ASSERT_PTR_NOT_NULL(strstr(o.out, "TPOT"));
    CU_ASSERT_PTR_NOT_NULL(strstr(o.out, "model tiny"));
    CU_ASSERT_EQUAL(number_of(&o, "num_prompts"), 6);
    CU_ASSERT_EQUAL(number_of(&o, "completed"), 6);
    CU_ASSERT_EQUAL(number_of(&o, "failed"), 0);
    CU_ASSERT_EQUAL(number_of(&o, "total_input_tokens"), 30);
    CU_ASSERT_EQUAL(number_of(&o, "total_output_tokens"), 18);
    CPA_ASSERT_ORDER(number_of(&o, "p90_ttft_ms"), >=, number_of(&o, "p50_ttft_ms"));
    CPA_ASSERT_ORDER(number_of(&o, "p90_e2el_ms"), >,
                     300); /* its last token is in the fourth write, 100 ms before each */
    CU_ASSERT_DOUBLE_EQUAL(number_of(&o, "request_goodput"), 4 / number_of(&o, "duration"), 1e-6);
    CU_ASSERT_EQUAL(json_array_size(json_object_get(o.result, "ttfts")), 6);
    CU_ASSERT_EQUAL(json_array_size(json_array_get(json_object_get(o.result, "itls"), 5)), 2);
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(o.result, "model_id")), "tiny");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(o.result, "request_rate")), "inf");
    json_decref(o.result);
    cpa_stub_stop(stub);
}

/* Each kind of failure is counted with its reason; what other requests measure stays. */
static void a_bad_answer_is_a_failed_request(void) {
    static const struct {
        cpa_stub_answer answer;
        const char *reason;
    } cases[] = {
        {{.bytes = JSON("400 Bad Request", "{\"error\": {\"message\": \"no such thing\"}}")},
         "HTTP 400: no such thing"},
        {{.bytes = JSON("503 Service Unavailable", "")}, "HTTP 503"},
        {{.bytes = JSON("200 OK", "{\"choices\": []}")}, "no stream of events"},
        {{.bytes = HEAD CHUNK}, "the stream ended before [DONE]"},
        {{.bytes = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" CHUNK},
         "cut in the middle"},
        {{.bytes = HEAD "data: {{{\n\n"}, "no JSON"},
        {{.bytes = "\x01\x02 what?\r\n"}, "1 request failed"},
        {{.bytes = ""}, "1 request failed"},
        {{.bytes = HEAD CHUNK, .stays = 1}, "cut in the middle"},
        {{.bytes = HEAD CHUNK "data: {\"error\": {\"message\": \"a rank is lost\"}}\n\n", .stays = 1},
         "a rank is lost"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const cpa_stub_answer answers[] = {good, cases[i].answer, good};
        const cpa_stub_script script = {.health = HEALTHY, .models = MODELS, .answers = answers, .n_answers = 3};
        cpa_stub *stub = cpa_stub_start(&script);
        outcome o =
            run_against(stub, NULL, "--requests 3 --input-len 5 --output-len 3 --max-concurrency 1 --timeout 1");
        CU_ASSERT_EQUAL(o.code, 1);
        CU_ASSERT_PTR_NOT_NULL(strstr(o.err, cases[i].reason));
        if (!strstr(o.err, cases[i].reason)) printf("case %zu: %s\n", i, o.err);
        CU_ASSERT_EQUAL(strcspn(o.err, "\n") + 1, strlen(o.err));
        CU_ASSERT_EQUAL(number_of(&o, "completed"), 2);
        CU_ASSERT_EQUAL(number_of(&o, "failed"), 1);
        CU_ASSERT_EQUAL(number_of(&o, "total_output_tokens"), 6);
        json_decref(o.result);
        cpa_stub_stop(stub);
    }
}

static const json_t *member(const json_t *object, const char *key) {
    return json_object_get(object, key);
}

/* The body of a request that the server got. */
static json_t *body_of(cpa_stub *stub, int number) {
    const char *text = cpa_stub_request(stub, number);
    return text ? json_loads(strstr(text, "\r\n\r\n") + 4, 0, NULL) : NULL;
}

/* Prompts of a trace that begin alike are sent so, in ids of the model; salt, priority and more go with them. */
static void a_trace_is_sent_as_it_says(void) {
    static const cpa_stub_script script = {.health = HEALTHY, .models = MODELS, .answers = &good, .n_answers = 1};
    FILE *trace = fopen("client-trace.jsonl", "w");
    fputs(
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 40, \"hash_ids\": [1, 2]}\n"
        "{\"timestamp\": 10, \"input_length\": 1000, \"output_length\": 8, \"hash_ids\": [1, 3], \"salt\": \"s\", "
        "\"priority\": -2}\n"
        "{\"timestamp\": 20, \"input_length\": 1000, \"output_length\": 8, \"hash_ids\": [1, 3]}\n",
        trace);
    fclose(trace);
    cpa_stub *stub = cpa_stub_start(&script);
    outcome o = run_against(
        stub, "key-of-the-environment",
        "--trace client-trace.jsonl --requests 2 --length-scale 0.1 --time-scale 1 --extra-body {\"top_k\":7}");
    CU_ASSERT_EQUAL(o.code, 0);
    CU_ASSERT_EQUAL(cpa_stub_count(stub), 2);
    json_t *first = body_of(stub, 0), *second = body_of(stub, 1);
    CU_ASSERT_EQUAL(json_array_size(member(first, "prompt")), 60);
    CU_ASSERT_EQUAL(json_array_size(member(second, "prompt")), 100);
    int alike = 0;
    for (size_t i = 0; i < 60; i++) {
        const json_t *a = json_array_get(member(first, "prompt"), i), *b = json_array_get(member(second, "prompt"), i);
        CU_ASSERT(json_integer_value(a) >= 0 && json_integer_value(a) < 50);
        CU_ASSERT(i >= 51 || json_equal(a, b));
        alike += json_equal(a, b);
    }
    CPA_ASSERT_ORDER(alike, <, 60); /* 51 tokens are those of hash 1 */
    CU_ASSERT_EQUAL(json_integer_value(member(first, "max_tokens")), 4);
    CU_ASSERT(json_is_true(member(first, "stream")) && json_is_true(member(first, "ignore_eos")));
    CU_ASSERT(json_is_true(member(member(first, "stream_options"), "include_usage")));
    CU_ASSERT_PTR_NULL(member(first, "cache_salt"));
    CU_ASSERT_STRING_EQUAL(json_string_value(member(second, "cache_salt")), "s");
    CU_ASSERT_EQUAL(json_integer_value(member(second, "priority")), -2);
    CU_ASSERT_EQUAL(json_integer_value(member(second, "top_k")), 7);
    CU_ASSERT_STRING_EQUAL(json_string_value(member(second, "model")), "tiny");
    const char *request = cpa_stub_request(stub, 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(request, "POST /v1/completions HTTP/1.1"));
    CU_ASSERT_PTR_NOT_NULL(strstr(request, "\r\nAuthorization: Bearer key-of-the-environment\r\n"));
    char *text = json_dumps(o.result, 0);
    CU_ASSERT(!strstr(o.out, "key-of") && !strstr(o.err, "key-of") && !strstr(text, "key-of"));
    free(text);
    json_decref(first);
    json_decref(second);
    json_decref(o.result);
    cpa_stub_stop(stub);
    unlink("client-trace.jsonl");
}

/* Where a trace has several salts, each has figures of its own, in the order of their first requests. */
static void each_tenant_has_its_figures(void) {
    const cpa_stub_answer answers[] = {good, {.bytes = JSON("503 Service Unavailable", "")}, good, good};
    const cpa_stub_script script = {.health = HEALTHY, .models = MODELS, .answers = answers, .n_answers = 4};
    FILE *trace = fopen("client-trace.jsonl", "w");
    fputs(
        "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 3, \"salt\": \"one-secret\"}\n"
        "{\"timestamp\": 10, \"input_length\": 5, \"output_length\": 3, \"salt\": \"another-secret\"}\n"
        "{\"timestamp\": 20, \"input_length\": 5, \"output_length\": 3, \"salt\": \"another-secret\"}\n"
        "{\"timestamp\": 30, \"input_length\": 5, \"output_length\": 3, \"salt\": \"another-secret\"}\n",
        trace);
    fclose(trace);
    cpa_stub *stub = cpa_stub_start(&script);
    outcome o = run_against(stub, NULL, "--trace client-trace.jsonl --max-concurrency 1");
    CU_ASSERT_EQUAL(o.code, 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(o.out, "tenant 1    1 of 1 requests completed"));
    CU_ASSERT_PTR_NOT_NULL(strstr(o.out, "tenant 2    2 of 3 requests completed"));
    const json_t *tenants = member(o.result, "tenants"), *first = json_array_get(tenants, 0),
                 *second = json_array_get(tenants, 1);
    CU_ASSERT_EQUAL(json_array_size(tenants), 2);
    CU_ASSERT_EQUAL(json_integer_value(member(first, "num_prompts")), 1);
    CU_ASSERT_EQUAL(json_integer_value(member(second, "completed")), 2);
    CU_ASSERT_EQUAL(json_integer_value(member(second, "failed")), 1);
    CU_ASSERT_EQUAL(json_integer_value(member(second, "total_output_tokens")), 6);
    CPA_ASSERT_ORDER(json_real_value(member(second, "median_ttft_ms")), >, 0);
    char *text = json_dumps(o.result, 0);
    CU_ASSERT(!strstr(o.out, "-secret") && !strstr(text, "-secret"));
    free(text);
    json_decref(o.result);
    o = run_against(stub, NULL, "--trace client-trace.jsonl --requests 1");
    CU_ASSERT_PTR_NULL(strstr(o.out, "tenant"));
    CU_ASSERT_PTR_NULL(member(o.result, "tenants"));
    json_decref(o.result);
    cpa_stub_stop(stub);
    unlink("client-trace.jsonl");
}

static void chat_is_asked_in_words(void) {
    static const cpa_stub_answer answer = {
        .bytes = HEAD
        "data: {\"choices\": [{\"delta\": {\"role\": \"assistant\"}, \"finish_reason\": null}]}\n\n"
        "data: {\"choices\": [{\"delta\": {\"content\": \"a\"}, \"finish_reason\": \"stop\"}]}\n\n" DONE};
    static const cpa_stub_script script = {.models = MODELS, .answers = &answer, .n_answers = 1}; /* no /health */
    cpa_stub *stub = cpa_stub_start(&script);
    outcome o = run_against(stub, NULL, "--endpoint /v1/chat/completions --requests 1 --input-len 4 --no-ignore-eos");
    CU_ASSERT_EQUAL(o.code, 0);
    CU_ASSERT_EQUAL(number_of(&o, "total_output_tokens"), 1);
    json_t *body = body_of(stub, 0);
    const char *content = json_string_value(member(json_array_get(member(body, "messages"), 0), "content"));
    int spaces = 0;
    for (const char *c = content; c && *c; c++) spaces += *c == ' ';
    CU_ASSERT_EQUAL(spaces, 3);
    CU_ASSERT_PTR_NULL(member(body, "ignore_eos"));
    CU_ASSERT_EQUAL(json_integer_value(member(body, "max_completion_tokens")), 128);
    json_decref(body);
    json_decref(o.result);
    cpa_stub_stop(stub);
}

static void no_more_are_under_way_than_were_allowed(void) {
    static const cpa_stub_answer answer = {.bytes = GOOD, .delay_ms = 40};
    static const cpa_stub_script script = {.health = HEALTHY, .models = MODELS, .answers = &answer, .n_answers = 1};
    cpa_stub *stub = cpa_stub_start(&script);
    outcome o = run_against(stub, NULL, "--requests 8 --max-concurrency 2 --input-len 3");
    CU_ASSERT_EQUAL(o.code, 0);
    CU_ASSERT_EQUAL(cpa_stub_most_at_once(stub), 2);
    CU_ASSERT_EQUAL(number_of(&o, "max_concurrent_requests"), 2);
    CPA_ASSERT_ORDER(number_of(&o, "duration"), <, 1); /* four rounds of 40 ms, and no waiting in between */
    json_decref(o.result);
    o = run_against(stub, NULL, "--requests 8 --input-len 3 --request-rate 40 --seed 3");
    CU_ASSERT_EQUAL(o.code, 0);
    const json_t *starts = member(o.result, "start_times");
    const double last = json_real_value(json_array_get(starts, 7));
    CU_ASSERT(json_real_value(json_array_get(starts, 0)) < last && last > 0.05 && last < 5);
    json_decref(o.result);
    cpa_stub_stop(stub);
}

static void a_server_that_is_not_there_is_a_fault(void) {
    static const cpa_stub_script refusing = {.health = JSON("503 Service Unavailable", "{\"error\": \"loading\"}")};
    static const cpa_stub_script locked = {.health = JSON("401 Unauthorized", "{\"error\": \"no key\"}")};
    static const cpa_stub_script nameless = {.health = HEALTHY, .models = JSON("200 OK", "[]")};
    const double before = cpa_clock_now();
    cpa_stub *stub = cpa_stub_start(&refusing);
    outcome o = run_against(stub, NULL, "--ready-timeout 0.3");
    CU_ASSERT_EQUAL(o.code, 3);
    CU_ASSERT_PTR_NOT_NULL(strstr(o.err, "/health: found HTTP 503: loading"));
    CU_ASSERT_PTR_NULL(o.result);
    cpa_stub_stop(stub);
    stub = cpa_stub_start(&locked);
    o = run_against(stub, NULL, "--ready-timeout 20");
    CU_ASSERT_EQUAL(o.code, 3);
    CU_ASSERT_PTR_NOT_NULL(strstr(o.err, "/health: found HTTP 401: no key"));
    cpa_stub_stop(stub);
    stub = cpa_stub_start(&nameless);
    o = run_against(stub, NULL, "");
    CU_ASSERT_EQUAL(o.code, 3);
    CU_ASSERT_PTR_NOT_NULL(strstr(o.err, "/v1/models: found no list of models"));
    char line[128];
    snprintf(line, sizeof line, "--url http://127.0.0.1:%d --ready-timeout 0.2", cpa_stub_port(stub));
    cpa_stub_stop(stub);
    o = run_line(NULL, line);
    CU_ASSERT_EQUAL(o.code, 3);
    CU_ASSERT_PTR_NOT_NULL(strstr(o.err, "connect"));
    CPA_ASSERT_ORDER(cpa_clock_now() - before, <, 10);
}

/* Ends the process, as a user would, once a request is under way. */
static void *stop_soon(void *ctx) {
    const struct timespec moment = {.tv_nsec = 1000000};
    while (cpa_stub_count(ctx) < 2) nanosleep(&moment, NULL);
    kill(getpid(), SIGTERM);
    return NULL;
}

static void a_run_that_is_stopped_tells_what_it_measured(void) {
    static const cpa_stub_answer answers[] = {{.bytes = GOOD}, {.bytes = HEAD CHUNK, .stays = 1}};
    static const cpa_stub_script script = {.health = HEALTHY, .models = MODELS, .answers = answers, .n_answers = 2};
    pthread_t thread;
    cpa_stub *stub = cpa_stub_start(&script);
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, stop_soon, stub), 0);
    outcome o = run_against(stub, NULL, "--requests 5 --input-len 3 --max-concurrency 1");
    pthread_join(thread, NULL);
    CU_ASSERT_EQUAL(o.code, 143);
    CU_ASSERT_EQUAL(number_of(&o, "completed"), 1);
    CU_ASSERT_EQUAL(number_of(&o, "failed"), 4);
    CU_ASSERT_STRING_EQUAL(json_string_value(member(o.result, "stopped_by")), "SIGTERM");
    CU_ASSERT_PTR_NOT_NULL(strstr(o.out, "1 of 5 completed"));
    json_decref(o.result);
    cpa_stub_stop(stub);
}

static void bad_usage_is_a_line(void) {
    static const struct {
        const char *line, *said;
    } cases[] = {
        {"", "found no --url"},
        {"--url localhost:8000", "found 'localhost:8000'"},
        {"--url ftp://localhost", "found 'ftp://localhost'"},
        {"--url http://me:secret@localhost", "found a user"},
        {"--url http://localhost --requests 0", "--requests: found '0'"},
        {"--url http://localhost --endpoint /v2", "--endpoint: found '/v2'"},
        {"--url http://localhost --length-scale 2", "found without --trace"},
        {"--url http://localhost --trace x --input-len 2", "found with --trace"},
        {"--url http://localhost --trace no-such-file", "no-such-file: found no readable file"},
        {"--url http://localhost --extra-body [1]", "found no JSON object"},
        {"--url http://localhost --extra-body {\"n\":2}", "--extra-body: found \"n\""},
        {"--url http://localhost --extra-body {\"prompt\":1}", "--extra-body: found \"prompt\""},
        {"--url http://localhost --goodput ttft:1 x:2", "--goodput: found 'ttft:1 x:2'"},
        {"--url http://localhost --percentiles 500", "--percentiles: found '500'"},
        {"--url http://localhost --prompts ids --endpoint /v1/chat/completions", "found ids with chat"},
        {"--url http://localhost --model \xff", "--model: found no UTF-8"},
        {"--url http://localhost --result-json none/x.json", "found 'none/x.json'"},
        {"--url http://localhost --nothing", "found '--nothing'"},
        {"--url", "found the end of the command line"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        outcome o = run_line(NULL, cases[i].line);
        CU_ASSERT_EQUAL(o.code, 2);
        CU_ASSERT_PTR_NOT_NULL(strstr(o.err, cases[i].said));
        if (!strstr(o.err, cases[i].said)) printf("case %zu: %s\n", i, o.err);
        CU_ASSERT_EQUAL(strncmp(o.err, "cp_attn: ", 9), 0);
        CU_ASSERT_EQUAL(strcspn(o.err, "\n") + 1, strlen(o.err));
        CU_ASSERT_PTR_NULL(strstr(o.err, "secret"));
        CU_ASSERT_STRING_EQUAL(o.out, "");
    }
    outcome o = run_line("two\nlines", "--url http://localhost");
    CU_ASSERT_EQUAL(o.code, 2);
    CU_ASSERT_PTR_NULL(strstr(o.err, "two"));
}

static const cpa_test tests[] = {
    {"answers are counted and timed", answers_are_counted_and_timed},
    {"a bad answer is a failed request", a_bad_answer_is_a_failed_request},
    {"a trace is sent as it says", a_trace_is_sent_as_it_says},
    {"each tenant has its figures", each_tenant_has_its_figures},
    {"chat is asked in words", chat_is_asked_in_words},
    {"no more are under way than were allowed", no_more_are_under_way_than_were_allowed},
    {"a server that is not there is a fault", a_server_that_is_not_there_is_a_fault},
    {"a run that is stopped tells what it measured", a_run_that_is_stopped_tells_what_it_measured},
    {"bad usage is a line", bad_usage_is_a_line},
};
CPA_TEST_MAIN("serve client", tests)
