/* What every grammar of JSON has: space, strings, numbers, and values of any kind.
 *
 * Space is bounded, so that an answer comes to its end: none or one blank behind a colon; behind a comma, and inside of
 * brackets that are not empty, none, one blank, or a line end and up to 32 blanks. Free strings may have any character
 * but U+0000, with all escapes; free numbers up to 15 digits before and behind the point, and exponents of two. */
#ifndef CPA_GRAMMAR_JSON_RULES_H
#define CPA_GRAMMAR_JSON_RULES_H

#include <jansson.h>

#include "src/grammar/grammar.h"

typedef struct cpa_json_rules {
    uint32_t space, character, string, integer, number, value, object, array;
} cpa_json_rules;

/* Adds the rules to a grammar that has its rule 0. */
cpa_status cpa_json_rules_add(cpa_grammar *grammar, cpa_effort *effort, cpa_json_rules *out, cpa_error *err);

/* A value as it is, without space. 0 without memory, else 1. */
int cpa_json_literal(cpa_grammar *grammar, uint32_t from, const json_t *value, uint32_t to);

/* A colon, and the space behind it. */
void cpa_json_colon(cpa_grammar *grammar, uint32_t from, uint32_t to);

#endif
