/* Regular expressions in what ECMA-262 (with the flag u, as JSON Schema has them), Python and Rust have in common:
 * alternatives, groups, classes, \d \w \s \D \W \S, \p{category}, quantifiers, ^ and $. */
#ifndef CPA_GRAMMAR_REGEX_H
#define CPA_GRAMMAR_REGEX_H

#include "src/grammar/effort.h"
#include "src/grammar/graph.h"

/* Adds what an expression, valid UTF-8, takes between two nodes. CPA_INVALID if it is none; CPA_UNSUPPORTED for what is
 * no regular language or not the same everywhere (looking around, references back, word boundaries, flags); the line
 * names the byte. Whether all fitted is a matter of graph->status. */
cpa_status cpa_regex_build(const char *expression, size_t bytes, cpa_graph *graph, uint32_t from, uint32_t to,
                           cpa_effort *effort, cpa_error *err);

#endif
