/* UTF-8: characters of valid texts, and what is valid in others. */
#ifndef CPA_TEXT_UTF8_H
#define CPA_TEXT_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define CPA_UTF8_REPLACEMENT "\xef\xbf\xbd" /* U+FFFD, which stands for bytes that are no character */

enum { CPA_UTF8_MAX = 4 }; /* bytes of a character */

/* Of the character that begins at text[0] of `bytes` bytes, at least one: its bytes if it is whole; 0 if it is valid as
 * far as it goes and the text ends within; else minus the number of bytes that can be the beginning of no character,
 * which are the ones that one U+FFFD replaces (The Unicode Standard, section 3.9, "maximal subparts"). */
int cpa_utf8_next(const char *text, size_t bytes);

/* How many bytes from the beginning are valid; all of them in a valid text. */
size_t cpa_utf8_valid(const char *text, size_t bytes);

/* The bytes of a character by its first one, in a valid text. */
static inline size_t cpa_utf8_length(char first) {
    const unsigned char lead = (unsigned char)first;
    return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* Where the character begins that ends at `end`, behind the first byte of a valid text. */
static inline size_t cpa_utf8_back(const char *text, size_t end) {
    do end--;
    while (end > 0 && ((unsigned char)text[end] & 0xc0) == 0x80);
    return end;
}

/* The code point of a character of a valid text. */
uint32_t cpa_utf8_code(const char *text);

/* Writes a code point, which is a character; returns its bytes. */
size_t cpa_utf8_write(uint32_t code, char out[CPA_UTF8_MAX]);

/* Whether it is white space (property White_Space). */
int cpa_utf8_is_space(uint32_t code);

#endif
