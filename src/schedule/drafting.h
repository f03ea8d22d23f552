/* Who guesses the next tokens of a sequence, and what it knows of the sequence so far. Pure logic. */
#ifndef CPA_DRAFTING_H
#define CPA_DRAFTING_H

#include <cpattn/model.h>

typedef struct cpa_drafting_options {
    int32_t most;         /* drafts of a sequence in a step; 0: nothing is drafted */
    int32_t chains_alone; /* not 0: of each tree the first chain alone is taken */
    int32_t is_told;      /* not 0: the draft of a sequence comes with its last token (cpa_scheduler_guess) */
    int32_t ngram_min, ngram_max, ngram_branches; /* options of n-grams, as cpa_ngram_options; unused with `draft` */
    int64_t (*draft)(void *ctx, const cpa_draft_args *args); /* as cpa_model.draft; NULL: n-grams */
    void (*draft_end)(void *ctx, uint64_t request);
    void *ctx;
} cpa_drafting_options;

/* What is known of one request. */
typedef struct cpa_drafting cpa_drafting;

/* The options must outlive it. NULL without memory. */
cpa_drafting *cpa_drafting_create(const cpa_drafting_options *options, uint64_t request);
void cpa_drafting_destroy(cpa_drafting *drafting);

/* How many tokens of the request it knows. */
int64_t cpa_drafting_known(const cpa_drafting *drafting);
/* The n tokens that follow. Without memory for them the request is drafted for no more. */
void cpa_drafting_learn(cpa_drafting *drafting, const uint32_t *tokens, int64_t n);
/* At most so many tokens that are expected next, and options->most; how many there are. *parents is NULL for a chain.
 * Both stay until it is asked again. */
int64_t cpa_drafting_ask(cpa_drafting *drafting, int64_t most, const uint32_t **drafts, const int32_t **parents);

#endif
