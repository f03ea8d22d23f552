#include "src/grammar/json_rules.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

enum { MOST_BLANKS = 32 };

/* A character of a string (RFC 8259, section 7): no U+0000, and surrogates in pairs. */
#define HEX "[0-9A-Fa-f]"
#define CHARACTER                                                                                                      \
    "[^\\x00-\\x1f\"\\\\]|\\\\[\"\\\\/bfnrt]|\\\\u(?:000[1-9A-Fa-f]|00[1-9A-Fa-f]" HEX "|0[1-9A-Fa-f]" HEX             \
    "{2}|"                                                                                                             \
    "[1-9ABCEFabcef]" HEX "{3}|[Dd][0-7]" HEX "{2}|[Dd][89ABab]" HEX "{2}\\\\u[Dd][C-Fc-f]" HEX "{2})"

int cpa_json_literal(cpa_grammar *grammar, uint32_t from, const json_t *value, uint32_t to) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    if (!text) return 0;
    cpa_graph_text(&grammar->graph, from, text, strlen(text), to);
    free(text);
    return 1;
}

void cpa_json_colon(cpa_grammar *grammar, uint32_t from, uint32_t to) {
    cpa_graph *g = &grammar->graph;
    const uint32_t behind = cpa_graph_node(g);
    cpa_graph_bytes(g, from, ':', ':', behind);
    cpa_graph_empty(g, behind, to);
    cpa_graph_bytes(g, behind, ' ', ' ', to);
}

static void add_space(cpa_graph *g, cpa_rule rule) {
    cpa_graph_empty(g, rule.from, rule.to);
    cpa_graph_bytes(g, rule.from, ' ', ' ', rule.to);
    uint32_t at = cpa_graph_node(g);
    cpa_graph_bytes(g, rule.from, '\n', '\n', at);
    for (int i = 0; i < MOST_BLANKS; i++) {
        const uint32_t next = cpa_graph_node(g);
        cpa_graph_empty(g, at, rule.to);
        cpa_graph_bytes(g, at, ' ', ' ', next);
        at = next;
    }
    cpa_graph_empty(g, at, rule.to);
}

/* A character in each place of a string; only here the grammar knows that any may follow. */
static cpa_status add_string(cpa_grammar *grammar, uint32_t rule, cpa_effort *effort, cpa_error *err) {
    cpa_graph *g = &grammar->graph;
    const uint32_t inside = cpa_graph_node(g);
    cpa_dfa dfa = {0};
    CPA_TRY(cpa_dfa_of_regex(CHARACTER, strlen(CHARACTER), 1, effort, &dfa, err));
    cpa_graph_bytes(g, grammar->rules[rule].from, '"', '"', inside);
    cpa_grammar_dfa(grammar, inside, &dfa, 0, inside);
    cpa_graph_bytes(g, inside, '"', '"', grammar->rules[rule].to);
    cpa_graph_set_plain(g, inside, CPA_MOST_PLAIN);
    cpa_dfa_release(&dfa);
    return CPA_OK;
}

static cpa_status add_expression(cpa_grammar *grammar, uint32_t rule, const char *expression, cpa_effort *effort,
                                 cpa_error *err) {
    cpa_dfa dfa = {0};
    CPA_TRY(cpa_dfa_of_regex(expression, strlen(expression), 1, effort, &dfa, err));
    cpa_grammar_dfa(grammar, grammar->rules[rule].from, &dfa, 0, grammar->rules[rule].to);
    cpa_dfa_release(&dfa);
    return CPA_OK;
}

/* Brackets around any number of elements: a value, or a name, a colon and a value. */
static void add_brackets(cpa_grammar *grammar, const cpa_json_rules *rules, uint32_t rule, const char *brackets) {
    cpa_graph *g = &grammar->graph;
    const cpa_rule r = grammar->rules[rule];
    const uint32_t open = cpa_graph_node(g), element = cpa_graph_node(g), value = cpa_graph_node(g);
    const uint32_t behind = cpa_graph_node(g), comma = cpa_graph_node(g), last = cpa_graph_node(g);
    cpa_graph_text(g, r.from, brackets, 1, open);
    cpa_graph_text(g, open, brackets + 1, 1, r.to);
    cpa_graph_call(g, open, rules->space, element);
    if (*brackets == '{') {
        const uint32_t name = cpa_graph_node(g);
        cpa_graph_call(g, element, rules->string, name);
        cpa_json_colon(grammar, name, value);
    } else {
        cpa_graph_empty(g, element, value);
    }
    cpa_graph_call(g, value, rules->value, behind);
    cpa_graph_bytes(g, behind, ',', ',', comma);
    cpa_graph_call(g, comma, rules->space, element);
    cpa_graph_call(g, behind, rules->space, last);
    cpa_graph_text(g, last, brackets + 1, 1, r.to);
}

cpa_status cpa_json_rules_add(cpa_grammar *grammar, cpa_effort *effort, cpa_json_rules *out, cpa_error *err) {
    cpa_graph *g = &grammar->graph;
    cpa_json_rules rules;
    uint32_t *numbers[] = {&rules.space,  &rules.character, &rules.string, &rules.integer,
                           &rules.number, &rules.value,     &rules.object, &rules.array};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) *numbers[i] = cpa_grammar_rule(grammar);
    if (g->status != CPA_OK) return cpa_fail(err, g->status, "no room for the grammar of JSON");
    add_space(g, grammar->rules[rules.space]);
    CPA_TRY(add_expression(grammar, rules.character, CHARACTER, effort, err));
    CPA_TRY(add_string(grammar, rules.string, effort, err));
    CPA_TRY(add_expression(grammar, rules.integer, "-?(?:0|[1-9][0-9]{0,17})", effort, err));
    CPA_TRY(add_expression(grammar, rules.number, "-?(?:0|[1-9][0-9]{0,14})(?:\\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?",
                           effort, err));
    add_brackets(grammar, &rules, rules.object, "{}");
    add_brackets(grammar, &rules, rules.array, "[]");
    const cpa_rule value = grammar->rules[rules.value];
    static const char *const words[] = {"null", "true", "false"};
    for (int i = 0; i < 3; i++) cpa_graph_text(g, value.from, words[i], strlen(words[i]), value.to);
    const uint32_t kinds[] = {rules.string, rules.number, rules.object, rules.array};
    for (int i = 0; i < 4; i++) cpa_graph_call(g, value.from, kinds[i], value.to);
    *out = rules;
    return CPA_OK;
}
