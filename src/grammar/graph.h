/* Graphs whose edges are bytes and calls: nondeterministic automata, and the rules of grammars (recursive transition
 * networks). They grow node by node and edge by edge; what reads them is dfa.h and grammar.h. */
#ifndef CPA_GRAMMAR_GRAPH_H
#define CPA_GRAMMAR_GRAPH_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

#include "src/grammar/plain_text.h"

typedef enum cpa_edge_kind {
    CPA_EDGE_EMPTY = 0,
    CPA_EDGE_BYTES,   /* one byte, lo to hi */
    CPA_EDGE_SPECIAL, /* one byte of the name of a special token (token_trie.h) */
    CPA_EDGE_CALL,    /* what the rule takes */
    CPA_EDGE_BEGIN,   /* nothing, at the beginning of a text alone */
    CPA_EDGE_END      /* nothing, at the end of a text alone */
} cpa_edge_kind;

typedef struct cpa_edge {
    uint32_t to, rule;
    uint32_t next; /* edge of the same node + 1; 0 = none */
    uint8_t kind, lo, hi;
} cpa_edge;

/* One of zeros, but for most_nodes, is empty. Once something did not fit, nothing more is added, and what functions
 * return stands for nothing: whoever builds looks at `status` at the end. */
typedef struct cpa_graph {
    uint32_t *first; /* [n_nodes] edge + 1; 0 = none */
    uint16_t *plain; /* [n_nodes] how many plain characters, whatever they are, a text may go on by (plain_text.h) */
    int64_t n_nodes, nodes_capacity, plain_capacity, most_nodes;
    cpa_edge *edges;
    int64_t n_edges, edges_capacity;
    cpa_status status; /* CPA_NO_MEMORY; CPA_UNSUPPORTED: more than most_nodes, or four times as many edges */
} cpa_graph;

uint32_t cpa_graph_node(cpa_graph *graph);
/* Says of a node that so many plain characters, at most CPA_MOST_PLAIN, may follow; that is not checked. */
void cpa_graph_set_plain(cpa_graph *graph, uint32_t node, int64_t characters);
void cpa_graph_empty(cpa_graph *graph, uint32_t from, uint32_t to);
void cpa_graph_bytes(cpa_graph *graph, uint32_t from, uint8_t lo, uint8_t hi, uint32_t to);
void cpa_graph_call(cpa_graph *graph, uint32_t from, uint32_t rule, uint32_t to);
void cpa_graph_edge(cpa_graph *graph, uint32_t from, cpa_edge edge);

/* These bytes, one after the other. */
void cpa_graph_text(cpa_graph *graph, uint32_t from, const char *text, size_t bytes, uint32_t to);

typedef struct cpa_graph_string {
    const char *text;
    size_t bytes;
} cpa_graph_string;

/* One of these texts, which it sorts: those that begin alike share nodes, so that no byte leads two ways. */
void cpa_graph_texts(cpa_graph *graph, uint32_t from, cpa_graph_string *texts, int64_t n, uint32_t to);

/* One code point from lo to hi, in UTF-8; surrogates, which have none, are left out, and so is U+0000. */
void cpa_graph_characters(cpa_graph *graph, uint32_t from, uint32_t lo, uint32_t hi, uint32_t to);

void cpa_graph_release(cpa_graph *graph);

#endif
