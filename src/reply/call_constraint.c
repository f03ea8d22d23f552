#include "src/reply/call_constraint.h"

#include <stdlib.h>
#include <string.h>

static json_t *text(const char *value) {
    return json_pack("{s:s}", "text", value);
}

static json_t *mark(const char *value) {
    return json_pack("{s:s}", "token", value);
}

/* Takes the parts. */
static json_t *sequence(json_t *a, json_t *b, json_t *c, json_t *d) {
    return json_pack("{s:[o,o,o,o]}", "sequence", a, b, c, d);
}

/* {"name": NAME, KEY: ARGUMENTS}: its beginning. */
static json_t *object_begin(const char *name, const char *key) {
    json_t *string = json_string(name);
    char *quoted = json_dumps(string, JSON_ENCODE_ANY);
    json_t *begin = json_sprintf("{\"name\": %s, \"%s\": ", quoted ? quoted : "", key);
    json_t *constraint = quoted ? json_pack("{s:o}", "text", begin) : (json_decref(begin), NULL);
    free(quoted);
    json_decref(string);
    return constraint;
}

/* The arguments of a function: an object, an empty one where nothing is said. */
static json_t *arguments_of(const json_t *function) {
    json_t *parameters = json_object_get(function, "parameters"), *schema;
    if (!json_is_object(parameters)) {
        schema = json_pack("{s:s,s:{},s:b}", "type", "object", "properties", "additionalProperties", 0);
    } else {
        schema = json_copy(parameters);
        if (schema && !json_object_get(schema, "type")) json_object_set_new(schema, "type", json_string("object"));
    }
    return json_pack("{s:o}", "json_schema", schema);
}

static json_t *call_of(cpa_tool_form form, const json_t *function) {
    const char *name = json_string_value(json_object_get(function, "name"));
    json_t *arguments = arguments_of(function);
    switch (form) {
        case CPA_TOOLS_LLAMA3: return sequence(object_begin(name, "parameters"), arguments, text("}"), text(""));
        case CPA_TOOLS_MISTRAL: return sequence(object_begin(name, "arguments"), arguments, text("}"), text(""));
        case CPA_TOOLS_MISTRAL_ARGS: return sequence(mark("[TOOL_CALLS]"), text(name), mark("[ARGS]"), arguments);
        case CPA_TOOLS_DEEPSEEK_V3:
            return sequence(
                sequence(mark("<｜tool▁call▁begin｜>"), text("function"), mark("<｜tool▁sep｜>"), text(name)),
                text("\n```json\n"), arguments,
                sequence(text("\n```"), mark("<｜tool▁call▁end｜>"), text(""), text("")));
        case CPA_TOOLS_DEEPSEEK_V31:
            return sequence(sequence(mark("<｜tool▁call▁begin｜>"), text(name), mark("<｜tool▁sep｜>"), text("")),
                            arguments, mark("<｜tool▁call▁end｜>"), text(""));
        default:
            return sequence(sequence(mark("<tool_call>"), text("\n"), object_begin(name, "arguments"), text("")),
                            arguments, text("}\n"), mark("</tool_call>"));
    }
}

static const char *separator_of(cpa_tool_form form) {
    switch (form) {
        case CPA_TOOLS_MISTRAL: return ", ";
        case CPA_TOOLS_HERMES:
        case CPA_TOOLS_DEEPSEEK_V3: return "\n";
        default: return "";
    }
}

json_t *cpa_call_constraint(cpa_tool_form form, const json_t *tools, const char *name, int may_repeat) {
    json_t *calls = json_array();
    int is_made = calls != NULL;
    for (size_t i = 0; is_made && i < json_array_size(tools); i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        if (name && strcmp(json_string_value(json_object_get(function, "name")), name) != 0) continue;
        is_made = json_array_append_new(calls, call_of(form, function)) == 0;
        if (name) break;
    }
    if (!is_made) {
        json_decref(calls);
        return NULL;
    }
    json_t *all = json_pack("{s:o}", "any_of", calls);
    if (may_repeat && form != CPA_TOOLS_LLAMA3) /* whose templates take one call at a time */
        all = json_pack("{s:o,s:o}", "repeat", all, "separator", text(separator_of(form)));
    switch (form) {
        case CPA_TOOLS_MISTRAL: return sequence(mark("[TOOL_CALLS]"), text(" ["), all, text("]"));
        case CPA_TOOLS_DEEPSEEK_V3:
        case CPA_TOOLS_DEEPSEEK_V31:
            return sequence(mark("<｜tool▁calls▁begin｜>"), all, mark("<｜tool▁calls▁end｜>"), text(""));
        default: return all;
    }
}

json_t *cpa_constraint_behind_thoughts(cpa_thought_form form, json_t *constraint) {
    json_t *thoughts = json_pack("{s:s}", "regex", form == CPA_THOUGHTS_MISTRAL ? "[^\\[]*" : "[^<]*");
    return sequence(thoughts, mark(cpa_thought_form_end(form)), text("\n\n"), constraint);
}
