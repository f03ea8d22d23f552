/* What comes back for requests of completions and chats, whole and as a stream. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

static const cpa_server_options plain = {.model_name = "tiny"};

static json_int_t int_at(const json_t *value, const char *path) {
    return json_integer_value(cpa_json_at(value, path));
}

static int is_json(const json_t *value, const char *text) {
    json_t *wanted = json_loads(text, JSON_DECODE_ANY, NULL);
    const int is_equal = value && json_equal(value, wanted);
    if (!is_equal) {
        char *found = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
        fprintf(stderr, "found %s, expected %s\n", found ? found : "nothing", text);
        free(found);
    }
    json_decref(wanted);
    return is_equal;
}

static void a_completion_has_text_and_usage(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    engine->script = "w\xc3\xb6rld";
    json_t *answer =
        cpa_fake_engine_answer(engine, "/v1/completions", "{\"model\": \"tiny\", \"prompt\": \"Hello\"}", 200);
    CU_ASSERT_EQUAL(strncmp(cpa_json_text_at(answer, "id"), "cmpl-", 5), 0);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "object"), "text_completion");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "model"), "tiny");
    CPA_ASSERT_ORDER(int_at(answer, "created"), >, 1000000);
    CU_ASSERT(is_json(cpa_json_at(answer, "choices"),
                      "[{\"index\": 0, \"text\": \"w\u00f6rld\", \"logprobs\": null, \"finish_reason\": \"stop\","
                      " \"stop_reason\": null}]"));
    CU_ASSERT(is_json(cpa_json_at(answer, "usage"),
                      "{\"prompt_tokens\": 5, \"completion_tokens\": 7, \"total_tokens\": 12}"));
    json_decref(answer);
    const cpa_fake_request *asked = &engine->requests[0];
    CU_ASSERT_EQUAL(asked->request.prompt_tokens, 5);
    CU_ASSERT_EQUAL(asked->request.output_tokens, 16);
    CU_ASSERT_EQUAL(asked->sampling.temperature, 1);
    answer = cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": \"Hello\", \"max_tokens\": 2}", 200);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.finish_reason"), "length");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.text"), "w\xef\xbf\xbd"); /* half a character */
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

static void sampling_goes_to_the_engine(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    json_decref(cpa_fake_engine_answer(
        engine, "/v1/completions",
        "{\"prompt\": [7, 8], \"n\": 2, \"temperature\": 0.5, \"top_p\": 0.25, \"top_k\": 3,"
        " \"min_p\": 0.125, \"presence_penalty\": -1, \"repetition_penalty\": 2, \"seed\": 41,"
        " \"frequency_penalty\": 1.5, \"store\": true, \"top_a\": 0,"
        " \"ignore_eos\": true, \"max_tokens\": 9.0, \"priority\": -3, \"cache_salt\": \"pepper\","
        " \"stop_token_ids\": [108, 9], \"user\": \"somebody\"}",
        200));
    for (int i = 0; i < 2; i++) {
        const cpa_fake_request *r = &engine->requests[i];
        CU_ASSERT_EQUAL(r->sampling.temperature, 0.5F);
        CU_ASSERT_EQUAL(r->sampling.top_p, 0.25F);
        CU_ASSERT_EQUAL(r->sampling.top_k, 3);
        CU_ASSERT_EQUAL(r->sampling.min_p, 0.125F);
        CU_ASSERT_EQUAL(r->sampling.presence_penalty, -1);
        CU_ASSERT_EQUAL(r->sampling.frequency_penalty, 1.5F);
        CU_ASSERT_EQUAL(r->sampling.repetition_penalty, 2);
        CU_ASSERT_EQUAL(r->sampling.seed, 41U + (unsigned)i);
        CU_ASSERT(r->sampling.ignore_eos);
        CU_ASSERT_EQUAL(r->request.output_tokens, 9);
        CU_ASSERT_EQUAL(r->request.priority, -3);
        CU_ASSERT_EQUAL(r->request.group, engine->requests[0].request.id);
        CU_ASSERT_STRING_EQUAL(r->salt, "pepper");
        CU_ASSERT_EQUAL(r->sampling.n_stop_ids, 2);
        CU_ASSERT_EQUAL(r->stop_ids[0], 108);
    }
    json_decref(
        cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": [7], \"top_p\": 0, \"top_k\": -1}", 200));
    CPA_ASSERT_ORDER(engine->requests[2].sampling.top_p, >, 0);
    CU_ASSERT_EQUAL(engine->requests[2].sampling.top_k, 0);
    CU_ASSERT_EQUAL(engine->requests[2].request.group, 0);
    cpa_fake_engine_stop(engine);
}

