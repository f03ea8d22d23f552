#include "src/grammar/schema.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "src/grammar/schema_members.h"
#include "src/grammar/schema_values.h"
#include "src/grammar/sequence_table.h"

enum { MOST_RULES = 20000, MOST_NAMES = 2000 };

typedef struct builder {
    cpa_schema_reader reader;
    const cpa_json_rules *json;
    cpa_grammar *grammar;
    cpa_graph *graph;
    /* Lists of schemas that are rules: number n of the table is rule rules[n] and stands in lists[n]. */
    cpa_sequence_table table;
    uint32_t *rules;
    cpa_schema_list *lists;
    int64_t rules_capacity, lists_capacity;
} builder;

static cpa_status no_memory(const builder *b) {
    return cpa_schema_fail(&b->reader, CPA_NO_MEMORY, NULL, "no memory for a schema");
}

/* The rule of a list of schemas, which is built later if it is new. */
static cpa_status rule_of(builder *b, const cpa_schema_list *list, uint32_t *out) {
    uint32_t key[2 * CPA_MOST_SCHEMAS];
    const int64_t count = b->table.count;
    for (int i = 0; i < list->n; i++) {
        key[2 * i] = (uint32_t)((uintptr_t)list->schemas[i] >> 32);
        key[2 * i + 1] = (uint32_t)(uintptr_t)list->schemas[i];
    }
    if (list->n == 0) {
        *out = b->json->value;
        return CPA_OK;
    }
    if (count == MOST_RULES) {
        return cpa_schema_fail(&b->reader, CPA_UNSUPPORTED, list->schemas[0], "more than %d schemas", MOST_RULES);
    }
    if (!cpa_array_reserve(&b->rules, &b->rules_capacity, count + 1, sizeof *b->rules) ||
        !cpa_array_reserve(&b->lists, &b->lists_capacity, count + 1, sizeof *b->lists)) {
        return no_memory(b);
    }
    const int64_t number = cpa_sequence_table_put(&b->table, key, 2 * list->n);
    if (number == CPA_NO_SEQUENCE) return no_memory(b);
    if (number == count) {
        b->rules[number] = cpa_grammar_rule(b->grammar);
        b->lists[number] = *list;
    }
    *out = b->rules[number];
    return CPA_OK;
}

static cpa_status add_value(builder *b, const cpa_schema_list *list, uint32_t from, uint32_t to) {
    uint32_t rule = 0;
    CPA_TRY(rule_of(b, list, &rule));
    cpa_graph_call(b->graph, from, rule, to);
    return CPA_OK;
}

/* ---- Numbers and strings ---- */

static cpa_status add_numbers(builder *b, const cpa_schema_form *form, uint32_t from, uint32_t to) {
    const cpa_number_range *range = &form->numbers;
    const int integers_alone = !(form->kinds & CPA_KIND_FRACTION);
    if (range->min == -INFINITY && range->max == INFINITY && range->multiple_of == 0) {
        cpa_graph_call(b->graph, from, integers_alone ? b->json->integer : b->json->number, to);
        return CPA_OK;
    }
    cpa_dfa dfa = {0};
    cpa_error why;
    const cpa_status status = cpa_number_range_dfa(range, integers_alone, b->reader.effort, &dfa, &why);
    if (status != CPA_OK) {
        return cpa_schema_fail(&b->reader, status, NULL, "minimum, maximum and multipleOf: %s", why.message);
    }
    cpa_grammar_dfa(b->grammar, from, &dfa, 0, to);
    cpa_dfa_release(&dfa);
    return CPA_OK;
}

static cpa_status add_strings(builder *b, const cpa_schema_form *form, uint32_t from, uint32_t to) {
    cpa_graph *g = b->graph;
    cpa_dfa dfa = {0};
    int is_free = 1;
    CPA_TRY(cpa_schema_strings(&b->reader, form, &is_free, &dfa));
    const int64_t least = form->least_characters, most = form->most_characters;
    if (is_free && least == 0 && most < 0) {
        cpa_graph_call(g, from, b->json->string, to);
        return CPA_OK;
    }
    const uint32_t end = cpa_graph_node(g);
    uint32_t at = cpa_graph_node(g);
    cpa_graph_bytes(g, from, '"', '"', at);
    cpa_graph_bytes(g, end, '"', '"', to);
    if (!is_free) {
        cpa_grammar_dfa(b->grammar, at, &dfa, 1, end);
        cpa_dfa_release(&dfa);
        return CPA_OK;
    }
    if (most >= 0 && least > most) return CPA_OK; /* there is none */
    for (int64_t i = 0; (i < least || i < most) && g->status == CPA_OK; i++) {
        const uint32_t next = cpa_graph_node(g);
        cpa_graph_set_plain(g, at, most < 0 ? CPA_MOST_PLAIN : most - i);
        if (i >= least) cpa_graph_empty(g, at, end);
        cpa_graph_call(g, at, b->json->character, next);
        at = next;
    }
    if (most < 0) {
        cpa_graph_set_plain(g, at, CPA_MOST_PLAIN);
        cpa_graph_call(g, at, b->json->character, at);
    }
    cpa_graph_empty(g, at, end);
    return CPA_OK;
}

