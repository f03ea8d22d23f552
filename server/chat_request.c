#include "server/chat_request.h"

#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/generation_fields.h"

enum { MOST_MESSAGES = 4096 };

static int refuse_what_is_not_there(const cpa_fields *fields) {
    static const struct {
        const char *name, *reason;
    } absent[] = {
        {"functions", "answers are text alone"},
        {"audio", "answers are text alone"},
        {"prediction", "tokens are drawn one by one"},
        {"chat_template", "the template is the server's"},
        {"chat_template_kwargs", "the template is the server's"},
        {"documents", "the template is the server's"},
        {"continue_final_message", "the last message is whole"},
    };
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        if (!cpa_field_unasked(fields, absent[i].name, absent[i].reason)) return 0;
    }
    return 1;
}

/* The text of a message: a string, or an array of parts whose texts follow each other line by line. The caller frees
 * *out. */
static int read_content(const cpa_fields *message, char **out) {
    const json_t *content = cpa_field(message, "content");
    if (json_is_string(content)) {
        *out = strdup(json_string_value(content));
        return *out ? 1 : cpa_refuse_memory(message);
    }
    if (!json_is_array(content)) {
        return cpa_field_refuse(message, "content", content ? content : json_null(), "a string or parts of text");
    }
    size_t bytes = 0;
    FILE *text = open_memstream(out, &bytes);
    if (!text) return cpa_refuse_memory(message);
    int is_read = 1;
    for (size_t i = 0; is_read && i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i);
        const char *type = json_string_value(json_object_get(part, "type"));
        const char *said = json_string_value(json_object_get(part, "text"));
        if (!type || strcmp(type, "text") != 0 || !said) {
            is_read = cpa_field_refuse(message, "content", content, "parts of type \"text\" alone");
        } else {
            fprintf(text, "%s%s", i > 0 ? "\n" : "", said);
        }
    }
    const int failed = ferror(text) | fclose(text);
    return is_read && failed ? cpa_refuse_memory(message) : is_read;
}

static int read_message(const cpa_fields *fields, size_t i, cpa_chat_message *out) {
    char prefix[40];
    snprintf(prefix, sizeof prefix, "messages[%zu].", i);
    const cpa_fields message = {.object = json_array_get(json_object_get(fields->object, "messages"), i),
                                .prefix = prefix,
                                .refusal = fields->refusal};
    if (!json_is_object(message.object)) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "messages",
                          "messages[%zu]: expected an object with role and content", i);
    }
    if (!cpa_field_text(&message, "role", &out->role)) return 0;
    if (!out->role) return cpa_field_refuse(&message, "role", json_null(), "a string");
    if (!cpa_field_unasked(&message, "tool_calls", "answers are text alone")) return 0;
    char *content = NULL;
    const int is_read = read_content(&message, &content);
    out->content = content;
    return is_read;
}

static int render(const cpa_server *server, const cpa_fields *fields, const cpa_chat_message *messages, size_t n,
                  cpa_token_list *out) {
    int prompts = 1, add_special = 0;
    if (!cpa_field_flag(fields, "add_generation_prompt", &prompts) ||
        !cpa_field_flag(fields, "add_special_tokens", &add_special)) {
        return 0;
    }
    char *text = NULL;
    cpa_error err;
    cpa_status status = cpa_chat_template_render(server->options.chat, messages, n, prompts, &text, &err);
    if (status == CPA_OK) {
        status = cpa_tokenizer_encode(server->options.tokenizer, text, strlen(text), add_special, out, &err);
    }
    free(text);
    return status == CPA_OK ? 1 : cpa_refuse_failure(fields->refusal, "messages", &err);
}

int cpa_messages_read(const cpa_server *server, const cpa_fields *fields, cpa_token_list *out) {
    if (!server->options.tokenizer || !server->options.chat) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", "messages",
                          "messages: this model has no %s; there is /v1/completions",
                          server->options.tokenizer ? "chat template" : "tokenizer");
    }
    const json_t *array = cpa_field(fields, "messages");
    const size_t n = json_array_size(array);
    if (n == 0 || n > MOST_MESSAGES) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "messages",
                          "messages: expected an array of 1 to %d messages", MOST_MESSAGES);
    }
    cpa_chat_message *messages = calloc(n, sizeof *messages);
    if (!messages) return cpa_refuse_memory(fields);
    int is_read = 1;
    for (size_t i = 0; is_read && i < n; i++) is_read = read_message(fields, i, &messages[i]);
    if (is_read) is_read = render(server, fields, messages, n, out);
    for (size_t i = 0; i < n; i++) free((void *)(uintptr_t)messages[i].content);
    free(messages);
    return is_read;
}

/* Functions that an answer may call, as they are in the request. */
static int read_tools(const cpa_fields *fields, cpa_generation *g) {
    const json_t *tools = cpa_field(fields, "tools");
    if (tools && !json_is_array(tools)) return cpa_field_refuse(fields, "tools", tools, "an array of tools");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i), *type = json_object_get(tool, "type");
        const json_t *function = json_object_get(tool, "function");
        if (json_is_string(type) && strcmp(json_string_value(type), "function") == 0 &&
            json_is_string(json_object_get(function, "name"))) {
            continue;
        }
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "tools",
                          "tools[%zu]: expected {\"type\": \"function\", \"function\": {\"name\": ...}}", i);
    }
    if (json_array_size(tools) == 0) return 1;
    g->tools = json_incref((json_t *)(uintptr_t)tools);
    return cpa_field_unasked(fields, "tools", "the template of the chat is not given them");
}

static int read_logprobs(const cpa_fields *fields, cpa_generation *g) {
    int wanted = 0;
    int64_t top = 0;
    if (!cpa_field_flag(fields, "logprobs", &wanted) || !cpa_field_int(fields, "top_logprobs", 0, 20, &top)) return 0;
    if (top > 0 && !wanted) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "top_logprobs",
                          "top_logprobs: expected only where logprobs is true");
    }
    return !wanted || cpa_want_logprobs(fields, "top_logprobs", top, g);
}

int cpa_chat_read(const cpa_server *server, const json_t *body, cpa_generation *g, cpa_refusal *refusal) {
    const cpa_fields fields = {.object = body, .prefix = "", .refusal = refusal};
    g->is_chat = 1;
    g->prompts = calloc(1, sizeof *g->prompts);
    if (!g->prompts) return cpa_refuse_memory(&fields);
    g->n_prompts = 1;
    if (!cpa_generation_read(server, &fields, g) || !refuse_what_is_not_there(&fields) || !read_tools(&fields, g) ||
        !read_logprobs(&fields, g) || !cpa_field_int(&fields, "max_tokens", 1, INT32_MAX, &g->max_tokens) ||
        !cpa_field_int(&fields, "max_completion_tokens", 1, INT32_MAX, &g->max_tokens)) {
        return 0;
    }
    g->max_tokens_is_given = g->max_tokens > 0;
    return cpa_messages_read(server, &fields, g->prompts) && cpa_check_prompts(server, &fields, "messages", g);
}
