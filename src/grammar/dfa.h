/* Deterministic automata over bytes: of expressions, and what follows of two of them. */
#ifndef CPA_GRAMMAR_DFA_H
#define CPA_GRAMMAR_DFA_H

#include "src/grammar/effort.h"
#include "src/grammar/graph.h"

/* Begins in state 0. Every state can reach one that accepts, unless the automaton takes nothing: then n_states is 0. */
typedef struct cpa_dfa {
    int64_t n_states;
    int64_t *first_edge; /* [n_states + 1] */
    struct cpa_dfa_edge {
        uint32_t to;
        uint8_t lo, hi;
    } * edges;        /* edges of each state in the order of bytes; no byte is in two of them */
    uint8_t *accepts; /* [n_states] */
} cpa_dfa;

enum { CPA_DFA_MOST_STATES = 20000 };

/* What a graph without calls takes from one node to another. Here and below: CPA_UNSUPPORTED if that has more states
 * than CPA_DFA_MOST_STATES, or is more work than there is effort left, CPA_NO_MEMORY; the caller releases *out. */
cpa_status cpa_dfa_of_graph(const cpa_graph *graph, uint32_t from, uint32_t to, cpa_effort *effort, cpa_dfa *out,
                            cpa_error *err);

/* What an expression takes: texts that have a part which it takes or, with is_whole, those that it takes whole. Errors
 * of cpa_regex_build too. */
cpa_status cpa_dfa_of_regex(const char *expression, size_t bytes, int is_whole, cpa_effort *effort, cpa_dfa *out,
                            cpa_error *err);

/* Texts of so many characters; most < 0: any number. */
cpa_status cpa_dfa_of_lengths(int64_t least, int64_t most, cpa_effort *effort, cpa_dfa *out, cpa_error *err);

/* What both take; or, with `minus`, what a takes and b does not. */
cpa_status cpa_dfa_join(const cpa_dfa *a, const cpa_dfa *b, int minus, cpa_effort *effort, cpa_dfa *out,
                        cpa_error *err);

/* *a becomes what it and *b, which is released, take together, or is released too. */
cpa_status cpa_dfa_narrow(cpa_dfa *a, cpa_dfa *b, int minus, cpa_effort *effort, cpa_error *err);

int cpa_dfa_takes(const cpa_dfa *dfa, const char *text, size_t bytes);

void cpa_dfa_release(cpa_dfa *dfa);

#endif
