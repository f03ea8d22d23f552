/* The ids of strings. */
#ifndef CPA_TEXT_VOCABULARY_H
#define CPA_TEXT_VOCABULARY_H

#include <stddef.h>
#include <stdint.h>

#include "src/text/bytes.h"

#define CPA_NO_ID UINT32_MAX

enum { CPA_MAX_IDS = 1 << 22 }; /* ids are below; sixteen times those of the largest vocabularies */

typedef struct cpa_vocabulary_slot {
    uint32_t at, bytes; /* place and length of the string in the vocabulary's bytes */
    uint32_t hash, id;  /* CPA_NO_ID: nothing here */
} cpa_vocabulary_slot;

/* One of zeros is empty. */
typedef struct cpa_vocabulary {
    cpa_bytes strings;
    cpa_vocabulary_slot *slots; /* open addressing, a power of two of them */
    uint64_t mask;
    int64_t count;
} cpa_vocabulary;

/* Gives a string an id, or another one; 0 without memory (4 GiB of strings is too much), else 1. */
int cpa_vocabulary_put(cpa_vocabulary *vocabulary, const char *text, size_t bytes, uint32_t id);
void cpa_vocabulary_release(cpa_vocabulary *vocabulary);

/* CPA_NO_ID if it has none. */
uint32_t cpa_vocabulary_find(const cpa_vocabulary *vocabulary, const char *text, size_t bytes);

#endif