/* ---- Arrays ---- */

static cpa_status add_arrays(builder *b, const cpa_schema_form *form, uint32_t from, uint32_t to) {
    cpa_graph *g = b->graph;
    const int64_t least = form->least_items, most = form->most_items, prefix = cpa_schema_prefix(form);
    const int64_t counted = most >= 0 ? most : least > prefix ? least : prefix;
    if (most >= 0 && least > most) return CPA_OK;
    const uint32_t open = cpa_graph_node(g), last = cpa_graph_node(g);
    uint32_t element = cpa_graph_node(g), behind = open;
    cpa_graph_bytes(g, from, '[', '[', open);
    if (least == 0) cpa_graph_bytes(g, open, ']', ']', to);
    cpa_graph_call(g, open, b->json->space, element);
    cpa_graph_bytes(g, last, ']', ']', to);
    for (int64_t i = 0; i <= counted && g->status == CPA_OK; i++) { /* `counted` stands for all from it on */
        cpa_schema_list list = {.n = 0};
        if (i == most) break;
        CPA_TRY(cpa_schema_of_item(&b->reader, form, i, &list));
        behind = cpa_graph_node(g);
        CPA_TRY(add_value(b, &list, element, behind));
        if (i + 1 >= least) cpa_graph_call(g, behind, b->json->space, last);
        if (i + 1 == most) break;
        const uint32_t comma = cpa_graph_node(g), next = i < counted ? cpa_graph_node(g) : element;
        cpa_graph_bytes(g, behind, ',', ',', comma);
        cpa_graph_call(g, comma, b->json->space, next);
        element = next;
    }
    return CPA_OK;
}

/* ---- Objects ---- */

/* The names that are spelled out, each once: those of properties, and those that are only required. The caller releases
 * the array. */
static json_t *names_of(const cpa_schema_form *form) {
    json_t *names = json_object(), *list = json_array();
    int is_made = names && list;
    for (int i = 0; is_made && i < form->objects.n + form->required.n; i++) {
        const int is_required = i >= form->objects.n;
        const json_t *part = is_required ? form->required.parts[i - form->objects.n]
                                         : json_object_get(form->objects.parts[i], "properties");
        const char *key;
        json_t *value;
        size_t index;
        json_object_foreach((json_t *)(uintptr_t)part, key, value) {
            if (is_made && !json_object_get(names, key)) is_made = json_object_set_new(names, key, json_true()) == 0;
        }
        json_array_foreach((json_t *)(uintptr_t)part, index, value) {
            key = json_string_value(value);
            if (is_made && !json_object_get(names, key)) is_made = json_object_set_new(names, key, json_true()) == 0;
        }
    }
    const char *key;
    json_t *value;
    json_object_foreach(names, key, value) {
        if (is_made) is_made = json_array_append_new(list, json_string(key)) == 0;
    }
    json_decref(names);
    if (is_made) return list;
    json_decref(list);
    return NULL;
}

/* All names but those that are spelled out. */
static cpa_status other_names(const builder *b, const json_t *names, cpa_dfa *out) {
    cpa_graph g = {.most_nodes = CPA_GRAMMAR_MOST_NODES};
    const uint32_t from = cpa_graph_node(&g), to = cpa_graph_node(&g);
    cpa_dfa spelled = {0};
    cpa_effort *effort = b->reader.effort;
    cpa_error why;
    size_t index;
    json_t *name;
    json_array_foreach((json_t *)(uintptr_t)names, index, name) {
        cpa_graph_text(&g, from, json_string_value(name), json_string_length(name), to);
    }
    cpa_status status = g.status;
    why.message[0] = 0;
    if (status == CPA_OK) status = cpa_dfa_of_lengths(0, -1, effort, out, &why);
    if (status == CPA_OK) status = cpa_dfa_of_graph(&g, from, to, effort, &spelled, &why);
    if (status == CPA_OK) status = cpa_dfa_narrow(out, &spelled, 1, effort, &why);
    cpa_graph_release(&g);
    if (status == CPA_OK) return CPA_OK;
    cpa_dfa_release(out);
    return cpa_schema_fail(&b->reader, status, NULL, "properties: their names: %s", why.message);
}

