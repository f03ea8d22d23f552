/* Calls of tools and thoughts in the answers of chats, whole and as a stream; and answers that must call one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

#define TOOLS                                                                                                          \
    "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"add\", \"parameters\": {\"type\": \"object\", "   \
    "\"properties\": {\"a\": {\"type\": \"integer\", \"minimum\": 0, \"maximum\": 9}}, \"required\": [\"a\"], "        \
    "\"additionalProperties\": false}}}, {\"type\": \"function\", \"function\": {\"name\": \"stop\"}}]"

typedef struct fixture {
    cpa_chat_template *chat;
    cpa_fake_engine *engine;
} fixture;

static fixture open_fixture(cpa_tool_form tools, cpa_thought_form thoughts) {
    static const char source[] = "{{ messages[0].content }}{% if think %}<think>\n{% endif %}";
    cpa_test_folder folder = cpa_test_folder_make();
    fixture f = {.chat = NULL};
    cpa_error err;
    cpa_test_folder_write(&folder, "chat_template.jinja", source, sizeof source - 1);
    CU_ASSERT_EQUAL_FATAL(cpa_chat_template_open(folder.path, NULL, &f.chat, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(cpa_chat_template_source(f.chat), source);
    cpa_test_folder_remove(&folder);
    const cpa_server_options options = {.chat = f.chat, .tool_form = tools, .thought_form = thoughts};
    f.engine = cpa_fake_engine_start(options, 1);
    return f;
}

static void close_fixture(fixture *f) {
    cpa_fake_engine_stop(f->engine);
    cpa_chat_template_close(f->chat);
}

/* The answer to a chat with these fields; the caller calls json_decref. */
static json_t *ask(const fixture *f, const char *fields, int status) {
    char body[3000];
    snprintf(body, sizeof body, "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], %s}", fields);
    return cpa_fake_engine_answer(f->engine, "/v1/chat/completions", body, status);
}

static const char two_calls[] =
    "<think>so</think>\n\nOne moment.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n"
    "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";

static void calls_and_thoughts_are_parts_of_a_message(void) {
    fixture f = open_fixture(CPA_TOOLS_HERMES, CPA_THOUGHTS_THINK);
    f.engine->script = two_calls;
    json_t *answer = ask(&f, TOOLS, 200);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.finish_reason"), "tool_calls");
    const json_t *message = cpa_json_at(answer, "choices.0.message");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(message, "content"), "One moment.");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(message, "reasoning_content"), "so");
    CU_ASSERT_EQUAL(json_array_size(cpa_json_at(message, "tool_calls")), 2);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(message, "tool_calls.0.function.name"), "add");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(message, "tool_calls.0.function.arguments"), "{\"a\": 1}");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(message, "tool_calls.0.type"), "function");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(message, "tool_calls.1.function.name"), "stop");
    CU_ASSERT_STRING_NOT_EQUAL(cpa_json_text_at(message, "tool_calls.0.id"),
                               cpa_json_text_at(message, "tool_calls.1.id"));
    json_decref(answer);
    answer = ask(&f, TOOLS ", \"parallel_tool_calls\": false", 200);
    CU_ASSERT_EQUAL(json_array_size(cpa_json_at(answer, "choices.0.message.tool_calls")), 1);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.finish_reason"), "tool_calls");
    json_decref(answer);
    static const char *const without[] = {TOOLS ", \"tool_choice\": \"none\"", "\"tools\": []"};
    for (int i = 0; i < 2; i++) {
        answer = ask(&f, without[i], 200);
        CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.finish_reason"), "stop");
        CU_ASSERT_PTR_NULL(cpa_json_at(answer, "choices.0.message.tool_calls"));
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_json_text_at(answer, "choices.0.message.content"), "<tool_call>"));
        json_decref(answer);
    }
    answer = ask(&f, TOOLS ", \"max_tokens\": 79", 200); /* in the first call's arguments */
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.finish_reason"), "length");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.message.tool_calls.0.function.arguments"), "{\"a\": 1");
    json_decref(answer);
    f.engine->script = "just so</think>Yes";
    answer = ask(&f, "\"chat_template_kwargs\": {\"think\": true}", 200); /* the prompt ends with <think> */
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.message.reasoning_content"), "just so");
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.message.content"), "Yes");
    json_decref(answer);
    close_fixture(&f);
}

