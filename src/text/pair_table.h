/* A hash table from pairs of numbers to pairs of numbers, with open addressing: the merges of byte pair encoding. */
#ifndef CPA_TEXT_PAIR_TABLE_H
#define CPA_TEXT_PAIR_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "base/hash.h"

#define CPA_PAIR_NONE UINT64_MAX /* the key of no pair: numbers are below 2^32 - 1 */

typedef struct cpa_pair {
    uint64_t key;
    uint32_t first, second; /* what it stands for */
} cpa_pair;

/* One of zeros is empty. */
typedef struct cpa_pair_table {
    cpa_pair *slots;
    uint64_t mask; /* slots - 1; a power of two of them */
    int64_t count;
} cpa_pair_table;

/* Enters a pair, or changes what it stands for; 0 without memory, else 1. */
int cpa_pair_table_put(cpa_pair_table *table, uint32_t a, uint32_t b, uint32_t first, uint32_t second);
void cpa_pair_table_release(cpa_pair_table *table);

/* NULL if the pair is not there. */
static inline const cpa_pair *cpa_pair_table_find(const cpa_pair_table *table, uint32_t a, uint32_t b) {
    const uint64_t key = (uint64_t)a << 32 | b;
    if (!table->slots) return NULL;
    for (uint64_t i = cpa_mix64(key);; i++) {
        const cpa_pair *slot = &table->slots[i & table->mask];
        if (slot->key == key) return slot;
        if (slot->key == CPA_PAIR_NONE) return NULL;
    }
}

#endif
