/* Answers that are bound to schemas, expressions and choices: what comes is what was asked for, or the request is refused
 * with the reason. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "src/grammar/dfa.h"
#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

static const cpa_server_options plain = {.model_name = "tiny"};

static json_t *ask(cpa_fake_engine *engine, const char *path, const char *fields, int status) {
    char body[3000];
    const char *prompt = strstr(path, "chat") ? "\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]"
                                              : "\"prompt\": \"Hi\", \"max_tokens\": 1000";
    snprintf(body, sizeof body, "{%s, %s}", prompt, fields);
    return cpa_fake_engine_answer(engine, path, body, status);
}

/* {"age": 0 to 150, "name": up to 5 characters}, in this order. */
static int is_person(const char *text) {
    json_t *value = json_loads(text, 0, NULL);
    const json_t *age = json_object_get(value, "age"), *name = json_object_get(value, "name");
    const int is_valid = json_object_size(value) == 2 && json_is_integer(age) && json_integer_value(age) >= 0 &&
                         json_integer_value(age) <= 150 && json_is_string(name);
    if (!is_valid) printf("\n    %s ", text);
    json_decref(value);
    return is_valid;
}

#define PERSON                                                                                                         \
    "{\"type\": \"object\", \"properties\": {\"age\": {\"type\": \"integer\", \"minimum\": 0, \"maximum\": 150}, "     \
    "\"name\": {\"type\": \"string\", \"maxLength\": 5}}, \"required\": [\"age\", \"name\"], "                         \
    "\"additionalProperties\": false}"

static void every_choice_of_a_schema_is_valid(void) {
    static const char *const fields[] = {
        "\"n\": 4, \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"p\", \"strict\": "
        "true, "
        "\"schema\": " PERSON "}}",
        "\"n\": 4, \"guided_json\": " PERSON,
        "\"n\": 4, \"structured_outputs\": {\"json\": " PERSON "}",
    };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        for (int is_chat = 0; is_chat < 2; is_chat++) {
            json_t *answer = ask(engine, is_chat ? "/v1/chat/completions" : "/v1/completions", fields[i], 200);
            CU_ASSERT_EQUAL(json_array_size(cpa_json_at(answer, "choices")), 4);
            for (int c = 0; c < 4; c++) {
                char path[40];
                snprintf(path, sizeof path, "choices.%d.%s", c, is_chat ? "message.content" : "text");
                CU_ASSERT(is_person(cpa_json_text_at(answer, path)));
                snprintf(path, sizeof path, "choices.%d.finish_reason", c);
                CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, path), "stop");
            }
            json_decref(answer);
        }
    }
    cpa_fake_engine_stop(engine);
}

static int takes(const char *expression, const char *text) {
    cpa_dfa dfa = {0};
    cpa_effort effort = {CPA_EFFORT_MOST};
    CU_ASSERT_EQUAL(cpa_dfa_of_regex(expression, strlen(expression), 1, &effort, &dfa, NULL), CPA_OK);
    const int is_taken = cpa_dfa_takes(&dfa, text, strlen(text));
    if (!is_taken) printf("\n    %s on %s ", expression, text);
    cpa_dfa_release(&dfa);
    return is_taken;
}

