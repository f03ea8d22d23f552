/* Biases of tokens, as a user writes them. */
#ifndef CPA_LAUNCHER_BIASES_H
#define CPA_LAUNCHER_BIASES_H

#include <stdint.h>

#include <cpattn/model.h>

typedef struct cpa_biases {
    cpa_logit_bias biases[CPA_MOST_LOGIT_BIASES];
    int64_t count;
} cpa_biases;

/* Reads ID:BIAS with commas or white space between them, or those of a file, "@FILE"; an empty text has none. Ids are
 * below the vocabulary, none comes twice, biases are -1e6 to 1e6. Otherwise CPA_INVALID, "WHERE: found ..., expected
 * ...", and *out has what came before it. */
cpa_status cpa_biases_read(const char *where, const char *text, int64_t vocabulary, cpa_biases *out, cpa_error *err);

#endif
