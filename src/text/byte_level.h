/* Bytes as characters that can be seen, as GPT-2 has them: vocabularies of byte-level tokens are written so. Bytes
 * that are letters, digits or signs of Latin-1 are these characters; the others are, in order, U+0100 and what
 * follows. */
#ifndef CPA_TEXT_BYTE_LEVEL_H
#define CPA_TEXT_BYTE_LEVEL_H

#include <stddef.h>

#include "src/text/bytes.h"

/* Adds the characters of n bytes; 0 without memory, else 1. */
int cpa_byte_level_write(const char *bytes, size_t n, cpa_bytes *out);

/* Adds the bytes of a valid text's characters, or the text as it is if one of them stands for no byte; 0 without
 * memory, else 1. */
int cpa_byte_level_read(const char *text, size_t n, cpa_bytes *out);

#endif
