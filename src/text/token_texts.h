/* What each id stands for in a text. */
#ifndef CPA_TEXT_TOKEN_TEXTS_H
#define CPA_TEXT_TOKEN_TEXTS_H

#include <stddef.h>
#include <stdint.h>

#include "src/text/bytes.h"

/* What stands in place of bytes that are no character. */
typedef enum cpa_broken_bytes {
    CPA_BROKEN_PARTS = 0, /* one U+FFFD for each stretch that begins like a character (Rust's from_utf8_lossy) */
    CPA_BROKEN_BYTES,     /* one for each byte (sentencepiece) */
    CPA_BROKEN_RUNS       /* one for each byte of all tokens of bytes side by side (tokenizers' ByteFallback) */
} cpa_broken_bytes;

typedef enum cpa_token_kind {
    CPA_TOKEN_NONE = 0, /* no token has this id */
    CPA_TOKEN_TEXT,
    CPA_TOKEN_SPACED, /* a text with spaces that stand for themselves: it keeps them as the first token too */
    CPA_TOKEN_BYTE    /* a byte of a character that has no id */
} cpa_token_kind;

typedef struct cpa_token_text {
    uint32_t at, bytes; /* place and length of the token's text in `texts` */
    uint8_t kind;       /* a cpa_token_kind */
    uint8_t is_special;
} cpa_token_text;

/* One of zeros is empty. */
typedef struct cpa_token_texts {
    cpa_token_text *tokens; /* by id */
    int64_t count, capacity;
    cpa_bytes texts;
    cpa_broken_bytes broken;
    int strips;             /* leading spaces of a text that are no part of it */
    int first_has_no_space; /* not 0: no space of the first token of a text is part of it, but see CPA_TOKEN_SPACED */
} cpa_token_texts;

/* Sets what an id stands for; 0 without memory (4 GiB of texts is too much), else 1. */
int cpa_token_texts_set(cpa_token_texts *texts, uint32_t id, cpa_token_kind kind, const char *text, size_t bytes);
void cpa_token_texts_release(cpa_token_texts *texts);

/* NULL if no token has this id. */
const cpa_token_text *cpa_token_texts_find(const cpa_token_texts *texts, uint32_t id);

#endif
