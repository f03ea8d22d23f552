#include "src/grammar/constraint_text.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/json_file.h"
#include "src/grammar/json_rules.h"
#include "src/grammar/schema.h"

enum { MOST_DEEP = 16, MOST_TEXT_BYTES = 1 << 20 };

typedef struct compiler {
    cpa_grammar grammar;
    cpa_json_rules json;
    const cpa_token_trie *tokens;
    cpa_effort effort;
    cpa_error *err;
} compiler;

static cpa_status build(compiler *c, const json_t *constraint, uint32_t from, uint32_t to, int depth);

static cpa_status build_schema(compiler *c, const json_t *schema, uint32_t from, uint32_t to, int depth) {
    (void)depth;
    cpa_error why;
    const cpa_status status = cpa_schema_build(schema, &c->json, &c->grammar, from, to, &c->effort, &why);
    return status == CPA_OK ? CPA_OK : cpa_fail(c->err, status, "json_schema: %s", why.message);
}

static cpa_status build_object(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    (void)depth;
    if (!json_is_true(value)) return cpa_fail(c->err, CPA_INVALID, "json_object: expected true");
    cpa_graph_call(&c->grammar.graph, from, c->json.object, to);
    return CPA_OK;
}

static cpa_status build_regex(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    (void)depth;
    cpa_dfa dfa = {0};
    cpa_error why;
    if (!json_is_string(value)) return cpa_fail(c->err, CPA_INVALID, "regex: expected a string");
    const cpa_status status =
        cpa_dfa_of_regex(json_string_value(value), json_string_length(value), 1, &c->effort, &dfa, &why);
    if (status != CPA_OK) return cpa_fail(c->err, status, "regex: %s", why.message);
    cpa_grammar_dfa(&c->grammar, from, &dfa, 0, to);
    cpa_dfa_release(&dfa);
    return CPA_OK;
}

static cpa_status build_text(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    (void)depth;
    if (!json_is_string(value)) return cpa_fail(c->err, CPA_INVALID, "text: expected a string");
    cpa_graph_text(&c->grammar.graph, from, json_string_value(value), json_string_length(value), to);
    return CPA_OK;
}

static cpa_status build_choice(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    (void)depth;
    const size_t n = json_array_size(value);
    if (n == 0) return cpa_fail(c->err, CPA_INVALID, "choice: expected an array of strings");
    cpa_graph_string *texts = malloc(n * sizeof *texts);
    cpa_status status = texts ? CPA_OK : cpa_fail(c->err, CPA_NO_MEMORY, "choice: no memory");
    for (size_t i = 0; status == CPA_OK && i < n; i++) {
        const json_t *text = json_array_get(value, i);
        if (!json_is_string(text)) status = cpa_fail(c->err, CPA_INVALID, "choice: expected strings alone");
        if (status == CPA_OK) texts[i] = (cpa_graph_string){json_string_value(text), json_string_length(text)};
    }
    if (status == CPA_OK) cpa_graph_texts(&c->grammar.graph, from, texts, (int64_t)n, to);
    free(texts);
    return status;
}

static cpa_status build_token(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    if (!json_is_string(value)) return cpa_fail(c->err, CPA_INVALID, "token: expected a string");
    const int64_t id = cpa_token_trie_special(c->tokens, json_string_value(value), json_string_length(value));
    if (id < 0) return build_text(c, value, from, to, depth);
    cpa_graph *g = &c->grammar.graph;
    char name[CPA_SPECIAL_NAME_BYTES];
    cpa_special_name((uint32_t)id, name);
    for (int i = 0; i < CPA_SPECIAL_NAME_BYTES; i++) {
        const uint32_t next = i + 1 < CPA_SPECIAL_NAME_BYTES ? cpa_graph_node(g) : to;
        const uint8_t byte = (uint8_t)name[i];
        cpa_graph_edge(g, from, (cpa_edge){.kind = CPA_EDGE_SPECIAL, .lo = byte, .hi = byte, .to = next});
        from = next;
    }
    return CPA_OK;
}

static cpa_status build_sequence(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    if (!json_is_array(value)) return cpa_fail(c->err, CPA_INVALID, "sequence: expected an array");
    for (size_t i = 0; i < json_array_size(value); i++) {
        const uint32_t next = cpa_graph_node(&c->grammar.graph);
        CPA_TRY(build(c, json_array_get(value, i), from, next, depth));
        from = next;
    }
    cpa_graph_empty(&c->grammar.graph, from, to);
    return CPA_OK;
}

