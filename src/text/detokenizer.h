/* Tokens become text one by one: bytes that do not make whole characters yet wait for those of the next tokens. */
#ifndef CPA_TEXT_DETOKENIZER_H
#define CPA_TEXT_DETOKENIZER_H

#include "src/text/token_texts.h"

typedef struct cpa_detokenizer {
    const cpa_token_texts *texts;
    int skip_special;
    int waits;         /* bytes of a run wait for all of it, where one broken byte makes all broken */
    int has_begun;     /* a token has been taken */
    int strips_left;   /* leading spaces that are no part of the text */
    cpa_bytes pending; /* bytes of characters that are not complete */
} cpa_detokenizer;

/* `is_begin`: the tokens are those at the beginning of a text. Release it with cpa_bytes_release(&pending). */
cpa_detokenizer cpa_detokenizer_begin(const cpa_token_texts *texts, int skip_special, int waits, int is_begin);

/* Add what can be said after one more token, and at the end, to *out; 0 without memory, else 1. */
int cpa_detokenizer_push(cpa_detokenizer *detokenizer, uint32_t id, cpa_bytes *out);
int cpa_detokenizer_finish(cpa_detokenizer *detokenizer, cpa_bytes *out);

#endif
