/* What the package tokenizers knows otherwise of Unicode than the libraries here do: tables of unicode_tables.c, which
 * tests/data/make_unicode.py writes. */
#ifndef CPA_TEXT_UNICODE_TABLES_H
#define CPA_TEXT_UNICODE_TABLES_H

#include <stdint.h>

typedef struct cpa_unicode_range {
    uint32_t first, last;
    uint32_t stand_in; /* for each of these; 0 where there is none */
} cpa_unicode_range;

enum { CPA_UNICODE_INERT = 86, CPA_UNICODE_STAND_INS = 127 };

/* In order. */
extern const cpa_unicode_range cpa_unicode_inert[CPA_UNICODE_INERT];
extern const cpa_unicode_range cpa_unicode_stand_ins[CPA_UNICODE_STAND_INS];

#endif