static void other_fields_bind_an_answer_too(void) {
    static const struct {
        const char *fields, *expression;
    } cases[] = {
        {"\"guided_regex\": \"[a-c]{2}(?:\\\\d|\xc3\xa9){3}\"", "[a-c]{2}(?:\\d|\xc3\xa9){3}"},
        {"\"structured_outputs\": {\"regex\": \"x|y\", \"json\": null, \"disable_fallback\": true}", "x|y"},
        {"\"guided_choice\": [\"yes\", \"no\", \"n\\u00f6\"]", "yes|no|n\xc3\xb6"},
        {"\"structured_outputs\": {\"choice\": [\"yes\"]}", "yes"},
        {"\"guided_json\": \"{\\\"enum\\\": [1, [\\\"a\\\"]]}\"", "1|\\[\"a\"\\]"},
        {"\"response_format\": {\"type\": \"text\"}, \"guided_json\": null, \"guided_regex\": \"\", "
         "\"guided_choice\": []",
         "Hello"},
    };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *answer = ask(engine, "/v1/completions", cases[i].fields, 200);
        CU_ASSERT(takes(cases[i].expression, cpa_json_text_at(answer, "choices.0.text")));
        json_decref(answer);
    }
    static const char *const objects[] = {"\"response_format\": {\"type\": \"json_object\"}",
                                          "\"structured_outputs\": {\"json_object\": true}"};
    for (int i = 0; i < 2; i++) {
        json_t *answer = ask(engine, "/v1/completions", objects[i], 200);
        const char *text = cpa_json_text_at(answer, "choices.0.text");
        json_t *value = json_loads(text, 0, NULL);
        const int is_cut = strcmp(cpa_json_text_at(answer, "choices.0.finish_reason"), "length") == 0;
        CU_ASSERT(text[0] == '{' && (is_cut || json_is_object(value)));
        json_decref(value);
        json_decref(answer);
    }
    cpa_fake_engine_stop(engine);
}

static void what_cannot_bind_is_refused_with_the_reason(void) {
    static const struct {
        const char *fields, *param, *reason;
    } cases[] = {
        {"\"guided_json\": {\"not\": {}}", "guided_json",
         "guided_json: json_schema: #: the keyword not is not supported"},
        {"\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": {\"properties\": {\"a\": "
         "{\"if\": {}}}}}}",
         "response_format", "response_format: json_schema: #/properties/a: the keyword if"},
        {"\"response_format\": {\"type\": \"json_schema\"}", "response_format.json_schema.schema",
         "expected a JSON schema"},
        {"\"response_format\": {\"type\": \"structural_tag\"}", "response_format.type",
         "expected text, json_object or"},
        {"\"guided_regex\": \"a(\"", "guided_regex", "guided_regex: regex: at byte 2"},
        {"\"guided_regex\": 5", "guided_regex", "found 5, expected a regular expression"},
        {"\"guided_json\": \"{\"", "guided_json", "expected a JSON schema, or the text of one"},
        {"\"guided_choice\": [1]", "guided_choice", "expected strings alone"},
        {"\"guided_choice\": [\"a\\u0000\"]", "guided_choice", "found the character U+0000"},
        {"\"guided_json\": {\"enum\": [[\"a\\u0000\"]]}", "guided_json", "found the character U+0000"},
        {"\"guided_choice\": \"a\"", "guided_choice", "expected an array of strings"},
        {"\"guided_grammar\": \"root ::= x\"", "guided_grammar", "there is guided_json"},
        {"\"structured_outputs\": {\"structural_tag\": \"{}\"}", "structured_outputs.structural_tag",
         "there is json, regex"},
        {"\"structured_outputs\": {\"regx\": \"a\"}", "structured_outputs.regex", "of nearly the name of"},
        {"\"structured_outputs\": {\"regex\": \"a\", \"choise\": [\"b\"]}", "structured_outputs.choice",
         "of nearly the name of"},
        {"\"response_format\": {\"kind\": \"json_object\"}", "response_format.type",
         "expected text, json_object or json_schema"},
        {"\"response_format\": {\"typ\": \"json_object\"}", "response_format.type", "of nearly the name of"},
        {"\"response_format\": {\"type\": \"json_object\", \"json_shema\": {\"schema\": {}}}",
         "response_format.json_schema", "of nearly the name of"},
        {"\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": {}, \"strickt\": true}}",
         "response_format.json_schema.strict", "of nearly the name of"},
        {"\"structured_outputs\": {\"json\": 5}", "structured_outputs.json", "expected a JSON schema"},
        {"\"guided_regex\": \"a\", \"guided_choice\": [\"b\"]", "guided_choice", "found beside guided_regex"},
        {"\"guided_regex\": \"a\", \"ignore_eos\": true", "ignore_eos", "expected only without guided_regex"},
        {"\"guided_regex\": \"((a{0,100}){0,100}){0,19}\"", "guided_regex", "too much work"},
    };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1), *without = cpa_fake_engine_start(plain, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *answer = ask(engine, "/v1/completions", cases[i].fields, 400);
        CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "error.param"), cases[i].param);
        const char *message = cpa_json_text_at(answer, "error.message");
        if (!strstr(message, cases[i].reason)) printf("\n    %s: %s ", cases[i].fields, message);
        CU_ASSERT_PTR_NOT_NULL(strstr(message, cases[i].reason));
        json_decref(answer);
    }
    CU_ASSERT_EQUAL(engine->n, 0);
    cpa_http_reply reply;
    cpa_fake_engine_post(without, "/v1/completions", "{\"prompt\": [1], \"guided_regex\": \"a\"}", &reply);
    CU_ASSERT_EQUAL(reply.status, 400);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "this model has none"));
    cpa_http_reply_free(&reply);
    cpa_fake_engine_stop(engine);
    cpa_fake_engine_stop(without);
}

