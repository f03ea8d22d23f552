/* Which blocks of a rank are in which slots on disk, as a file tells the next one who opens them:
 *
 *     head     magic u32, version u32, bytes of the identity u32, entries u64
 *     identity what the blocks depend on, a text
 *     entries  group u32, slot u32, ranks u32, used u64, key [32], SHA-256 of the block [32]
 *     end      SHA-256 of all that is before
 *
 * little-endian. A new one is written beside the old one and takes its place when it is on disk, after the blocks that
 * it tells of: there is always a whole one. What has been overwritten since it was written has another SHA-256. */
#ifndef CPA_CACHE_DISK_INDEX_H
#define CPA_CACHE_DISK_INDEX_H

#include <stdint.h>

#include <cpattn/status.h>

/* A block of a unit in its slot. */
typedef struct cpa_disk_entry {
    int32_t group, slot;
    uint32_t ranks;  /* how many ranks have a block of the unit; 0: the slot has none */
    uint64_t used;   /* grows: of two entries the one that was written or read later has more */
    uint8_t key[32]; /* what the unit is found by */
    uint8_t sha256[32];
} cpa_disk_entry;

/* Puts an index in the place of `name` in a folder, a descriptor. CPA_IO where it cannot be written. */
cpa_status cpa_disk_index_write(int folder, const char *name, const char *identity, const cpa_disk_entry *entries,
                                int64_t n, cpa_error *err);
/* Reads an index: *entries is to be freed, and has none where there is no file. CPA_INVALID where it is of another
 * version, or another identity, of whose parts, between commas, the message names the first that differs; CPA_IO
 * where it is damaged. */
cpa_status cpa_disk_index_read(int folder, const char *name, const char *identity, cpa_disk_entry **entries, int64_t *n,
                               cpa_error *err);

#endif