/* A quoted name of an automaton, a colon and a value. */
static cpa_status add_others(builder *b, const cpa_dfa *names, const cpa_schema_list *list, uint32_t from,
                             uint32_t to) {
    cpa_graph *g = b->graph;
    const uint32_t open = cpa_graph_node(g), end = cpa_graph_node(g), colon = cpa_graph_node(g);
    const uint32_t value = cpa_graph_node(g);
    cpa_graph_bytes(g, from, '"', '"', open);
    cpa_grammar_dfa(b->grammar, open, names, 1, end);
    cpa_graph_bytes(g, end, '"', '"', colon);
    cpa_json_colon(b->grammar, colon, value);
    return add_value(b, list, value, to);
}

/* Members whose names are not spelled out, by which of the patterns their names have. */
static cpa_status add_patterned(builder *b, const cpa_schema_form *form, const json_t *names, uint32_t from,
                                uint32_t to) {
    const char *patterns[CPA_MOST_NAME_PATTERNS];
    int n;
    CPA_TRY(cpa_schema_patterns(&b->reader, form, patterns, &n));
    for (unsigned matched = 0; matched < 1u << n; matched++) {
        cpa_schema_list list = {.n = 0};
        CPA_TRY(cpa_schema_of_others(&b->reader, form, matched, &list));
        int is_false = 0;
        for (int i = 0; i < list.n; i++) is_false |= json_is_false(list.schemas[i]);
        if (is_false) continue;
        cpa_dfa dfa = {0}, part = {0};
        cpa_error why;
        cpa_status status = other_names(b, names, &dfa);
        for (int i = 0; i < n && status == CPA_OK; i++) {
            status = cpa_schema_expression(&b->reader, NULL, "patternProperties", patterns[i], 0, &part);
            if (status != CPA_OK) break;
            status = cpa_dfa_narrow(&dfa, &part, !(matched >> i & 1), b->reader.effort, &why);
            if (status != CPA_OK) cpa_schema_fail(&b->reader, status, NULL, "patternProperties: %s", why.message);
        }
        if (status == CPA_OK) status = add_others(b, &dfa, &list, from, to);
        cpa_dfa_release(&dfa);
        CPA_TRY(status);
    }
    return CPA_OK;
}

/* A name that is spelled out, a colon and its value. */
static cpa_status add_member(builder *b, const cpa_schema_form *form, const json_t *name, uint32_t from, uint32_t to) {
    cpa_schema_list list = {.n = 0};
    const uint32_t colon = cpa_graph_node(b->graph), value = cpa_graph_node(b->graph);
    CPA_TRY(cpa_schema_of_member(&b->reader, form, json_string_value(name), &list));
    if (!cpa_json_literal(b->grammar, from, name, colon)) return no_memory(b);
    cpa_json_colon(b->grammar, colon, value);
    return add_value(b, &list, value, to);
}

/* Behind a member: the next one from `member` on, or with `may_close` the end. */
static void add_separators(builder *b, uint32_t behind, uint32_t member, int may_close, uint32_t close) {
    const uint32_t comma = cpa_graph_node(b->graph);
    cpa_graph_bytes(b->graph, behind, ',', ',', comma);
    cpa_graph_call(b->graph, comma, b->json->space, member);
    if (may_close) cpa_graph_call(b->graph, behind, b->json->space, close);
}

/* Member by member in their order, behind the bracket. */
static cpa_status add_members(builder *b, const cpa_schema_form *form, const json_t *names, uint32_t open,
                              uint32_t last) {
    cpa_graph *g = b->graph;
    const size_t n = json_array_size(names);
    const uint32_t close = cpa_graph_node(g), others = cpa_graph_node(g);
    uint32_t member = cpa_graph_node(g); /* where those from number i on begin */
    size_t n_needed = n;                 /* names up to the last that is required */
    int64_t visits = 1;
    for (int i = 0; i < form->required.n; i++) visits += (int64_t)json_array_size(form->required.parts[i]);
    CPA_TRY(cpa_schema_spend(&b->reader, 2 * (int64_t)n * visits));
    while (n_needed > 0 && !cpa_schema_requires(form, json_string_value(json_array_get(names, n_needed - 1)))) {
        n_needed--;
    }
    if (n_needed == 0) cpa_graph_bytes(g, open, '}', '}', last);
    cpa_graph_call(g, open, b->json->space, member);
    cpa_graph_bytes(g, close, '}', '}', last);
    for (size_t i = 0; i < n; i++) {
        const json_t *name = json_array_get(names, i);
        const uint32_t next = cpa_graph_node(g), behind = cpa_graph_node(g);
        CPA_TRY(add_member(b, form, name, member, behind));
        add_separators(b, behind, next, i + 1 >= n_needed, close);
        if (!cpa_schema_requires(form, json_string_value(name))) cpa_graph_empty(g, member, next);
        member = next;
    }
    CPA_TRY(add_patterned(b, form, names, member, others));
    add_separators(b, others, member, 1, close);
    return CPA_OK;
}

