/* What may come next in an answer that a grammar takes, byte by byte and token by token.
 *
 * A state is a set of places: a node of the grammar, and the calls that it is in. States are numbered as they are met,
 * and remember where each byte leads and which tokens may follow, so that all answers with one grammar share that work.
 * Every place can reach the end of an answer (cpa_grammar_close), and every byte that one takes is a token: so there is
 * always a token that may follow, or the answer is whole. */
#ifndef CPA_GRAMMAR_RECOGNISER_H
#define CPA_GRAMMAR_RECOGNISER_H

#include "src/grammar/grammar.h"
#include "src/grammar/token_trie.h"

/* One thread at a time. */
typedef struct cpa_recogniser cpa_recogniser;

/* An answer as far as it is. */
typedef struct cpa_recognition cpa_recognition;

/* The closed grammar, which is the recogniser's from now on, also on failure; the tokens must outlive it. */
cpa_status cpa_recogniser_open(cpa_grammar *grammar, const cpa_token_trie *tokens, cpa_recogniser **out,
                               cpa_error *err);
void cpa_recogniser_close(cpa_recogniser *recogniser); /* which may be NULL; no answer is left */

/* What its grammar takes of memory. */
int64_t cpa_recogniser_bytes(const cpa_recogniser *recogniser);

/* States may take so many bytes before all are forgotten but those of answers; 64 MiB if it is not said. */
void cpa_recogniser_set_room(cpa_recogniser *recogniser, int64_t bytes);

/* An answer with nothing in it. Here and below: CPA_NO_MEMORY; CPA_UNSUPPORTED if there are too many ways in which the
 * answer may go on. */
cpa_status cpa_recognition_begin(cpa_recogniser *recogniser, cpa_recognition **out, cpa_error *err);
void cpa_recognition_end(cpa_recognition *answer); /* which may be NULL */

/* Goes on by these bytes. *taken is 0, and nothing has happened, if the grammar does not take them. */
cpa_status cpa_recognition_add(cpa_recognition *answer, const char *text, size_t bytes, int *taken, cpa_error *err);
/* The same by a token. */
cpa_status cpa_recognition_add_token(cpa_recognition *answer, uint32_t token, int *taken, cpa_error *err);

/* Whether the answer may end here. */
int cpa_recognition_is_whole(const cpa_recognition *answer);

/* The tokens that may follow: bit i % 32 of word i / 32, of (vocabulary + 31) / 32 words, until the next call. */
cpa_status cpa_recognition_mask(cpa_recognition *answer, const uint32_t **mask, cpa_error *err);

/* Two answers of one recogniser with the same number may go on alike, now and later; numbers are not used again. */
uint64_t cpa_recognition_key(const cpa_recognition *answer);

#endif
