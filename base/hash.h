/* Two 64-bit hashes: FNV-1a (Fowler, Noll, Vo) of bytes, for keys, and the finaliser of splitmix64 (Steele, Lea and
 * Flood, OOPSLA 2014) of a number, for random numbers from a counter that are the same everywhere. */
#ifndef CPA_BASE_HASH_H
#define CPA_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/api.h> /* CPA_HOST_DEVICE */

#define CPA_HASH_START 0xcbf29ce484222325u

/* The hash of what `hash` stands for, followed by these bytes. */
static inline uint64_t cpa_hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

/* By which counters step, so that neighbours differ in many bits. */
#define CPA_GOLDEN 0x9e3779b97f4a7c15u

CPA_HOST_DEVICE static inline uint64_t cpa_mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#endif
