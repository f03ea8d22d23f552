/* Sequences of 32-bit numbers that are stored once each, and numbered from 0 on. */
#ifndef CPA_GRAMMAR_SEQUENCE_TABLE_H
#define CPA_GRAMMAR_SEQUENCE_TABLE_H

#include <stddef.h>
#include <stdint.h>

/* One of zeros is empty. */
typedef struct cpa_sequence_table {
    uint32_t *values; /* values of all sequences, one behind the other */
    int64_t n_values, values_capacity;
    int64_t *begins; /* [count] where each sequence begins in `values` */
    int64_t count, begins_capacity;
    uint32_t *slots; /* [n_slots], a power of two: number + 1 of a sequence, 0 = free */
    int64_t n_slots;
} cpa_sequence_table;

enum { CPA_NO_SEQUENCE = -1 };

/* The number of a sequence, which is stored if it is new; CPA_NO_SEQUENCE without memory. */
int64_t cpa_sequence_table_put(cpa_sequence_table *table, const uint32_t *values, int64_t n);

/* The sequence of a number, until the next that is stored. */
const uint32_t *cpa_sequence_table_get(const cpa_sequence_table *table, int64_t number, int64_t *n);

void cpa_sequence_table_release(cpa_sequence_table *table);

#endif
