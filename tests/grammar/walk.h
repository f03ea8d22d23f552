/* Random walks: answers of which every token is drawn from those that a constraint allows. */
#ifndef CPA_TESTS_GRAMMAR_WALK_H
#define CPA_TESTS_GRAMMAR_WALK_H

#include "src/grammar/constraints.h"

/* A vocabulary of bytes, of tokens that begin, end or hold several symbols of JSON, of parts of characters, and of special
 * tokens; the last of them ends an answer. */
typedef struct cpa_walk_vocabulary {
    cpa_grammar_token *tokens;
    int64_t n;
    uint32_t end_id;
    cpa_constraints *constraints;
} cpa_walk_vocabulary;

/* 0 without memory. `bytes_alone`: no tokens of several bytes. */
int cpa_walk_vocabulary_make(cpa_walk_vocabulary *vocabulary, int bytes_alone);
void cpa_walk_vocabulary_release(cpa_walk_vocabulary *vocabulary);

typedef enum cpa_walk_result {
    CPA_WALK_WHOLE = 0,
    CPA_WALK_REFUSED,  /* err says why */
    CPA_WALK_DEAD_END, /* no token was allowed */
    CPA_WALK_ENDLESS,  /* it did not end, though it was led to */
    CPA_WALK_WRONG     /* an allowed token was not accepted */
} cpa_walk_result;

enum { CPA_WALK_TEXT = 1 << 16 };

/* Walks to the end of an answer; its text ends with a zero. */
cpa_walk_result cpa_walk(const cpa_walk_vocabulary *vocabulary, const char *constraint, uint64_t seed,
                         char text[CPA_WALK_TEXT], cpa_error *err);

#endif