/* All deltas of a stream together: content, thoughts, and calls as "INDEX:NAME ARGUMENTS;". Each call begins with its id and
 * name, which come once. */
typedef struct streamed {
    char content[300], thoughts[100], calls[300], reason[20];
    int pieces; /* of arguments */
} streamed;

static void add_delta(const json_t *event, streamed *out) {
    const json_t *delta = cpa_json_at(event, "choices.0.delta"), *calls = cpa_json_at(delta, "tool_calls");
    strcat(out->content, cpa_json_text_at(delta, "content"));
    strcat(out->thoughts, cpa_json_text_at(delta, "reasoning_content"));
    strcat(out->reason, cpa_json_text_at(event, "choices.0.finish_reason"));
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i);
        const char *name = cpa_json_text_at(call, "function.name");
        CU_ASSERT_EQUAL(*name != 0, *cpa_json_text_at(call, "id") != 0);
        char begin[60] = "";
        if (*name)
            snprintf(begin, sizeof begin, ";%d:%s", (int)json_integer_value(json_object_get(call, "index")), name);
        strcat(out->calls, begin);
        strcat(out->calls, cpa_json_text_at(call, "function.arguments"));
        out->pieces += *cpa_json_text_at(call, "function.arguments") != 0;
    }
}

static void calls_are_streamed_as_they_come(void) {
    fixture f = open_fixture(CPA_TOOLS_HERMES, CPA_THOUGHTS_THINK);
    f.engine->script = two_calls;
    static char reply[1 << 17];
    const int fd = cpa_http_connect(cpa_fake_engine_port(f.engine));
    cpa_http_ask(fd, "POST", "/v1/chat/completions", "",
                 "{\"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], " TOOLS "}");
    cpa_fake_engine_await(f.engine, 1);
    for (size_t i = 0; i <= strlen(two_calls); i++) {
        cpa_fake_engine_step(f.engine, 1);
        usleep(1000);
    }
    cpa_http_read_until(fd, "[DONE]", reply, sizeof reply);
    streamed all = {.pieces = 0};
    for (const char *at = reply; (at = strstr(at, "data: {")); at++) {
        json_t *event = json_loads(at + 6, JSON_DISABLE_EOF_CHECK, NULL);
        add_delta(event, &all);
        json_decref(event);
    }
    CU_ASSERT_STRING_EQUAL(all.content, "One moment.");
    CU_ASSERT_STRING_EQUAL(all.thoughts, "so");
    CU_ASSERT_STRING_EQUAL(all.calls, ";0:add{\"a\": 1};1:stop{}");
    CU_ASSERT_STRING_EQUAL(all.reason, "tool_calls");
    CPA_ASSERT_ORDER(all.pieces, >=, 4);
    close(fd);
    close_fixture(&f);
}

static void check_call(const json_t *call, const char *name) {
    json_error_t error;
    const char *found = cpa_json_text_at(call, "function.name"), *text = cpa_json_text_at(call, "function.arguments");
    if (name) CU_ASSERT_STRING_EQUAL(found, name);
    json_t *arguments = json_loads(text, 0, &error);
    CU_ASSERT_PTR_NOT_NULL_FATAL(arguments);
    if (strcmp(found, "add") == 0) {
        CU_ASSERT_EQUAL(json_object_size(arguments), 1);
        CU_ASSERT(json_is_integer(json_object_get(arguments, "a")));
    } else {
        CU_ASSERT_STRING_EQUAL(found, "stop");
        CU_ASSERT_EQUAL(json_object_size(arguments), 0);
    }
    json_decref(arguments);
}