static cpa_status build_any(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth) {
    if (json_array_size(value) == 0) return cpa_fail(c->err, CPA_INVALID, "any_of: expected an array of constraints");
    for (size_t i = 0; i < json_array_size(value); i++) {
        CPA_TRY(build(c, json_array_get(value, i), from, to, depth));
    }
    return CPA_OK;
}

static cpa_status build_repeat(compiler *c, const json_t *constraint, uint32_t from, uint32_t to, int depth) {
    cpa_graph *g = &c->grammar.graph;
    const json_t *separator = json_object_get(constraint, "separator");
    const uint32_t begin = cpa_graph_node(g), end = cpa_graph_node(g);
    cpa_graph_empty(g, from, begin);
    CPA_TRY(build(c, json_object_get(constraint, "repeat"), begin, end, depth));
    if (separator) {
        CPA_TRY(build(c, separator, end, begin, depth));
    } else {
        cpa_graph_empty(g, end, begin);
    }
    cpa_graph_empty(g, end, to);
    return CPA_OK;
}

static cpa_status build(compiler *c, const json_t *constraint, uint32_t from, uint32_t to, int depth) {
    static const struct {
        const char *key;
        cpa_status (*build)(compiler *c, const json_t *value, uint32_t from, uint32_t to, int depth);
    } kinds[] = {{"json_schema", build_schema}, {"json_object", build_object}, {"regex", build_regex},
                 {"choice", build_choice},      {"text", build_text},          {"token", build_token},
                 {"sequence", build_sequence},  {"any_of", build_any}};
    if (depth > MOST_DEEP) return cpa_fail(c->err, CPA_UNSUPPORTED, "constraints more than %d deep", MOST_DEEP);
    const size_t n = json_object_size(constraint);
    if (json_object_get(constraint, "repeat") && n == 1 + (json_object_get(constraint, "separator") != NULL)) {
        return build_repeat(c, constraint, from, to, depth + 1);
    }
    for (size_t i = 0; n == 1 && i < sizeof kinds / sizeof *kinds; i++) {
        const json_t *value = json_object_get(constraint, kinds[i].key);
        if (value) return kinds[i].build(c, value, from, to, depth + 1);
    }
    return cpa_fail(c->err, CPA_INVALID,
                    "expected an object with one of json_schema, json_object, regex, choice, text, token, sequence, "
                    "any_of, repeat");
}

json_t *cpa_constraint_between(const char *before, const json_t *schema, const char *after) {
    return json_pack("{s:[{s:s},{s:O},{s:s}]}", "sequence", "text", before, "json_schema", schema, "text", after);
}

cpa_status cpa_constraint_compile(const char *text, size_t bytes, const cpa_token_trie *tokens, cpa_recogniser **out,
                                  cpa_error *err) {
    json_error_t why;
    if (bytes > MOST_TEXT_BYTES) {
        return cpa_fail(err, CPA_UNSUPPORTED, "a constraint of %zu bytes, expected at most %d", bytes, MOST_TEXT_BYTES);
    }
    json_t *constraint;
    const cpa_status parsed = cpa_json_parse(text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &constraint, &why);
    if (parsed == CPA_NO_MEMORY) return cpa_fail(err, parsed, "no memory for a constraint");
    if (parsed != CPA_OK) return cpa_fail(err, parsed, "a constraint that is no JSON: %s", why.text);
    compiler c = {.tokens = tokens, .effort = {CPA_EFFORT_MOST}, .err = err};
    cpa_grammar_begin(&c.grammar);
    const uint32_t rule = cpa_grammar_rule(&c.grammar);
    cpa_status status = cpa_json_rules_add(&c.grammar, &c.effort, &c.json, err);
    if (status == CPA_OK) {
        status = build(&c, constraint, c.grammar.rules[rule].from, c.grammar.rules[rule].to, 0);
    }
    json_decref(constraint);
    if (status == CPA_OK) status = cpa_grammar_close(&c.grammar, tokens->bytes, &c.effort, err);
    if (status == CPA_OK) return cpa_recogniser_open(&c.grammar, tokens, out, err);
    cpa_grammar_release(&c.grammar);
    return status;
}
