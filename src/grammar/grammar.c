#include "src/grammar/grammar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"

void cpa_grammar_begin(cpa_grammar *grammar) {
    *grammar = (cpa_grammar){.graph = {.most_nodes = CPA_GRAMMAR_MOST_NODES}};
}

uint32_t cpa_grammar_rule(cpa_grammar *grammar) {
    cpa_graph *graph = &grammar->graph;
    if (graph->status != CPA_OK) return 0;
    if (!cpa_array_reserve(&grammar->rules, &grammar->rules_capacity, grammar->n_rules + 1, sizeof *grammar->rules)) {
        graph->status = CPA_NO_MEMORY;
        return 0;
    }
    grammar->rules[grammar->n_rules].from = cpa_graph_node(graph);
    grammar->rules[grammar->n_rules].to = cpa_graph_node(graph);
    return (uint32_t)grammar->n_rules++;
}

/* ---- Automata ---- */

/* A byte that must not be in a JSON string as it is. */
static void add_escape(cpa_graph *graph, uint32_t from, uint8_t byte, uint32_t to) {
    static const char names[] = "\"\\bfnrt", codes[] = "\"\\\b\f\n\r\t";
    const char *code = memchr(codes, byte, sizeof codes - 1);
    char text[8];
    snprintf(text, sizeof text, "\\u%04x", byte);
    if (code) snprintf(text, sizeof text, "\\%c", names[code - codes]);
    cpa_graph_text(graph, from, text, strlen(text), to);
}

static void add_json_range(cpa_graph *graph, uint32_t from, int lo, int hi, uint32_t to) {
    int first = lo;
    for (int byte = lo; byte <= hi; byte++) {
        if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
        if (first < byte) cpa_graph_bytes(graph, from, (uint8_t)first, (uint8_t)(byte - 1), to);
        first = byte + 1;
        add_escape(graph, from, (uint8_t)byte, to);
    }
    if (first <= hi) cpa_graph_bytes(graph, from, (uint8_t)first, (uint8_t)hi, to);
}

void cpa_grammar_dfa(cpa_grammar *grammar, uint32_t from, const cpa_dfa *dfa, int in_json, uint32_t to) {
    cpa_graph *graph = &grammar->graph;
    if (dfa->n_states == 0) return;
    const uint32_t first = cpa_graph_node(graph);
    for (int64_t s = 1; s < dfa->n_states; s++) cpa_graph_node(graph);
    cpa_graph_empty(graph, from, first);
    for (int64_t s = 0; s < dfa->n_states && graph->status == CPA_OK; s++) {
        const uint32_t node = first + (uint32_t)s;
        if (dfa->accepts[s]) cpa_graph_empty(graph, node, to);
        for (int64_t e = dfa->first_edge[s]; e < dfa->first_edge[s + 1]; e++) {
            const struct cpa_dfa_edge *edge = &dfa->edges[e];
            if (in_json) {
                add_json_range(graph, node, edge->lo, edge->hi, first + edge->to);
            } else {
                cpa_graph_bytes(graph, node, edge->lo, edge->hi, first + edge->to);
            }
        }
    }
}

/* ---- Closing ---- */

/* The last of the nodes that do nothing but lead on. */
static uint32_t skip(const cpa_graph *graph, uint32_t node) {
    for (int i = 0; i < CPA_GRAMMAR_MOST_DEEP; i++) {
        const uint32_t e = graph->first[node];
        if (!e || graph->edges[e - 1].next || graph->edges[e - 1].kind != CPA_EDGE_EMPTY) break;
        node = graph->edges[e - 1].to;
    }
    return node;
}

/* What the way over an edge needs. A call that returns to the end of its rule leaves nothing to be remembered. */
static int edge_needs(const cpa_grammar *grammar, const uint8_t *is_end, const cpa_edge *edge) {
    const int rest = grammar->needs[edge->to];
    if (edge->kind != CPA_EDGE_CALL || rest == CPA_NEEDS_TOO_MUCH) return rest;
    int called = grammar->needs[grammar->rules[edge->rule].from];
    if (called < CPA_GRAMMAR_MOST_DEEP && !is_end[edge->to]) called++;
    return called > rest ? called : rest;
}

/* The least that each node needs: from the ends backwards until nothing changes. Nodes are mostly made in the order of
 * the text, so that a pass from the last to the first settles almost all. */
static void find_needs(cpa_grammar *grammar, const uint8_t *is_end, cpa_effort *effort) {
    const cpa_graph *graph = &grammar->graph;
    memset(grammar->needs, CPA_NEEDS_TOO_MUCH, (size_t)graph->n_nodes);
    for (int64_t r = 0; r < grammar->n_rules; r++) grammar->needs[grammar->rules[r].to] = 0;
    for (int is_changed = 1; is_changed && cpa_effort_spend(effort, graph->n_edges);) {
        is_changed = 0;
        for (int64_t node = graph->n_nodes - 1; node >= 0; node--) {
            for (uint32_t e = graph->first[node]; e; e = graph->edges[e - 1].next) {
                const int needs = edge_needs(grammar, is_end, &graph->edges[e - 1]);
                if (needs >= grammar->needs[node] || needs >= CPA_GRAMMAR_MOST_DEEP) continue;
                grammar->needs[node] = (uint8_t)needs;
                is_changed = 1;
            }
        }
    }
}

