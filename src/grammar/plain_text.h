/* Plain characters: those that any JSON string has as they are, all but quotes, backslashes and control characters. Most of
 * what tokens and free strings are made of, so that whole branches of a vocabulary need no look. */
#ifndef CPA_GRAMMAR_PLAIN_TEXT_H
#define CPA_GRAMMAR_PLAIN_TEXT_H

#include <stddef.h>
#include <stdint.h>

enum {
    CPA_MOST_PLAIN = 0xfffe,
    CPA_NOT_PLAIN = 0xffff /* more than any node allows */
};

/* Whether some plain character has this byte. */
int cpa_is_plain_byte(uint8_t byte);

/* plain[i]: how many characters there are from byte i on, where one begins and all are plain, the last of which may be cut;
 * else CPA_NOT_PLAIN. */
void cpa_count_plain(const char *text, size_t bytes, uint16_t *plain);

#endif
