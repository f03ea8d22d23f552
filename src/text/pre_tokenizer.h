/* Cuts a text into the words that are encoded one by one, as the pre-tokenizers of the package tokenizers do. */
#ifndef CPA_TEXT_PRE_TOKENIZER_H
#define CPA_TEXT_PRE_TOKENIZER_H

#include "src/text/json_part.h"

enum { CPA_PRE_TOKENIZER_STEPS = 8 };

/* Steps: each cuts the pieces of the step before. One of zeros leaves a text in one piece. Does not change once it is
 * read. */
typedef struct cpa_pre_tokenizer {
    int count;
    struct cpa_pre_tokenizer_step *steps[CPA_PRE_TOKENIZER_STEPS];
} cpa_pre_tokenizer;

/* Reads the object under "pre_tokenizer". CPA_UNSUPPORTED for steps of other types. */
cpa_status cpa_pre_tokenizer_read(const cpa_json *file, cpa_pre_tokenizer *out, cpa_error *err);
void cpa_pre_tokenizer_release(cpa_pre_tokenizer *pre_tokenizer);

/* Whether it treats the beginning of a text otherwise than its other pieces. */
int cpa_pre_tokenizer_knows_first(const cpa_pre_tokenizer *pre_tokenizer);

/* Takes a word, which lives during the call; a failure ends the cutting. */
typedef cpa_status (*cpa_word_fn)(void *ctx, const char *word, size_t bytes, cpa_error *err);

/* Gives the words of a valid text in order; none is empty. `is_first`: nothing was before it. */
cpa_status cpa_pre_tokenizer_cut(const cpa_pre_tokenizer *pre_tokenizer, const char *text, size_t bytes, int is_first,
                                 cpa_word_fn fn, void *ctx, cpa_error *err);

#endif
