/* The versions of Unicode that the package tokenizers follows: 9 in its normal forms, 16 in patterns and words, whatever
 * version the libraries here are of. */
#ifndef CPA_TEXT_UNICODE_H
#define CPA_TEXT_UNICODE_H

#include "src/text/bytes.h"

/* Whether a code point, which has a normal form or a place among combining marks today, has none there: it stays as it
 * is, and nothing moves across it or composes with it. */
int cpa_unicode_is_inert(uint32_t code);

/* A code point of the same category and script that older versions know too, as many bytes long in UTF-8; `code` itself
 * if they know that. */
uint32_t cpa_unicode_stand_in(uint32_t code);

/* A valid text with stand-ins for patterns: `text` itself if it needs none, else a copy in *out, in place of what was
 * there. NULL without memory. */
const char *cpa_unicode_for_patterns(const char *text, size_t bytes, cpa_bytes *out);

#endif
