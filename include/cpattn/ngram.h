/* Drafts from what a request has already: the tokens that followed the last time that it had the same few tokens in a
 * row (prompt lookup: A. Saxena, https://github.com/apoorvumang/prompt-lookup-decoding, 2023). The engine drafts with
 * it where its options say so (CPA_DRAFT_NGRAM); a model's own drafter may use it too. Pure logic; one thread a
 * history. */
#ifndef CPATTN_NGRAM_H
#define CPATTN_NGRAM_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/api.h>
#include <cpattn/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Most tokens of an n-gram. */
#define CPA_NGRAM_MAX 16

typedef struct cpa_ngram_options {
    size_t size;
    int32_t min_tokens, max_tokens; /* tokens of the n-grams that are looked for, the longest first; 0 = 2 and 4 */
    int32_t branches;               /* most branches of a tree; 0 = 1 */
} cpa_ngram_options;

/* The tokens of one request, indexed by the n-grams that end at each of them. */
typedef struct cpa_ngram cpa_ngram;

/* Most branches of a tree. */
#define CPA_NGRAM_BRANCHES 64

/* An empty history. options NULL: defaults. CPA_INVALID unless 1 <= min_tokens <= max_tokens <= CPA_NGRAM_MAX, and
 * 0 <= branches <= CPA_NGRAM_BRANCHES. */
CPA_API cpa_status cpa_ngram_create(const cpa_ngram_options *options, cpa_ngram **out, cpa_error *err);
CPA_API void cpa_ngram_destroy(cpa_ngram *ngram);

/* Takes in the n tokens that come next. A token costs the same however long the history is: about 4 bytes, and 8 to 16
 * more for each length of n-grams, with branches another 4. CPA_NO_MEMORY, also beyond 2^32 - 2 tokens, and CPA_INVALID
 * for n < 0 or what is NULL: nothing is taken in then. */
CPA_API cpa_status cpa_ngram_add(cpa_ngram *ngram, const uint32_t *tokens, int64_t n, cpa_error *err);
/* How many have been taken in. */
CPA_API int64_t cpa_ngram_count(const cpa_ngram *ngram);

/* Writes the `most` tokens that are expected next, and returns how many there are: `most`, or 0 where no n-gram that
 * the history ends with was there before, or an argument is NULL. Of several places the last one counts; where its
 * continuation is shorter than `most`, as in a text that repeats itself, it goes on with itself. */
CPA_API int64_t cpa_ngram_draft(const cpa_ngram *ngram, int64_t most, uint32_t *drafts);

/* The same for a tree of at most `branches` such chains, of `most` / branches tokens each, at least one: what followed
 * the last times that begin with different tokens, the longest n-gram first and of its places the last. parents[i] is
 * the token that drafts[i] comes behind, a lower one; -1: the history. How many there are, of all chains together; 0:
 * none. It looks at 64 places, however many there are. */
CPA_API int64_t cpa_ngram_draft_tree(const cpa_ngram *ngram, int64_t most, uint32_t *drafts, int32_t *parents);

#ifdef __cplusplus
}
#endif
#endif
