/* Text that comes from outside, made fit to be shown. */
#ifndef CPA_BASE_TEXT_H
#define CPA_BASE_TEXT_H

#include <stddef.h>

/* Copies `text` as one line that no terminal acts on, as far as `bytes` have room: control characters, those of
 * ISO 6429 in UTF-8 too, become \n, \t, \r or \xNN; everything else stays. Returns the length. */
size_t cpa_text_escape(const char *text, char *out, size_t bytes);

/* Bytes of the longest names that cpa_name_distance takes. */
#define CPA_NAME_BYTES 64

/* How many letters must be added, taken away or changed to make one name of another (Levenshtein's distance), "-" and
 * "_" being one letter. */
int cpa_name_distance(const char *a, size_t a_bytes, const char *b, size_t b_bytes);

#endif
