/* Who drafts, as a user says it: "off", "mtp:1" for the module of the model that predicts the token after next,
 * "ngram:K", or "ngram:KxB" for a tree; behind these two may stand ":MIN..MAX". */
#ifndef CPA_LAUNCHER_SPECULATIVE_H
#define CPA_LAUNCHER_SPECULATIVE_H

#include <cpattn/engine.h>

typedef struct cpa_speculative {
    cpa_drafter drafter;
    int32_t draft_tokens;         /* most drafts of a sequence in a step: K, or K * B */
    int32_t ngram_branches;       /* B; 0: a chain */
    int32_t ngram_min, ngram_max; /* tokens of an n-gram; 0: the engine's default */
} cpa_speculative;

/* CPA_INVALID, "WHERE: found ..., expected ...", leaves *out alone. */
cpa_status cpa_speculative_parse(const char *where, const char *text, cpa_speculative *out, cpa_error *err);

#endif