/* In every form, whatever the model would say. */
static void an_answer_that_must_call_a_tool_does(void) {
    for (int form = CPA_TOOLS_HERMES; form <= CPA_TOOLS_DEEPSEEK_V31; form++) {
        fixture f = open_fixture((cpa_tool_form)form, CPA_THOUGHTS_NONE);
        for (int i = 0; i < 6; i++) {
            char fields[2000];
            snprintf(fields, sizeof fields, TOOLS ", \"seed\": %d, \"max_tokens\": 3000, \"tool_choice\": %s", i,
                     i % 2 ? "\"required\"" : "{\"type\": \"function\", \"function\": {\"name\": \"add\"}}");
            json_t *answer = ask(&f, fields, 200);
            const json_t *calls = cpa_json_at(answer, "choices.0.message.tool_calls");
            CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.finish_reason"), "tool_calls");
            CU_ASSERT(json_is_null(cpa_json_at(answer, "choices.0.message.content")));
            CU_ASSERT(json_array_size(calls) >= 1 && (i % 2 || json_array_size(calls) == 1));
            for (size_t n = 0; n < json_array_size(calls); n++)
                check_call(json_array_get(calls, n), i % 2 ? NULL : "add");
            json_decref(answer);
        }
        close_fixture(&f);
    }
}

static void what_is_bound_comes_behind_thoughts(void) {
    fixture f = open_fixture(CPA_TOOLS_HERMES, CPA_THOUGHTS_THINK);
    static const char *const fields[] = {
        TOOLS ", \"tool_choice\": \"required\", \"max_tokens\": 3000, \"chat_template_kwargs\": {\"think\": true}",
        "\"guided_choice\": [\"yes\"], \"max_tokens\": 3000, \"chat_template_kwargs\": {\"think\": true}",
    };
    for (int i = 0; i < 2; i++) {
        json_t *answer = ask(&f, fields[i], 200);
        if (i == 0) CPA_ASSERT_ORDER(json_array_size(cpa_json_at(answer, "choices.0.message.tool_calls")), >=, 1);
        if (i == 1) CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "choices.0.message.content"), "yes");
        json_decref(answer);
    }
    close_fixture(&f);
}

static void choices_that_cannot_be_are_refused(void) {
    static const char *const fields[] = {
        TOOLS ", \"tool_choice\": \"always\"",
        TOOLS ", \"tool_choice\": \"none\\u0000\"",
        TOOLS ", \"tool_choice\": 5",
        TOOLS ", \"tool_choice\": {\"type\": \"function\"}",
        TOOLS ", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"other\"}}",
        "\"tool_choice\": \"required\"",
        TOOLS ", \"tool_choice\": \"required\", \"response_format\": {\"type\": \"json_object\"}",
    };
    fixture f = open_fixture(CPA_TOOLS_HERMES, CPA_THOUGHTS_NONE),
            none = open_fixture(CPA_TOOLS_NONE, CPA_THOUGHTS_NONE);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        json_t *answer = ask(&f, fields[i], 400);
        CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "error.param"), "tool_choice");
        json_decref(answer);
    }
    json_t *answer = ask(&none, TOOLS ", \"tool_choice\": \"required\"", 400);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_json_text_at(answer, "error.message"), "--tool-call-parser"));
    json_decref(answer);
    answer = ask(&f, TOOLS ", \"parallel_tool_calls\": 1", 400);
    CU_ASSERT_STRING_EQUAL(cpa_json_text_at(answer, "error.param"), "parallel_tool_calls");
    json_decref(answer);
    close_fixture(&f);
    close_fixture(&none);
}

static const cpa_test tests[] = {
    {"calls and thoughts are parts of a message", calls_and_thoughts_are_parts_of_a_message},
    {"calls are streamed as they come", calls_are_streamed_as_they_come},
    {"an answer that must call a tool does", an_answer_that_must_call_a_tool_does},
    {"what is bound comes behind thoughts", what_is_bound_comes_behind_thoughts},
    {"choices that cannot be are refused", choices_that_cannot_be_are_refused},
};

CPA_TEST_MAIN("tools", tests)
