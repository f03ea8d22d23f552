/* FNV-1a (Fowler, Noll, Vo), 64 bits: a key from the bytes of what it stands for. */
#ifndef CPA_BASE_HASH_H
#define CPA_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define CPA_HASH_START 0xcbf29ce484222325u

/* The hash of what `hash` stands for, followed by these bytes. */
static inline uint64_t cpa_hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

#endif
