#include "src/text/pair_table.h"

#include <stdlib.h>

enum { LEAST_SLOTS = 64 };

static cpa_pair *slot_of(const cpa_pair_table *table, uint64_t key) {
    uint64_t i = cpa_mix64(key);
    while (table->slots[i & table->mask].key != key && table->slots[i & table->mask].key != CPA_PAIR_NONE) i++;
    return &table->slots[i & table->mask];
}

/* Twice the slots, so that at most half of them are taken. */
static int grow(cpa_pair_table *table) {
    const uint64_t slots = table->slots ? 2 * (table->mask + 1) : LEAST_SLOTS;
    cpa_pair_table grown = {.slots = calloc(slots, sizeof *grown.slots), .mask = slots - 1, .count = table->count};
    if (!grown.slots) return 0;
    for (uint64_t i = 0; i < slots; i++) grown.slots[i].key = CPA_PAIR_NONE;
    for (uint64_t i = 0; table->slots && i <= table->mask; i++) {
        if (table->slots[i].key != CPA_PAIR_NONE) *slot_of(&grown, table->slots[i].key) = table->slots[i];
    }
    free(table->slots);
    *table = grown;
    return 1;
}

int cpa_pair_table_put(cpa_pair_table *table, uint32_t a, uint32_t b, uint32_t first, uint32_t second) {
    const uint64_t key = (uint64_t)a << 32 | b;
    if ((!table->slots || 2 * (uint64_t)table->count > table->mask) && !grow(table)) return 0;
    cpa_pair *slot = slot_of(table, key);
    table->count += slot->key == CPA_PAIR_NONE;
    *slot = (cpa_pair){.key = key, .first = first, .second = second};
    return 1;
}

void cpa_pair_table_release(cpa_pair_table *table) {
    free(table->slots);
    *table = (cpa_pair_table){.count = 0};
}
