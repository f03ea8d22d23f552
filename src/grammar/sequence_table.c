#include "src/grammar/sequence_table.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/hash.h"

const uint32_t *cpa_sequence_table_get(const cpa_sequence_table *table, int64_t number, int64_t *n) {
    const int64_t end = number + 1 < table->count ? table->begins[number + 1] : table->n_values;
    *n = end - table->begins[number];
    return table->values + table->begins[number];
}

static uint64_t hash_of(const uint32_t *values, int64_t n) {
    uint64_t hash = CPA_HASH_START;
    for (int64_t i = 0; i < n; i++) hash = cpa_mix64(hash + values[i] + CPA_GOLDEN);
    return hash;
}

/* Where a sequence is, or the free slot where it belongs. */
static uint32_t *find_slot(const cpa_sequence_table *table, const uint32_t *values, int64_t n) {
    for (uint64_t at = hash_of(values, n);; at++) {
        uint32_t *slot = &table->slots[at & (uint64_t)(table->n_slots - 1)];
        if (*slot == 0) return slot;
        int64_t count;
        const uint32_t *there = cpa_sequence_table_get(table, *slot - 1, &count);
        if (count == n && (n == 0 || memcmp(there, values, (size_t)n * sizeof *values) == 0)) return slot;
    }
}

static int grow(cpa_sequence_table *table) {
    cpa_sequence_table larger = *table;
    larger.n_slots = table->n_slots ? 2 * table->n_slots : 64;
    larger.slots = calloc((size_t)larger.n_slots, sizeof *larger.slots);
    if (!larger.slots) return 0;
    for (int64_t i = 0; i < table->count; i++) {
        int64_t n;
        const uint32_t *values = cpa_sequence_table_get(table, i, &n);
        *find_slot(&larger, values, n) = (uint32_t)i + 1;
    }
    free(table->slots);
    *table = larger;
    return 1;
}

int64_t cpa_sequence_table_put(cpa_sequence_table *table, const uint32_t *values, int64_t n) {
    if (table->n_slots < 2 * (table->count + 1) && !grow(table)) return CPA_NO_SEQUENCE;
    uint32_t *slot = find_slot(table, values, n);
    if (*slot != 0) return *slot - 1;
    if (!cpa_array_reserve(&table->values, &table->values_capacity, table->n_values + n, sizeof *values) ||
        !cpa_array_reserve(&table->begins, &table->begins_capacity, table->count + 1, sizeof *table->begins)) {
        return CPA_NO_SEQUENCE;
    }
    if (n > 0) memcpy(table->values + table->n_values, values, (size_t)n * sizeof *values);
    table->begins[table->count] = table->n_values;
    table->n_values += n;
    *slot = (uint32_t)++table->count;
    return table->count - 1;
}

void cpa_sequence_table_release(cpa_sequence_table *table) {
    free(table->values);
    free(table->begins);
    free(table->slots);
    *table = (cpa_sequence_table){.count = 0};
}