/* As the server does with all, and as vLLM's clients ask for it: but that puts nothing into a store by itself. */
static void transfers_go_to_the_engine(void) {
    static const struct {
        const char *fields;
        uint32_t transfer;
    } asked[] = {
        {"", 0},
        {", \"kv_transfer_params\": null", 0},
        {", \"kv_transfer_params\": {\"do_remote_decode\": true, \"remote_host\": null}", CPA_TRANSFER_EXPORT},
        {", \"kv_transfer_params\": {\"do_remote_prefill\": true, \"do_remote_decode\": false}", CPA_TRANSFER_IMPORT},
    };
    for (int by_default = 0; by_default < 2; by_default++) {
        const cpa_server_options options = {
            .model_name = "tiny", .has_block_store = 1, .transfer = by_default ? CPA_TRANSFER_EXPORT : 0};
        cpa_fake_engine *engine = cpa_fake_engine_start(options, 1);
        for (int i = 0, taken = 0; i < 4; i++) {
            char body[300];
            snprintf(body, sizeof body, "{\"prompt\": [7]%s}", asked[i].fields);
            const int is_refused = !by_default && asked[i].transfer == CPA_TRANSFER_EXPORT;
            json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions", body, is_refused ? 400 : 200);
            if (is_refused)
                CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "error.param"), "kv_transfer_params.do_remote_decode");
            else
                CU_ASSERT_EQUAL(engine->requests[taken++].request.transfer,
                                asked[i].transfer | (by_default ? CPA_TRANSFER_EXPORT : 0U));
            json_decref(answer);
        }
        cpa_fake_engine_stop(engine);
    }
}

static void a_stop_token_is_part_of_the_text_if_asked_for(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions",
                                            "{\"prompt\": [7], \"stop_token_ids\": [108], \"return_token_ids\": true}",
                                            200); /* Hel: l is 108 */
    CU_ASSERT(is_json(cpa_json_at(answer, "choices.0"),
                      "{\"index\": 0, \"text\": \"He\", \"logprobs\": null, \"finish_reason\": \"stop\","
                      " \"stop_reason\": 108, \"prompt_token_ids\": [7], \"token_ids\": [72, 101, 108]}"));
    CU_ASSERT_EQUAL(int_at(answer, "usage.completion_tokens"), 3);
    json_decref(answer);
    answer = cpa_fake_engine_answer(
        engine, "/v1/completions", "{\"prompt\": [7], \"stop_token_ids\": [108], \"include_stop_str_in_output\": true}",
        200);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.text"), "Hel");
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

static void prompts_and_samples_are_choices(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": [\"a\", \"bc\"], \"n\": 2}", 200);
    CU_ASSERT_EQUAL(json_array_size(cpa_json_at(answer, "choices")), 4);
    CU_ASSERT_EQUAL(int_at(answer, "choices.3.index"), 3);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.3.text"), "Hello");
    CU_ASSERT_EQUAL(int_at(answer, "usage.prompt_tokens"), 3);
    CU_ASSERT_EQUAL(int_at(answer, "usage.completion_tokens"), 24);
    json_decref(answer);
    CU_ASSERT_EQUAL(engine->requests[1].request.group, engine->requests[0].request.group);
    CU_ASSERT_EQUAL(engine->requests[3].request.group, engine->requests[2].request.group);
    CU_ASSERT_NOT_EQUAL(engine->requests[2].request.group, engine->requests[0].request.group);
    CU_ASSERT_EQUAL(engine->requests[2].request.prompt_tokens, 2);
    answer = cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": [[1, 2], [3]]}", 200);
    CU_ASSERT_EQUAL(json_array_size(cpa_json_at(answer, "choices")), 2);
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

static void log_probabilities_name_their_tokens(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    engine->script = "a\xc3\xa9";
    json_t *answer =
        cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": [7], \"logprobs\": 0, \"max_tokens\": 3}", 200);
    CU_ASSERT(is_json(cpa_json_at(answer, "choices.0.logprobs"),
                      "{\"tokens\": [\"a\", \"\ufffd\", \"\ufffd\"], \"token_logprobs\": [-0.5, -1.0, -1.5],"
                      " \"top_logprobs\": [{\"a\": -0.5}, {\"\ufffd\": -1.0}, {\"\ufffd\": -1.5}],"
                      " \"text_offset\": [0, 1, 2]}"));
    json_decref(answer);
    CU_ASSERT_EQUAL(engine->requests[0].sampling.top_logprobs, 0);
    answer =
        cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": [7], \"logprobs\": 1, \"max_tokens\": 2}", 200);
    CU_ASSERT(is_json(cpa_json_at(answer, "choices.0.logprobs.top_logprobs"),
                      "[{\"z\": -0.25, \"a\": -0.5}, {\"z\": -0.75, \"\ufffd\": -1.0}]"));
    json_decref(answer);
    answer = cpa_fake_engine_answer(engine, "/v1/completions", "{\"prompt\": [7], \"logprobs\": 20, \"max_tokens\": 2}",
                                    200);
    const json_t *top = cpa_json_at(answer, "choices.0.logprobs.top_logprobs.0");
    CU_ASSERT_EQUAL(json_object_size(top), 20);
    CU_ASSERT_EQUAL(json_real_value(json_object_get(top, "h")), -5);
    CU_ASSERT_EQUAL(engine->requests[2].sampling.top_logprobs, 20);
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