/* Leaves the bytes of edges that tokens have. */
static int keep_tokens(cpa_graph *graph, const uint8_t bytes[256]) {
    for (int64_t node = 0; node < graph->n_nodes; node++) {
        uint32_t e = graph->first[node];
        graph->first[node] = 0;
        for (uint32_t next; e; e = next) {
            const cpa_edge edge = graph->edges[e - 1];
            next = edge.next;
            int lo = edge.kind == CPA_EDGE_BYTES ? edge.lo : 256;
            if (lo == 256) cpa_graph_edge(graph, (uint32_t)node, edge);
            for (; lo <= edge.hi; lo++) {
                int hi = lo - 1;
                while (hi < edge.hi && bytes[hi + 1]) hi++;
                if (hi >= lo) cpa_graph_bytes(graph, (uint32_t)node, (uint8_t)lo, (uint8_t)hi, edge.to);
                if (hi > lo) lo = hi;
            }
        }
    }
    return graph->status == CPA_OK;
}

/* The edges by which a text can end, node by node. */
static int collect(cpa_grammar *grammar) {
    const cpa_graph *graph = &grammar->graph;
    int64_t n = 0, capacity = 0;
    for (int64_t node = 0; node < graph->n_nodes; node++) {
        grammar->first[node] = (uint32_t)n;
        for (uint32_t e = graph->first[node]; e; e = graph->edges[e - 1].next) {
            const cpa_edge edge = graph->edges[e - 1];
            const int called = edge.kind == CPA_EDGE_CALL ? grammar->needs[grammar->rules[edge.rule].from] : 0;
            if (called == CPA_NEEDS_TOO_MUCH || grammar->needs[edge.to] == CPA_NEEDS_TOO_MUCH) continue;
            if (!cpa_array_reserve(&grammar->edges, &capacity, n + 1, sizeof edge)) return 0;
            grammar->edges[n++] = edge;
        }
    }
    grammar->first[graph->n_nodes] = (uint32_t)n;
    return 1;
}

cpa_status cpa_grammar_close(cpa_grammar *grammar, const uint8_t bytes[256], cpa_effort *effort, cpa_error *err) {
    cpa_graph *graph = &grammar->graph;
    cpa_status status = graph->status;
    uint8_t *is_end = status == CPA_OK ? calloc((size_t)graph->n_nodes, 1) : NULL;
    grammar->needs = is_end ? malloc((size_t)graph->n_nodes) : NULL;
    grammar->first = grammar->needs ? malloc(((size_t)graph->n_nodes + 1) * sizeof *grammar->first) : NULL;
    if (status == CPA_OK) status = grammar->first && keep_tokens(graph, bytes) ? CPA_OK : CPA_NO_MEMORY;
    if (status == CPA_OK) {
        for (int64_t r = 0; r < grammar->n_rules; r++) is_end[grammar->rules[r].to] = 1;
        for (int64_t e = 0; e < graph->n_edges; e++) graph->edges[e].to = skip(graph, graph->edges[e].to);
        find_needs(grammar, is_end, effort);
        if (!collect(grammar)) status = CPA_NO_MEMORY;
        for (int byte = 0; byte < 256; byte++) {
            if (bytes[byte] || !cpa_is_plain_byte((uint8_t)byte)) continue;
            memset(graph->plain, 0, (size_t)graph->n_nodes * sizeof *graph->plain); /* some are left out */
        }
        free(graph->first);
        free(graph->edges);
        graph->first = NULL;
        graph->edges = NULL;
    }
    free(is_end);
    if (status == CPA_NO_MEMORY) return cpa_fail(err, status, "no memory for a grammar");
    if (effort->left == 0) return cpa_effort_fail(err);
    if (status != CPA_OK) {
        return cpa_fail(err, status, "too large: more than %d nodes of a grammar", CPA_GRAMMAR_MOST_NODES);
    }
    if (grammar->needs[grammar->rules[0].from] != CPA_NEEDS_TOO_MUCH) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "no answer of at most %d levels is allowed, or the tokens cannot write any",
                    CPA_GRAMMAR_MOST_DEEP);
}

void cpa_grammar_release(cpa_grammar *grammar) {
    cpa_graph_release(&grammar->graph);
    free(grammar->rules);
    free(grammar->first);
    free(grammar->edges);
    free(grammar->needs);
    *grammar = (cpa_grammar){.n_rules = 0};
}
