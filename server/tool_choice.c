#include "server/tool_choice.h"

#include <microhttpd.h>
#include <stdio.h>
#include <string.h>

#include "server/bound_answers.h"
#include "src/reply/call_constraint.h"

typedef struct choice {
    int may_call, must_call;
    const char *name; /* name of the tool that must be called; NULL: any */
} choice;

static int refuse(const cpa_fields *fields, const char *code, const char *why) {
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, code, "tool_choice", "tool_choice: %s", why);
}

static int has_tool(const json_t *tools, const char *name) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        if (strcmp(json_string_value(json_object_get(function, "name")), name) == 0) return 1;
    }
    return 0;
}

/* {"type": "function", "function": {"name": ...}} */
static int read_named(const cpa_fields *fields, const json_t *value, const json_t *tools, choice *out) {
    const json_t *name = json_object_get(json_object_get(value, "function"), "name");
    if (!cpa_json_is_text(json_object_get(value, "type"), "function") || !json_is_string(name) ||
        cpa_json_has_nul(name))
        return refuse(fields, NULL, "expected none, auto, required, or a function by its name");
    out->name = json_string_value(name);
    out->may_call = out->must_call = 1;
    return has_tool(tools, out->name) || refuse(fields, NULL, "the function is none of tools");
}

static int read_choice(const cpa_fields *fields, const json_t *tools, choice *out) {
    const json_t *value = cpa_field(fields, "tool_choice");
    out->may_call = tools != NULL;
    if (!value || cpa_json_is_text(value, "auto")) return 1;
    if (cpa_json_is_text(value, "none")) {
        out->may_call = 0;
        return 1;
    }
    if (!tools) return refuse(fields, NULL, "expected only with tools");
    if (!json_is_string(value)) return read_named(fields, value, tools, out);
    out->must_call = cpa_json_is_text(value, "required");
    return out->must_call || refuse(fields, NULL, "expected none, auto, required, or a function by its name");
}

static int bind_calls(const cpa_server *server, const cpa_fields *fields, const choice *c, int may_repeat,
                      cpa_generation *g) {
    if (server->options.tool_form == CPA_TOOLS_NONE)
        return refuse(fields, "unsupported_parameter",
                      "the chat template shows no form of calls that is known; there is --tool-call-parser");
    if (g->binding) return refuse(fields, NULL, "expected auto or none where the answer has a format");
    json_t *constraint = cpa_call_constraint(server->options.tool_form, g->tools, c->name, may_repeat && !c->name);
    const int is_bound = constraint ? cpa_bind_answers(server, fields, "tools", constraint, g)
                                    : cpa_refuse(fields->refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL,
                                                 "no memory for the request");
    json_decref(constraint);
    return is_bound;
}

/* What is bound comes behind the thoughts that the prompt begins. */
static int let_think(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    char field[sizeof g->binding_field];
    memcpy(field, g->binding_field, sizeof field);
    json_t *constraint = cpa_constraint_behind_thoughts(
        g->reply.thoughts, json_loads(g->binding, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL));
    const int is_bound = constraint ? cpa_bind_answers(server, fields, field, constraint, g)
                                    : cpa_refuse(fields->refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL,
                                                 "no memory for the request");
    json_decref(constraint);
    return is_bound;
}

int cpa_tool_choice_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    choice c = {.may_call = 0};
    int may_repeat = 1;
    if (!read_choice(fields, g->tools, &c) || !cpa_field_flag(fields, "parallel_tool_calls", &may_repeat)) return 0;
    const int has_format = g->binding != NULL;
    if (c.must_call && !bind_calls(server, fields, &c, may_repeat, g)) return 0;
    g->reply.thoughts = server->options.thought_form;
    g->reply.tools = c.may_call && !has_format ? server->options.tool_form : CPA_TOOLS_NONE;
    g->reply.known = g->tools;
    g->reply.most_calls = may_repeat && !c.name ? 0 : 1;
    g->has_parts = g->reply.thoughts != CPA_THOUGHTS_NONE || g->reply.tools != CPA_TOOLS_NONE;
    return !g->binding || !g->reply.thoughts || !g->reply.thinks_already || let_think(server, fields, g);
}
