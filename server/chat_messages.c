#include "server/chat_messages.h"

#include <microhttpd.h>
#include <stdio.h>

enum { MOST_MESSAGES = 4096 };

/* Parts of text alone. */
static int are_texts(const json_t *parts) {
    for (size_t i = 0; i < json_array_size(parts); i++) {
        const json_t *part = json_array_get(parts, i);
        if (!cpa_json_is_text(json_object_get(part, "type"), "text") || !json_is_string(json_object_get(part, "text")))
            return 0;
    }
    return 1;
}

static int check_content(const cpa_fields *message) {
    const json_t *content = cpa_field(message, "content");
    const int may_be_missing =
        cpa_json_is_text(cpa_field(message, "role"), "assistant") &&
        (json_array_size(cpa_field(message, "tool_calls")) > 0 || cpa_field(message, "reasoning_content"));
    if (json_is_string(content) || (!content && may_be_missing)) return 1;
    if (!json_is_array(content))
        return cpa_field_refuse(message, "content", content ? content : json_null(), "a string or parts of text");
    return are_texts(content) || cpa_field_refuse(message, "content", content, "parts of type \"text\" alone");
}

/* {"type": "function", "function": {"name", "arguments"}}, where arguments may be the text of an object. */
static int check_calls(const cpa_fields *message) {
    static const char expected[] = "an array of objects with a function that has a name, and arguments";
    const json_t *calls = cpa_field(message, "tool_calls");
    if (calls && !json_is_array(calls)) return cpa_field_refuse(message, "tool_calls", calls, expected);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *function = json_object_get(json_array_get(calls, i), "function");
        const json_t *arguments = json_object_get(function, "arguments");
        if (!json_is_string(json_object_get(function, "name")) ||
            !(json_is_string(arguments) || json_is_object(arguments)))
            return cpa_field_refuse(message, "tool_calls", calls, expected);
    }
    return 1;
}

static int check_message(const cpa_fields *fields, const json_t *object, size_t i) {
    char prefix[40];
    const char *role = NULL;
    snprintf(prefix, sizeof prefix, "messages[%zu].", i);
    const cpa_fields message = {.object = object, .prefix = prefix, .refusal = fields->refusal};
    if (!json_is_object(object)) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "messages",
                          "messages[%zu]: expected an object with role and content", i);
    }
    if (!cpa_field_text(&message, "role", &role)) return 0;
    if (!role) return cpa_field_refuse(&message, "role", json_null(), "a string");
    return check_calls(&message) && check_content(&message);
}

int cpa_chat_messages_check(const cpa_fields *fields) {
    const json_t *messages = cpa_field(fields, "messages");
    const size_t n = json_array_size(messages);
    if (n == 0 || n > MOST_MESSAGES) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "messages",
                          "messages: expected an array of 1 to %d messages", MOST_MESSAGES);
    }
    for (size_t i = 0; i < n; i++) {
        if (!check_message(fields, json_array_get(messages, i), i)) return 0;
    }
    return 1;
}

int cpa_chat_tools_check(const cpa_fields *fields) {
    const json_t *tools = cpa_field(fields, "tools");
    if (tools && !json_is_array(tools)) return cpa_field_refuse(fields, "tools", tools, "an array of tools");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i);
        const json_t *name = json_object_get(json_object_get(tool, "function"), "name");
        if (cpa_json_is_text(json_object_get(tool, "type"), "function") && json_is_string(name) &&
            !cpa_json_has_nul(name)) {
            continue;
        }
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "tools",
                          "tools[%zu]: expected {\"type\": \"function\", \"function\": {\"name\": ...}}", i);
    }
    return 1;
}
