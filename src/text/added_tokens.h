/* Tokens that are looked for in a text as they are written, before anything else cuts it: special ones, and others that
 * were added to a vocabulary. As the added tokens of the package tokenizers. */
#ifndef CPA_TEXT_ADDED_TOKENS_H
#define CPA_TEXT_ADDED_TOKENS_H

#include <stddef.h>

#include "src/text/bytes.h"
#include "src/text/pair_table.h"

enum {
    CPA_ADDED_SINGLE_WORD = 1, /* no character of a word stands beside it */
    CPA_ADDED_LSTRIP = 2,      /* takes the white space before it in */
    CPA_ADDED_RSTRIP = 4       /* and that behind it */
};

/* Tokens as a tree of their bytes; one of zeros has none. Does not change once they are added. */
typedef struct cpa_added_tokens {
    cpa_pair_table children; /* pairs of a node (0: the root) and a byte: the node below */
    struct cpa_added_token {
        uint32_t id; /* CPA_NO_ID: no token ends here */
        int flags;
    } * nodes;
    int64_t count, capacity;
} cpa_added_tokens;

/* Adds a token, of at least one byte; a later one of the same bytes replaces an earlier one. 0 without memory, else
 * 1. */
int cpa_added_tokens_add(cpa_added_tokens *tokens, const char *text, size_t bytes, uint32_t id, int flags);
void cpa_added_tokens_release(cpa_added_tokens *tokens);

/* The pieces of a text, one after the other. */
typedef struct cpa_added_search {
    const cpa_added_tokens *tokens;
    const char *text;
    size_t bytes, at, from; /* bytes of `text`; where to look on; where the next part begins */
    size_t spaces_end;      /* end of the white space that the last token with CPA_ADDED_RSTRIP took in */
    size_t token_end;       /* end of the token found behind the part before */
    uint32_t token_id;
} cpa_added_search;

cpa_added_search cpa_added_tokens_begin(const cpa_added_tokens *tokens, const char *text, size_t bytes);
/* The next piece, [*begin, *end): *id is that of a token, or CPA_NO_ID for text between tokens. 0 behind the last. Of
 * tokens that begin at one place the longest is taken. White space that one token took in may hold further tokens:
 * these are pieces too, which begin before the end of the piece before. */
int cpa_added_tokens_next(cpa_added_search *search, size_t *begin, size_t *end, uint32_t *id);

#endif