/* An engine may have constraints longer than there is a server; one that refuses a request leaves it to the server. */
static void constraints_are_closed_by_whom_they_belong_to(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    engine->refusal = CPA_BUSY;
    json_decref(ask(engine, "/v1/completions", "\"guided_regex\": \"a\"", 429));
    engine->refusal = CPA_OK;
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(fd, "POST", "/v1/completions", "", "{\"prompt\": \"Hi\", \"n\": 3, \"guided_json\": " PERSON "}");
    cpa_fake_engine_await(engine, 3);
    cpa_server_stop(engine->server, 0);
    engine->server = NULL;
    for (int i = 0; i < 3; i++) {
        const cpa_request *request = &engine->requests[i].request;
        uint32_t words[CPA_FAKE_VOCABULARY / 32 + 1] = {0};
        CU_ASSERT_EQUAL(request->constraint->mask(request->constraint_ctx, words, NULL), CPA_OK);
        CU_ASSERT_EQUAL(words['{' / 32], 1u << '{' % 32);
        CU_ASSERT(request->constraint->key(request->constraint_ctx) != 0);
    }
    cpa_fake_engine_stop(engine);
}

/* The one thread that has the connections answers a probe while a grammar is made. */
static void a_grammar_that_takes_long_holds_up_nobody(void) {
    cpa_server_options options = plain;
    options.threads = 1;
    cpa_fake_engine *engine = cpa_fake_engine_start(options, 1);
    const int port = cpa_fake_engine_port(engine), fd = cpa_http_connect(port);
    cpa_http_reply reply;
    char answer[2000];
    cpa_http_ask(fd, "POST", "/v1/completions", "",
                 "{\"prompt\": \"Hi\", \"guided_regex\": \"((a{0,100}){0,100}){0,19}\"}");
    cpa_http_request(port, "GET", "/health", "", NULL, &reply);
    CU_ASSERT_EQUAL(reply.status, 200);
    cpa_http_reply_free(&reply);
    CPA_ASSERT_ORDER(recv(fd, answer, 1, MSG_PEEK | MSG_DONTWAIT), <, 0);
    cpa_http_read_until(fd, "too much work", answer, sizeof answer);
    CU_ASSERT_PTR_NOT_NULL(strstr(answer, "too much work"));
    close(fd);
    cpa_fake_engine_stop(engine);
}

static const cpa_test tests[] = {
    {"every choice of a schema is valid", every_choice_of_a_schema_is_valid},
    {"other fields bind an answer too", other_fields_bind_an_answer_too},
    {"what cannot bind is refused with the reason", what_cannot_bind_is_refused_with_the_reason},
    {"a grammar that takes long holds up nobody", a_grammar_that_takes_long_holds_up_nobody},
    {"constraints are closed by whom they belong to", constraints_are_closed_by_whom_they_belong_to},
};
CPA_TEST_MAIN("bound answers", tests)
