/* What of a chat's request reaches its template, and what becomes of requests that it does not take. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

/* A server whose model has this template, with one thread for all connections. */
typedef struct fixture {
    cpa_chat_template *chat;
    cpa_fake_engine *engine;
    int port;
} fixture;

static fixture open_fixture(const char *source) {
    cpa_test_folder folder = cpa_test_folder_make();
    fixture f = {.chat = NULL};
    cpa_error err = {CPA_OK, ""};
    cpa_test_folder_write(&folder, "chat_template.jinja", source, strlen(source));
    CU_ASSERT_EQUAL(cpa_chat_template_open(folder.path, NULL, &f.chat, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f.chat);
    cpa_test_folder_remove(&folder);
    f.engine = cpa_fake_engine_start((cpa_server_options){.chat = f.chat, .threads = 1}, 1);
    f.port = cpa_fake_engine_port(f.engine);
    return f;
}

static void close_fixture(fixture *f) {
    cpa_fake_engine_stop(f->engine);
    cpa_chat_template_close(f->chat);
}

/* The text of a chat, by /tokenize: its tokens are bytes. The caller frees it; "" for what is refused. */
static char *text_of(const fixture *f, const char *body) {
    cpa_http_reply reply;
    cpa_http_request(f->port, "POST", "/tokenize", "", body, &reply);
    json_t *json = cpa_http_json(&reply);
    const json_t *tokens = cpa_json_at(json, "tokens");
    const size_t n = json_array_size(tokens);
    char *text = calloc(n + 1, 1);
    for (size_t i = 0; text && i < n; i++) text[i] = (char)json_integer_value(json_array_get(tokens, i));
    CU_ASSERT_EQUAL(reply.status, 200);
    if (reply.status != 200) fprintf(stderr, "%s\n", reply.body);
    json_decref(json);
    cpa_http_reply_free(&reply);
    return text;
}

static void check_text(const fixture *f, const char *body, const char *expected) {
    char *text = text_of(f, body);
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    CU_ASSERT_STRING_EQUAL(text, expected);
    free(text);
}

static void all_of_a_chat_reaches_the_template(void) {
    fixture f = open_fixture(
        "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}|{{ mood }}|"
        "{{ add_generation_prompt }}");
    check_text(&f, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
               "[{\"role\": \"user\", \"content\": \"a\"}]|null|null||True");
    check_text(&f,
               "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [], \"documents\": [], "
               "\"chat_template_kwargs\": {\"mood\": [1.5, null]}, \"add_generation_prompt\": false}",
               "[{\"role\": \"user\", \"content\": \"a\"}]|null|null|[1.5, None]|False");
    check_text(
        &f,
        "{\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"strict\": null, \"a\": 1}}], "
        "\"documents\": [{\"text\": \"d\"}], \"messages\": [{\"role\": \"user\", \"content\": \"\\u00e9\"}, "
        "{\"role\": \"assistant\", \"content\": null, \"reasoning_content\": \"r\", \"tool_calls\": [{\"id\": "
        "\"i\", \"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": \"{\\\"b\\\": [2]}\"}}]}, "
        "{\"role\": \"tool\", \"tool_call_id\": \"i\", \"content\": \"c\", \"name\": \"f\"}]}",
        "[{\"role\": \"user\", \"content\": \"\u00e9\"}, {\"thinking\": \"r\", \"role\": \"assistant\", "
        "\"reasoning_content\": \"r\", \"tool_calls\": [{\"id\": \"i\", \"type\": \"function\", \"function\": "
        "{\"name\": \"f\", \"arguments\": {\"b\": [2]}}}]}, {\"role\": \"tool\", \"tool_call_id\": \"i\", "
        "\"content\": \"c\", \"name\": \"f\"}]|[{\"type\": \"function\", \"function\": {\"name\": \"f\", "
        "\"strict\": null, \"a\": 1}}]|[{\"text\": \"d\"}]||True");
    close_fixture(&f);
}

/* Texts reach it whole that are none of C. */
static void a_nul_reaches_the_template(void) {
    fixture f = open_fixture(
        "{% for m in messages %}{{ m.content | length }}{{ m.content | replace('\\0', '0') }}{% endfor %}");
    check_text(&f, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\\u0000b\"}]}", "3a0b");
    close_fixture(&f);
}

/* Parts are joined for a template that writes texts, and left to one that goes through them. */
static void parts_are_given_as_the_template_takes_them(void) {
    static const char body[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": "
        "\"a\"}, {\"type\": \"text\", \"text\": \"b\"}]}]}";
    fixture f = open_fixture("{% for m in messages %}{{ m.content }}{% endfor %}.");
    check_text(&f, body, "a\nb.");
    close_fixture(&f);
    f = open_fixture("{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}.");
    check_text(&f, body, "[a][b].");
    close_fixture(&f);
}

static void the_last_message_is_continued(void) {
    fixture f = open_fixture(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}");
    check_text(&f,
               "{\"continue_final_message\": true, \"messages\": [{\"role\": \"user\", \"content\": \"a\"}, "
               "{\"role\": \"assistant\", \"content\": \"One, \"}]}",
               "<user>a</><assistant>One,");
    close_fixture(&f);
}

static void what_a_template_does_not_take_is_refused(void) {
    static const struct {
        const char *fields, *param, *message;
    } wrong[] = {
        {"\"messages\": [{\"role\": \"bad\", \"content\": \"x\"}]", "messages", "the chat template: no bad here"},
        {"\"messages\": [{\"role\": \"user\", \"content\": null}]", "messages[0].content", "found null"},
        {"\"messages\": [{\"role\": \"assistant\"}]", "messages[0].content", "found null"},
        {"\"messages\": [{\"role\": \"assistant\", \"tool_calls\": [{}]}]", "messages[0].tool_calls",
         "expected an array"},
        {"\"messages\": [{\"role\": \"assistant\", \"tool_calls\": {}}]", "messages[0].tool_calls",
         "expected an array"},
        {"\"messages\": [{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": \"f\"}}]}]",
         "messages[0].tool_calls", "expected an array"},
        {"\"messages\": [{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": "
         "\"{\"}}]}]",
         "messages", "the arguments of a tool call are expected to be the JSON of an object"},
        {"\"messages\": [{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": "
         "\"[1]\"}}]}]",
         "messages", "the arguments of a tool call are expected to be the JSON of an object"},
        {"\"tools\": {}", "tools", "expected an array of tools"},
        {"\"tools\": [7]", "tools", "tools[0]: expected"},
        {"\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\\u0000\"}}]", "tools",
         "tools[0]: expected"},
        {"\"tools\": [{\"type\": \"function\", \"function\": {\"name\": 7}}]", "tools", "tools[0]: expected"},
        {"\"documents\": \"d\"", "documents", "expected an array of objects"},
        {"\"documents\": [\"d\"]", "documents", "expected an array of objects alone"},
        {"\"chat_template_kwargs\": []", "chat_template_kwargs", "expected an object"},
        {"\"chat_template_kwargs\": {\"messages\": []}", "chat_template_kwargs", "found messages"},
        {"\"chat_template\": \"x\"", "chat_template", "the template is the server's"},
        {"\"continue_final_message\": true, \"add_generation_prompt\": true", "continue_final_message",
         "expected only"},
    };
    fixture f = open_fixture(
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad here') }}"
        "{% endif %}{{ m.content }}{% endfor %}");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char body[512];
        cpa_http_reply reply;
        snprintf(body, sizeof body, "{%s%s}", wrong[i].fields,
                 strstr(wrong[i].fields, "\"messages\": [{")
                     ? ""
                     : ", \"messages\": [{\"role\": \"user\", \"content\": \"x\"}]");
        cpa_http_request(f.port, "POST", "/v1/chat/completions", "", body, &reply);
        json_t *json = cpa_http_json(&reply);
        const int is_right = reply.status == 400 &&
                             strcmp(cpa_json_text_at(json, "error.param"), wrong[i].param) == 0 &&
                             strstr(cpa_json_text_at(json, "error.message"), wrong[i].message);
        CU_ASSERT(is_right);
        if (!is_right) fprintf(stderr, "%s: %d %s\n", body, reply.status, reply.body);
        json_decref(json);
        cpa_http_reply_free(&reply);
    }
    CU_ASSERT_EQUAL(f.engine->n, 0);
    close_fixture(&f);
}

static int log_lines, log_tells;

static void look_at_line(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx, (void)level;
    log_lines++;
    log_tells += strstr(line, "secret") != NULL;
}

/* A template may quote messages where it refuses them: to the client alone. */
static void what_a_template_says_is_not_logged(void) {
    fixture f = open_fixture("{{ raise_exception('not ' ~ messages[0].content) }}");
    cpa_http_reply reply;
    log_lines = log_tells = 0;
    cpa_log_set(look_at_line, NULL, CPA_LOG_WARN);
    cpa_http_request(f.port, "POST", "/tokenize", "", "{\"messages\": [{\"role\": \"user\", \"content\": \"secret\"}]}",
                     &reply);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(reply.status, 400);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "not secret"));
    CU_ASSERT_EQUAL(log_lines, 1);
    CU_ASSERT_EQUAL(log_tells, 0);
    cpa_http_reply_free(&reply);
    close_fixture(&f);
}