static void without_a_tokenizer_answers_are_ids(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    json_t *answer = cpa_fake_engine_answer(
        engine, "/v1/completions", "{\"prompt\": [7], \"max_tokens\": 3, \"logprobs\": 0, \"temperature\": 0}", 200);
    CU_ASSERT(is_json(cpa_json_at(answer, "choices.0.token_ids"), "[72, 101, 108]"));
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.text"), "");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.logprobs.tokens.1"), "token_id:101");
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

/* Texts that stop an answer end it where they begin, wherever they lie across tokens and events. */
static void texts_stop_an_answer(void) {
    static const struct {
        const char *script, *fields, *text, *reason, *stop;
    } cases[] = {
        {"one, two, three", "\"stop\": \", t\"", "one", "stop", ", t"},
        {"one, two, three", "\"stop\": [\"8\", \"7\", \"6\", \"5\", \"three\", \"two\"]", "one, ", "stop", "two"},
        {"one, two, three", "\"stop\": [\"two\"], \"include_stop_str_in_output\": true", "one, two", "stop", "two"},
        {"one, two, three", "\"stop\": [\"threes\", \"twos\"]", "one, two, three", "stop", NULL},
        {"aaaaab", "\"stop\": [\"aab\"]", "aaa", "stop", "aab"},
        {"\xc3\xa9t\xc3\xa9", "\"stop\": \"t\\u00e9\"", "\xc3\xa9", "stop", "t\xc3\xa9"},
        {"one, two", "\"stop\": \"two!\", \"max_tokens\": 8", "one, two", "length", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int stream = 0; stream < 2; stream++) {
            cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
            engine->script = cases[i].script;
            char body[300], text[300] = "", reason[20] = "", stop[20] = "";
            snprintf(body, sizeof body, "{\"prompt\": [7], \"max_tokens\": 100, \"stream\": %s, %s}",
                     stream ? "true" : "false", cases[i].fields);
            if (strstr(cases[i].fields, "max_tokens")) {
                snprintf(body, sizeof body, "{\"prompt\": [7], \"stream\": %s, %s}", stream ? "true" : "false",
                         cases[i].fields);
            }
            cpa_http_reply reply;
            cpa_fake_engine_post(engine, "/v1/completions", body, &reply);
            CU_ASSERT_EQUAL(reply.status, 200);
            char *rest = reply.body, *line;
            while ((line = strsep(&rest, "\n"))) {
                json_t *part = json_loads(strncmp(line, "data: ", 6) ? line : line + 6, 0, NULL);
                strcat(text, cpa_json_text_at(part, "choices.0.text"));
                strcat(reason, cpa_json_text_at(part, "choices.0.finish_reason"));
                strcat(stop, cpa_json_text_at(part, "choices.0.stop_reason"));
                json_decref(part);
            }
            CU_ASSERT_STRING_EQUAL(text, cases[i].text);
            CU_ASSERT_STRING_EQUAL(reason, cases[i].reason);
            CU_ASSERT_STRING_EQUAL(stop, cases[i].stop ? cases[i].stop : "");
            CPA_ASSERT_ORDER(engine->cancels, <=, (cases[i].stop ? 1 : 0));
            cpa_http_reply_free(&reply);
            cpa_fake_engine_stop(engine);
        }
    }
}

/* Reads one event of a stream, without "data: "; the caller frees it. */
static char *next_event(int fd) {
    static const size_t most = 4096;
    char *event = calloc(1, most), got[2];
    size_t n = 0;
    while (event && n + 1 < most && !strstr(event, "\n\n") && cpa_http_read_until(fd, "?!", got, 2) == 1) {
        event[n++] = got[0];
    }
    char *data = event ? strstr(event, "data: ") : NULL;
    if (data) memmove(event, data + 6, strlen(data + 6) + 1);
    return event;
}

