#include "server/bound_answers.h"

#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

int cpa_bind_answers(const cpa_server *server, const cpa_fields *fields, const char *field, const json_t *constraint,
                     cpa_generation *g) {
    if (!server->constraints) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", field,
                          "%s needs text and a token that ends it, and this model has none", field);
    }
    if (g->sampling.ignore_eos) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "ignore_eos",
                          "ignore_eos: expected only without %s, by which an answer has an end", field);
    }
    if (cpa_json_has_nul(constraint)) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, field,
                          "%s: found the character U+0000, expected texts without it", field);
    }
    free(g->binding);
    g->binding = json_dumps(constraint, JSON_COMPACT);
    snprintf(g->binding_field, sizeof g->binding_field, "%s", field);
    if (g->binding) return 1;
    return cpa_refuse(fields->refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL, "no memory for the request");
}

int cpa_bind_generation(const cpa_server *server, cpa_generation *g, cpa_refusal *refusal) {
    cpa_error err, why;
    const cpa_status status =
        cpa_constraint_open(server->constraints, g->binding, strlen(g->binding), &g->constraint, &why);
    if (status == CPA_OK) return 1;
    cpa_fail(&err, status, "%s: %s", g->binding_field, why.message);
    cpa_refuse_failure(refusal, g->binding_field, &err);
    refusal->quotes = 1;
    return 0;
}

/* ---- The fields ---- */

/* What a request is bound by, as far as it is read. */
typedef struct binding {
    json_t *constraint;
    char field[64]; /* name of the field that `constraint` comes from */
} binding;

/* Adds a constraint of one key, unless there is one already. */
static int add(const cpa_fields *fields, const char *name, const char *key, const json_t *value, binding *b) {
    char field[sizeof b->field];
    snprintf(field, sizeof field, "%s%s", fields->prefix, name);
    if (b->constraint) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, field,
                          "%s: found beside %s, expected one of them", field, b->field);
    }
    b->constraint = json_pack("{s:O}", key, value);
    memcpy(b->field, field, sizeof field);
    if (b->constraint) return 1;
    return cpa_refuse(fields->refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL, "no memory for the request");
}

/* A schema, or the text of one. */
static int read_schema(const cpa_fields *fields, const char *name, binding *b) {
    const json_t *value = cpa_field(fields, name);
    if (!value || (json_is_string(value) && json_string_length(value) == 0)) return 1;
    if (json_is_object(value)) return add(fields, name, "json_schema", value, b);
    json_t *schema = json_is_string(value) ? json_loadb(json_string_value(value), json_string_length(value),
                                                        JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL)
                                           : NULL;
    const int is_bound = schema ? add(fields, name, "json_schema", schema, b)
                                : cpa_field_refuse(fields, name, value, "a JSON schema, or the text of one");
    json_decref(schema);
    return is_bound;
}

static int read_expression(const cpa_fields *fields, const char *name, binding *b) {
    const json_t *value = cpa_field(fields, name);
    if (value && !json_is_string(value)) return cpa_field_refuse(fields, name, value, "a regular expression");
    return !value || json_string_length(value) == 0 || add(fields, name, "regex", value, b);
}

static int read_choice(const cpa_fields *fields, const char *name, binding *b) {
    const json_t *value = cpa_field(fields, name);
    if (value && !json_is_array(value)) return cpa_field_refuse(fields, name, value, "an array of strings");
    return !value || json_array_size(value) == 0 || add(fields, name, "choice", value, b);
}

/* {"name", "schema", "strict"}: whatever the others say, answers are bound to the schema. */
static int read_named_schema(const cpa_fields *fields, const cpa_fields *format, binding *b) {
    static const char *const others[] = {"name", "description", "strict"};
    cpa_field_names names = {.count = 0};
    cpa_fields named;
    if (!cpa_field_object(format, "json_schema", "response_format.json_schema.", &names, &named)) return 0;
    const json_t *schema = cpa_field(&named, "schema");
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) (void)cpa_field(&named, others[i]);
    if (!cpa_fields_check_names(&named)) return 0;
    if (json_is_object(schema)) return add(fields, "response_format", "json_schema", schema, b);
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "response_format.json_schema.schema",
                      "response_format.json_schema.schema: expected a JSON schema");
}

/* {"type": "json_schema", "json_schema": {...}}, as OpenAI has it. */
static int read_format(const cpa_fields *fields, binding *b) {
    cpa_field_names names = {.count = 0};
    cpa_fields format;
    const char *type = NULL;
    if (!cpa_field_object(fields, "response_format", "response_format.", &names, &format) ||
        !cpa_field_text(&format, "type", &type)) {
        return 0;
    }
    (void)cpa_field(&format, "json_schema");
    if (!cpa_fields_check_names(&format)) return 0;
    if (json_object_size(format.object) == 0 || (type && strcmp(type, "text") == 0)) return 1;
    if (type && strcmp(type, "json_object") == 0) return add(fields, "response_format", "json_object", json_true(), b);
    if (!type || strcmp(type, "json_schema") != 0) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "response_format.type",
                          "response_format.type: expected text, json_object or json_schema");
    }
    return read_named_schema(fields, &format, b);
}

static int read_outputs(const cpa_fields *fields, binding *b) {
    static const char reason[] = "there is json, regex, choice and json_object";
    cpa_field_names names = {.count = 0};
    cpa_fields outputs;
    int any_object = 0;
    if (!cpa_field_object(fields, "structured_outputs", "structured_outputs.", &names, &outputs)) return 0;
    if (!cpa_field_unasked(&outputs, "grammar", reason) || !cpa_field_unasked(&outputs, "structural_tag", reason) ||
        !cpa_field_unasked(&outputs, "whitespace_pattern", "white space is bounded as it is") ||
        !cpa_field_unasked(&outputs, "disable_any_whitespace", "white space is bounded as it is") ||
        !cpa_field_unasked(&outputs, "disable_additional_properties", "a schema says so itself")) {
        return 0;
    }
    return read_schema(&outputs, "json", b) && read_expression(&outputs, "regex", b) &&
           read_choice(&outputs, "choice", b) && cpa_field_flag(&outputs, "json_object", &any_object) &&
           (!any_object || add(&outputs, "json_object", "json_object", json_true(), b)) &&
           cpa_fields_check_names(&outputs);
}

int cpa_bound_answers_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    static const char reason[] = "there is guided_json, guided_regex and guided_choice";
    binding b = {.constraint = NULL};
    const int is_read = cpa_field_unasked(fields, "guided_grammar", reason) &&
                        cpa_field_unasked(fields, "guided_whitespace_pattern", "white space is bounded as it is") &&
                        read_format(fields, &b) && read_schema(fields, "guided_json", &b) &&
                        read_expression(fields, "guided_regex", &b) && read_choice(fields, "guided_choice", &b) &&
                        read_outputs(fields, &b) &&
                        (!b.constraint || cpa_bind_answers(server, fields, b.field, b.constraint, g));
    json_decref(b.constraint);
    return is_read;
}
