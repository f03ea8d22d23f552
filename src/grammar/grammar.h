/* Grammars: rules, each a graph between two nodes, which may call each other and themselves. First they are built; then
 * they are closed, and do not change any more. */
#ifndef CPA_GRAMMAR_GRAMMAR_H
#define CPA_GRAMMAR_GRAMMAR_H

#include "src/grammar/dfa.h"
#include "src/grammar/graph.h"

enum {
    CPA_GRAMMAR_MOST_DEEP = 128, /* calls inside of each other: of a closed grammar nothing is deeper */
    CPA_GRAMMAR_MOST_NODES = 400000
};

typedef struct cpa_rule {
    uint32_t from, to;
} cpa_rule;

typedef struct cpa_grammar {
    cpa_graph graph; /* once it is closed, of each node what is plain, and no edges */
    cpa_rule *rules;
    int64_t n_rules, rules_capacity;
    /* Once it is closed: edges[first[node]] to edges[first[node + 1]]. There are none but those by which a text can end
     * in CPA_GRAMMAR_MOST_DEEP calls. */
    uint32_t *first;
    cpa_edge *edges;
    uint8_t *needs; /* [n_nodes] calls inside of each other that the rest of the rule needs at least */
} cpa_grammar;

/* What a node needs if its rule cannot end. */
enum { CPA_NEEDS_TOO_MUCH = 255 };

void cpa_grammar_begin(cpa_grammar *grammar);

/* A rule with nothing in it yet; where that does not fit graph.status is set. Rule 0 is what is taken. */
uint32_t cpa_grammar_rule(cpa_grammar *grammar);

/* What an automaton takes, as it is or, with `in_json`, as the inside of a JSON string: with escapes for what needs
 * them, each in one form (the short one, if there is one). */
void cpa_grammar_dfa(cpa_grammar *grammar, uint32_t from, const cpa_dfa *dfa, int in_json, uint32_t to);

/* `bytes[b]`: whether some token is this byte alone. Others are left out: what begins with them might never go on.
 * CPA_UNSUPPORTED if nothing is left that ends, or it was too large or too much work; CPA_NO_MEMORY. */
cpa_status cpa_grammar_close(cpa_grammar *grammar, const uint8_t bytes[256], cpa_effort *effort, cpa_error *err);

void cpa_grammar_release(cpa_grammar *grammar);

#endif