static json_t *next_json(int fd) {
    char *event = next_event(fd);
    json_t *value = event ? json_loads(event, 0, NULL) : NULL;
    free(event);
    return value;
}

static void a_stream_comes_token_by_token(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    engine->script = "a\xc3\xa9z";
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(fd, "POST", "/v1/completions", "",
                 "{\"prompt\": [7, 7], \"stream\": true, \"stream_options\": {\"include_usage\": true}}");
    cpa_fake_engine_await(engine, 1);
    cpa_fake_engine_step(engine, 1);
    json_t *event = next_json(fd); /* and with it the headers */
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(event, "object"), "text_completion");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(event, "choices.0.text"), "a");
    CU_ASSERT(json_is_null(cpa_json_at(event, "choices.0.finish_reason")));
    CU_ASSERT(json_is_null(cpa_json_at(event, "usage")));
    json_decref(event);
    cpa_server_on_token(engine->server, engine->requests[0].request.id, 0, 'b', 0); /* has come already */
    cpa_fake_engine_step(engine, 1);                                                /* half a character: says nothing */
    cpa_fake_engine_step(engine, 1);
    event = next_json(fd);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(event, "choices.0.text"), "\xc3\xa9");
    json_decref(event);
    cpa_fake_engine_step(engine, 1);
    event = next_json(fd);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(event, "choices.0.text"), "z");
    json_decref(event);
    cpa_fake_engine_step(engine, 1);
    event = next_json(fd);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(event, "choices.0.finish_reason"), "stop");
    json_decref(event);
    event = next_json(fd);
    CU_ASSERT_EQUAL(json_array_size(cpa_json_at(event, "choices")), 0);
    CU_ASSERT(
        is_json(cpa_json_at(event, "usage"), "{\"prompt_tokens\": 2, \"completion_tokens\": 5, \"total_tokens\": 7}"));
    json_decref(event);
    char *last = next_event(fd);
    CU_ASSERT_STRING_EQUAL(last, "[DONE]\n\n");
    free(last);
    /* The connection goes on. */
    cpa_http_ask(fd, "GET", "/live", "", NULL);
    char head[200];
    cpa_http_read_until(fd, "200 OK", head, sizeof head);
    CU_ASSERT_PTR_NOT_NULL(strstr(head, "200 OK"));
    close(fd);
    cpa_fake_engine_stop(engine);
}

static void samples_of_a_stream_come_by_index(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    cpa_http_reply reply;
    cpa_fake_engine_post(engine, "/v1/completions",
                         "{\"prompt\": [7], \"n\": 3, \"max_tokens\": 5, \"stream\": true, \"return_token_ids\": true}",
                         &reply);
    int tokens[3] = {0}, prompts[3] = {0}, ends[3] = {0}, done = 0;
    char *rest = reply.body, *line;
    while ((line = strsep(&rest, "\n"))) {
        if (!*line) continue;
        done += strcmp(line, "data: [DONE]") == 0;
        json_t *event = json_loads(line + 6, 0, NULL);
        if (!event) continue;
        const json_int_t i = int_at(event, "choices.0.index");
        tokens[i] += (int)json_array_size(cpa_json_at(event, "choices.0.token_ids"));
        prompts[i] += cpa_json_at(event, "choices.0.prompt_token_ids") != NULL;
        ends[i] += *cpa_json_text_at(event, "choices.0.finish_reason") != 0;
        json_decref(event);
    }
    for (int i = 0; i < 3; i++) CU_ASSERT(tokens[i] == 5 && prompts[i] == 1 && ends[i] == 1);
    CU_ASSERT_EQUAL(done, 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.head, "Content-Type: text/event-stream"));
    cpa_http_reply_free(&reply);
    cpa_fake_engine_stop(engine);
}

/* Each event has those of its tokens. */
static void log_probabilities_come_with_a_stream(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(fd, "POST", "/v1/completions", "",
                 "{\"prompt\": [7, 7], \"stream\": true, \"logprobs\": 2, \"max_tokens\": 3}");
    cpa_fake_engine_await(engine, 1);
    static const char *const expected[] = {
        "{\"tokens\": [\"H\"], \"token_logprobs\": [-0.5], \"top_logprobs\": [{\"z\": -0.25, \"H\": -0.5}],"
        " \"text_offset\": [0]}",
        "{\"tokens\": [\"e\"], \"token_logprobs\": [-1.0], \"top_logprobs\": [{\"z\": -0.75, \"e\": -1.0}],"
        " \"text_offset\": [1]}",
        "{\"tokens\": [\"l\"], \"token_logprobs\": [-1.5], \"top_logprobs\": [{\"z\": -1.25, \"l\": -1.5}],"
        " \"text_offset\": [2]}"};
    for (int i = 0; i < 3; i++) {
        cpa_fake_engine_step(engine, 1);
        json_t *event = next_json(fd);
        CU_ASSERT(is_json(cpa_json_at(event, "choices.0.logprobs"), expected[i]));
        json_decref(event);
    }
    close(fd);
    cpa_fake_engine_stop(engine);
}

