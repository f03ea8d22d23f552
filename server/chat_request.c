#include "server/chat_request.h"

#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/chat_messages.h"
#include "server/generation_fields.h"
#include "server/tool_choice.h"

static int refuse_what_is_not_there(const cpa_fields *fields) {
    static const struct {
        const char *name, *reason;
    } absent[] = {
        {"echo", "answers are without their prompts"},
        {"functions", "answers are text alone"},
        {"audio", "answers are text alone"},
        {"prediction", "tokens are drawn one by one"},
        {"chat_template", "the template is the server's"},
    };
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        if (!cpa_field_unasked(fields, absent[i].name, absent[i].reason)) return 0;
    }
    return 1;
}

static int read_documents(const cpa_fields *fields, const json_t **out) {
    const json_t *documents = cpa_field(fields, "documents");
    if (documents && !json_is_array(documents))
        return cpa_field_refuse(fields, "documents", documents, "an array of objects");
    for (size_t i = 0; i < json_array_size(documents); i++) {
        if (!json_is_object(json_array_get(documents, i)))
            return cpa_field_refuse(fields, "documents", documents, "an array of objects alone");
    }
    *out = json_array_size(documents) > 0 ? documents : NULL;
    return 1;
}

/* Names of the template's own, beside those that every template has. */
static int read_kwargs(const cpa_fields *fields, const json_t **out) {
    static const char *const others[] = {
        "messages",      "tools",   "documents", "add_generation_prompt", "continue_final_message",
        "chat_template", "tokenize"};
    cpa_fields kwargs;
    if (!cpa_field_object(fields, "chat_template_kwargs", "chat_template_kwargs.", NULL, &kwargs)) return 0;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (!json_object_get(kwargs.object, others[i])) continue;
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "chat_template_kwargs",
                          "chat_template_kwargs: found %s, expected names of the template alone", others[i]);
    }
    *out = kwargs.object;
    return 1;
}

static int read_ends(const cpa_fields *fields, cpa_chat *chat) {
    if (!cpa_field_flag(fields, "continue_final_message", &chat->continues_last)) return 0;
    chat->add_generation_prompt = !chat->continues_last;
    if (!cpa_field_flag(fields, "add_generation_prompt", &chat->add_generation_prompt)) return 0;
    if (!chat->continues_last || !chat->add_generation_prompt) return 1;
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "continue_final_message",
                      "continue_final_message: expected only where add_generation_prompt is false");
}

/* Whether a text ends with another, and space. */
static int ends_with(const cpa_bytes *text, const char *end) {
    const int64_t bytes = (int64_t)strlen(end);
    int64_t n = text->count;
    while (n > 0 && strchr(" \n", text->data[n - 1]) && text->data[n - 1]) n--;
    return bytes > 0 && n >= bytes && memcmp(text->data + n - bytes, end, (size_t)bytes) == 0;
}

static int encode(const cpa_server *server, const cpa_fields *fields, const cpa_chat *chat, cpa_token_list *out,
                  int *thinks) {
    int add_special = 0;
    if (!cpa_field_flag(fields, "add_special_tokens", &add_special)) return 0;
    cpa_bytes text = {.count = 0};
    cpa_error err;
    cpa_status status = cpa_chat_template_render(server->options.chat, chat, &text, &err);
    const int is_refused = status == CPA_INVALID; /* in words of the template, or of Python */
    if (status == CPA_OK) {
        status = cpa_tokenizer_encode(server->options.tokenizer, text.data ? text.data : "", (size_t)text.count,
                                      add_special, out, &err);
    }
    *thinks = ends_with(&text, cpa_thought_form_begin(server->options.thought_form));
    cpa_bytes_release(&text);
    if (status == CPA_OK) return 1;
    cpa_refuse_failure(fields->refusal, "messages", &err);
    fields->refusal->quotes = is_refused;
    return 0;
}

int cpa_messages_read(const cpa_server *server, const cpa_fields *fields, cpa_token_list *out, int *thinks) {
    if (!server->options.tokenizer || !server->options.chat) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", "messages",
                          "messages: this model has no %s; there is /v1/completions",
                          server->options.tokenizer ? "chat template" : "tokenizer");
    }
    const json_t *tools = cpa_field(fields, "tools");
    cpa_chat chat = {.messages = cpa_field(fields, "messages"),
                     .tools = json_array_size(tools) > 0 ? tools : NULL,
                     .now = time(NULL)};
    return cpa_chat_messages_check(fields) && cpa_chat_tools_check(fields) && read_documents(fields, &chat.documents) &&
           read_kwargs(fields, &chat.kwargs) && read_ends(fields, &chat) && encode(server, fields, &chat, out, thinks);
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
    cpa_field_names names = {.count = 0};
    const cpa_fields fields = {.object = body, .prefix = "", .refusal = refusal, .looked_for = &names};
    g->is_chat = 1;
    g->prompts = calloc(1, sizeof *g->prompts);
    if (!g->prompts) return cpa_refuse_memory(&fields);
    g->n_prompts = 1;
    if (!cpa_generation_read(server, &fields, g) || !refuse_what_is_not_there(&fields) || !read_logprobs(&fields, g) ||
        !cpa_field_int(&fields, "max_tokens", 1, INT32_MAX, &g->max_tokens) ||
        !cpa_field_int(&fields, "max_completion_tokens", 1, INT32_MAX, &g->max_tokens)) {
        return 0;
    }
    g->max_tokens_is_given = g->max_tokens > 0;
    const json_t *tools = cpa_field(&fields, "tools");
    if (json_array_size(tools) > 0) g->tools = json_incref((json_t *)(uintptr_t)tools);
    return cpa_messages_read(server, &fields, g->prompts, &g->reply.thinks_already) &&
           cpa_check_prompts(server, &fields, "messages", g) && cpa_tool_choice_read(server, &fields, g) &&
           cpa_fields_check_names(&fields);
}
