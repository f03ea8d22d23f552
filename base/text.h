/* Text that comes from outside, made fit to be shown. */
#ifndef CPA_BASE_TEXT_H
#define CPA_BASE_TEXT_H

#include <stddef.h>

/* Copies `text` as one line that no terminal acts on, as far as `bytes` have room: control characters, those of
 * ISO 6429 in UTF-8 too, become \n, \t, \r or \xNN; everything else stays. Returns the length. */
size_t cpa_text_escape(const char *text, char *out, size_t bytes);

#endif