static cpa_status add_objects(builder *b, const cpa_schema_form *form, uint32_t from, uint32_t to) {
    if (form->objects.n == 0 && form->required.n == 0) {
        cpa_graph_call(b->graph, from, b->json->object, to);
        return CPA_OK;
    }
    json_t *names = names_of(form);
    if (!names) return no_memory(b);
    const uint32_t open = cpa_graph_node(b->graph);
    cpa_graph_bytes(b->graph, from, '{', '{', open);
    cpa_status status = json_array_size(names) <= MOST_NAMES
                            ? add_members(b, form, names, open, to)
                            : cpa_schema_fail(&b->reader, CPA_UNSUPPORTED, form->objects.parts[0],
                                              "properties: more than %d", MOST_NAMES);
    json_decref(names);
    return status;
}

/* ---- Values ---- */

static cpa_status add_listed(builder *b, const cpa_schema_form *form, uint32_t from, uint32_t to) {
    cpa_graph_string *texts = calloc(json_array_size(form->values.parts[0]) + 1, sizeof *texts);
    cpa_status status = texts ? CPA_OK : no_memory(b);
    int64_t n = 0;
    size_t index = 0;
    for (const json_t *value = NULL; status == CPA_OK; n++) {
        status = cpa_schema_next_value(&b->reader, form, &index, &value);
        if (status != CPA_OK || !value) break;
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        texts[n] = (cpa_graph_string){text, text ? strlen(text) : 0};
        if (!text) status = no_memory(b);
    }
    if (status == CPA_OK) cpa_graph_texts(b->graph, from, texts, n, to);
    for (int64_t i = 0; i < n; i++) free((char *)(uintptr_t)texts[i].text);
    free(texts);
    return status;
}

static cpa_status add_form(builder *b, const cpa_schema_form *form, uint32_t from, uint32_t to) {
    cpa_graph *g = b->graph;
    if (form->values.n > 0) return add_listed(b, form, from, to);
    if (form->kinds & CPA_KIND_NULL) cpa_graph_text(g, from, "null", 4, to);
    if (form->kinds & CPA_KIND_BOOLEAN) {
        cpa_graph_text(g, from, "true", 4, to);
        cpa_graph_text(g, from, "false", 5, to);
    }
    if (form->kinds & CPA_KIND_INTEGER) CPA_TRY(add_numbers(b, form, from, to));
    if (form->kinds & CPA_KIND_STRING) CPA_TRY(add_strings(b, form, from, to));
    if (form->kinds & CPA_KIND_ARRAY) {
        if (form->arrays.n == 0 && form->least_items == 0 && form->most_items < 0) {
            cpa_graph_call(g, from, b->json->array, to);
        } else {
            CPA_TRY(add_arrays(b, form, from, to));
        }
    }
    return form->kinds & CPA_KIND_OBJECT ? add_objects(b, form, from, to) : CPA_OK;
}

static cpa_status build_rule(builder *b, int64_t number) {
    cpa_schema_forms forms;
    const cpa_schema_list list = b->lists[number];
    const cpa_rule rule = b->grammar->rules[b->rules[number]];
    CPA_TRY(cpa_schema_forms_of(&b->reader, &list, &forms));
    cpa_status status = cpa_schema_check_ones(&b->reader, &forms);
    for (int64_t i = 0; status == CPA_OK && i < forms.count; i++) {
        status = add_form(b, &forms.forms[i], rule.from, rule.to);
    }
    free(forms.forms);
    if (status == CPA_OK && b->graph->status != CPA_OK) {
        status = cpa_schema_fail(&b->reader, b->graph->status, list.schemas[0],
                                 "too large: more than %d nodes of a grammar", CPA_GRAMMAR_MOST_NODES);
    }
    return status;
}

cpa_status cpa_schema_build(const json_t *schema, const cpa_json_rules *rules, cpa_grammar *grammar, uint32_t from,
                            uint32_t to, cpa_effort *effort, cpa_error *err) {
    builder b = {.reader = {.root = schema, .made = json_array(), .effort = effort, .err = err},
                 .json = rules,
                 .grammar = grammar,
                 .graph = &grammar->graph};
    cpa_schema_list root = {.n = 0};
    cpa_status status = b.reader.made ? cpa_schema_list_add(&b.reader, &root, schema) : no_memory(&b);
    if (status == CPA_OK) status = add_value(&b, &root, from, to);
    for (int64_t i = 0; status == CPA_OK && i < b.table.count; i++) status = build_rule(&b, i);
    cpa_sequence_table_release(&b.table);
    free(b.rules);
    free(b.lists);
    json_decref(b.reader.made);
    return status;
}
