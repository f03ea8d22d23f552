/* What an answer is bound to, as a JSON object with one key: those of cpa_llm_request_options.constraint
 * (cpattn/llm.h). schema.h says which schemas are held to, and regex.h which expressions. */
#ifndef CPA_GRAMMAR_CONSTRAINT_TEXT_H
#define CPA_GRAMMAR_CONSTRAINT_TEXT_H

#include <jansson.h>

#include "src/grammar/recogniser.h"

/* The constraint of a value that is valid by a schema, between two texts that are given. The caller calls json_decref;
 * NULL without memory. */
json_t *cpa_constraint_between(const char *before, const json_t *schema, const char *after);

/* Makes a recogniser of a constraint; the tokens must outlive it. CPA_INVALID for what is no constraint, CPA_UNSUPPORTED
 * for what cannot be held to, CPA_NO_MEMORY; the line says where. */
cpa_status cpa_constraint_compile(const char *text, size_t bytes, const cpa_token_trie *tokens, cpa_recogniser **out,
                                  cpa_error *err);

#endif