static void a_chat_is_written_out_and_answered(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    static const char messages[] =
        "\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": "
        "\"a\"}, {\"type\": \"text\", \"text\": \"b\"}]}]";
    static const char prompt[] = "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n";
    char body[400];
    snprintf(body, sizeof body, "{%s, \"logprobs\": true, \"temperature\": 0, \"return_token_ids\": true}", messages);
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/chat/completions", body, 200);
    CU_ASSERT_EQUAL(strncmp(cpa_json_text_at(answer, "id"), "chatcmpl-", 9), 0);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "object"), "chat.completion");
    CU_ASSERT(is_json(cpa_json_at(answer, "choices.0.message"), "{\"role\": \"assistant\", \"content\": \"Hello\"}"));
    CU_ASSERT(is_json(cpa_json_at(answer, "choices.0.logprobs.content.1"),
                      "{\"token\": \"e\", \"logprob\": -1.0, \"bytes\": [101], \"top_logprobs\": []}"));
    snprintf(body, sizeof body, "{%s, \"logprobs\": true, \"top_logprobs\": 3, \"max_tokens\": 2}", messages);
    json_t *ranked = cpa_fake_engine_answer(engine, "/v1/chat/completions", body, 200);
    CU_ASSERT(is_json(cpa_json_at(ranked, "choices.0.logprobs.content.1"),
                      "{\"token\": \"e\", \"logprob\": -1.0, \"bytes\": [101], \"top_logprobs\": ["
                      "{\"token\": \"z\", \"logprob\": -0.75, \"bytes\": [122]},"
                      "{\"token\": \"e\", \"logprob\": -1.0, \"bytes\": [101]},"
                      "{\"token\": \"y\", \"logprob\": -1.25, \"bytes\": [121]}]}"));
    json_decref(ranked);
    const json_t *ids = cpa_json_at(answer, "prompt_token_ids");
    char text[100] = "";
    for (size_t i = 0; i < json_array_size(ids) && i < 99; i++) {
        const json_int_t id = json_integer_value(json_array_get(ids, i));
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s",
                 id == CPA_FAKE_END ? "<|im_end|>" : (const char[]){(char)id, 0});
    }
    CU_ASSERT_STRING_EQUAL(text, prompt);
    CU_ASSERT_EQUAL(engine->requests[0].request.output_tokens, CPA_FAKE_LENGTH - (int64_t)json_array_size(ids));
    json_decref(answer);
    snprintf(body, sizeof body, "{%s, \"max_completion_tokens\": 2, \"stream\": true}", messages);
    cpa_http_reply reply;
    cpa_fake_engine_post(engine, "/v1/chat/completions", body, &reply);
    const char *first = strstr(reply.body, "\"delta\":{\"role\":\"assistant\",\"content\":\"H");
    CU_ASSERT_PTR_NOT_NULL(first);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "\"object\":\"chat.completion.chunk\""));
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "\"finish_reason\":\"length\""));
    CU_ASSERT_PTR_NULL(first ? strstr(first + 20, "role") : "");
    cpa_http_reply_free(&reply);
    cpa_fake_engine_stop(engine);
}

static const cpa_test tests[] = {
    {"a completion has text and usage", a_completion_has_text_and_usage},
    {"sampling goes to the engine", sampling_goes_to_the_engine},
    {"transfers go to the engine", transfers_go_to_the_engine},
    {"a stop token is part of the text if asked for", a_stop_token_is_part_of_the_text_if_asked_for},
    {"prompts and samples are choices", prompts_and_samples_are_choices},
    {"log-probabilities name their tokens", log_probabilities_name_their_tokens},
    {"without a tokenizer answers are ids", without_a_tokenizer_answers_are_ids},
    {"texts stop an answer", texts_stop_an_answer},
    {"a stream comes token by token", a_stream_comes_token_by_token},
    {"log-probabilities come with a stream", log_probabilities_come_with_a_stream},
    {"samples of a stream come by index", samples_of_a_stream_come_by_index},
    {"a chat is written out and answered", a_chat_is_written_out_and_answered},
};

CPA_TEST_MAIN("answers", tests)
