#include "src/text/vocabulary.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

enum { LEAST_SLOTS = 64 };

static uint32_t hash_of(const char *text, size_t bytes) {
    return (uint32_t)cpa_mix64(cpa_hash_bytes(CPA_HASH_START, text, bytes));
}

/* The slot of a string, or the empty one where it would be. */
static cpa_vocabulary_slot *slot_of(const cpa_vocabulary *v, const char *text, size_t bytes, uint32_t hash) {
    for (uint64_t i = hash;; i++) {
        cpa_vocabulary_slot *slot = &v->slots[i & v->mask];
        if (slot->id == CPA_NO_ID) return slot;
        if (slot->hash == hash && slot->bytes == bytes && memcmp(v->strings.data + slot->at, text, bytes) == 0)
            return slot;
    }
}

/* Twice the slots, so that at most half of them are taken. */
static int grow(cpa_vocabulary *v) {
    const uint64_t slots = v->slots ? 2 * (v->mask + 1) : LEAST_SLOTS;
    cpa_vocabulary_slot *grown = calloc(slots, sizeof *grown);
    if (!grown) return 0;
    for (uint64_t i = 0; i < slots; i++) grown[i].id = CPA_NO_ID;
    for (uint64_t i = 0; v->slots && i <= v->mask; i++) {
        uint64_t to = v->slots[i].hash;
        if (v->slots[i].id == CPA_NO_ID) continue;
        while (grown[to & (slots - 1)].id != CPA_NO_ID) to++;
        grown[to & (slots - 1)] = v->slots[i];
    }
    free(v->slots);
    v->slots = grown;
    v->mask = slots - 1;
    return 1;
}

int cpa_vocabulary_put(cpa_vocabulary *v, const char *text, size_t bytes, uint32_t id) {
    const uint32_t hash = hash_of(text, bytes);
    if ((!v->slots || 2 * (uint64_t)v->count > v->mask) && !grow(v)) return 0;
    cpa_vocabulary_slot *slot = slot_of(v, text, bytes, hash);
    if (slot->id == CPA_NO_ID) {
        const int64_t at = v->strings.count;
        if (at + (int64_t)bytes > UINT32_MAX || !cpa_bytes_add(&v->strings, text, bytes)) return 0;
        *slot = (cpa_vocabulary_slot){.at = (uint32_t)at, .bytes = (uint32_t)bytes, .hash = hash};
        v->count++;
    }
    slot->id = id;
    return 1;
}

void cpa_vocabulary_release(cpa_vocabulary *v) {
    cpa_bytes_release(&v->strings);
    free(v->slots);
    *v = (cpa_vocabulary){.count = 0};
}

uint32_t cpa_vocabulary_find(const cpa_vocabulary *v, const char *text, size_t bytes) {
    return v->slots ? slot_of(v, text, bytes, hash_of(text, bytes))->id : CPA_NO_ID;
}
