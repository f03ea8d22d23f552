/* Constraints on the tokens of answers: what each is bound to, how far it is, and which tokens may come next. */
#ifndef CPA_GRAMMAR_CONSTRAINTS_H
#define CPA_GRAMMAR_CONSTRAINTS_H

#include <cpattn/constraint.h>

#include "src/grammar/token_trie.h"

/* A vocabulary, and the grammars that were met. All functions here may be called by any threads at once, but those of
 * one constraint by one at a time. */
typedef struct cpa_constraints cpa_constraints;

/* An answer that is bound. */
typedef struct cpa_constraint cpa_constraint;

/* `end_ids` are the tokens that end an answer: allowed where it may end, and alone there where it must. Tokens and ids
 * are copied. Grammars may take most_bytes together, and what is remembered of their answers some times that: the more
 * grammars there are, the less each. CPA_NO_MEMORY. */
cpa_status cpa_constraints_open(const cpa_grammar_token *tokens, int64_t vocabulary, const uint32_t *end_ids,
                                int64_t n_end_ids, int64_t most_bytes, cpa_constraints **out, cpa_error *err);
/* What is open of it stays as it is. NULL does nothing. */
void cpa_constraints_close(cpa_constraints *constraints);

/* Begins an answer that is bound to a text (constraint_text.h, which lists errors too). Grammars of texts that were met
 * of late are kept. CPA_BUSY if those of the answers that are open leave no room for another. */
cpa_status cpa_constraint_open(cpa_constraints *constraints, const char *text, size_t bytes, cpa_constraint **out,
                               cpa_error *err);
/* Begins another one that is bound alike. */
cpa_status cpa_constraint_again(const cpa_constraint *constraint, cpa_constraint **out, cpa_error *err);
void cpa_constraint_close(cpa_constraint *constraint); /* which may be NULL */

/* The answer goes on by a token. CPA_INVALID if it may not: then nothing has happened. CPA_NO_MEMORY. */
cpa_status cpa_constraint_accept(cpa_constraint *constraint, uint32_t token, cpa_error *err);

/* Sets words[(vocabulary + 31) / 32]: bit i % 32 of word i / 32 says whether token i may come next. At least one may.
 * Behind a token that ends it, only such tokens. CPA_NO_MEMORY. */
cpa_status cpa_constraint_mask(cpa_constraint *constraint, uint32_t *words, cpa_error *err);

/* Not 0. Two answers with the same number have the same mask, and so have those that follow from them by the same tokens. */
uint64_t cpa_constraint_key(const cpa_constraint *constraint);

/* The same for an engine (cpa_request): contexts are constraints. */
extern const cpa_constraint_ops cpa_constraint_engine_ops;

/* Whether the answer may end here, or has. */
int cpa_constraint_is_whole(const cpa_constraint *constraint);

#endif