/* The one thread of all connections answers others while a template takes its time. */
static void a_slow_template_holds_up_chats_alone(void) {
    static const char slow[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"slow\"}]}";
    fixture f = open_fixture(
        "{% if messages[0].content == 'slow' %}{% for a in range(1000) %}{% for b in range(8000) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}");
    const int fd = cpa_http_connect(f.port);
    char reply_text[4096];
    cpa_http_ask(fd, "POST", "/tokenize", "", slow);
    usleep(20000); /* by then it is under way */
    for (int i = 0; i < 5; i++) {
        cpa_http_reply reply;
        cpa_http_request(f.port, "GET", "/health", "", NULL, &reply);
        CU_ASSERT_EQUAL(reply.status, 200);
        cpa_http_reply_free(&reply);
        cpa_http_request(f.port, "POST", "/detokenize", "", "{\"tokens\": [65]}", &reply);
        CU_ASSERT_EQUAL(reply.status, 200);
        cpa_http_reply_free(&reply);
    }
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    CU_ASSERT_EQUAL(poll(&poll_fd, 1, 0), 0);
    cpa_http_read_until(fd, "\"count\":4", reply_text, sizeof reply_text);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply_text, "\"count\":4"));
    close(fd);
    close_fixture(&f);
}

static const cpa_test tests[] = {
    {"all of a chat reaches the template", all_of_a_chat_reaches_the_template},
    {"a NUL reaches the template", a_nul_reaches_the_template},
    {"parts are given as the template takes them", parts_are_given_as_the_template_takes_them},
    {"the last message is continued", the_last_message_is_continued},
    {"what a template does not take is refused", what_a_template_does_not_take_is_refused},
    {"what a template says is not logged", what_a_template_says_is_not_logged},
    {"a slow template holds up chats alone", a_slow_template_holds_up_chats_alone},
};

CPA_TEST_MAIN("requests for chats", tests)
