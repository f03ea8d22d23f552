/* Parts in memory that others read without asking the process whose it is: through a device, a network, a mapping.
 *
 *     head    [64]              magic u32, version u32, buckets u64
 *     slots   [buckets][4]      of 64 bytes: a key, and where its part lies
 *     ring                      parts, one behind the other; a new one takes the place of the oldest
 *
 * Numbers are as the machine has them. Who reads reads the bucket of a key, then the part, then the bucket again: where
 * the slot is another one by then, the part has gone. A part that changes even so is found by its SHA-256
 * (parcel.h). */
#ifndef CPA_CACHE_PART_REGION_H
#define CPA_CACHE_PART_REGION_H

#include <cpattn/blocks.h>

/* How a process reaches the memory, from `at` on in it. */
typedef struct cpa_region_access {
    void *ctx;
    int64_t bytes; /* all of it */
    cpa_status (*read)(void *ctx, int64_t at, void *bytes, int64_t n, cpa_error *err);
    cpa_status (*write)(void *ctx, int64_t at, const void *bytes, int64_t n, cpa_error *err); /* its owner alone */
    uint64_t buckets; /* 0: cpa_part_region_get has not read the head yet */
} cpa_region_access;

/* What its owner knows of it. Any thread may put at any time. */
typedef struct cpa_part_region cpa_part_region;

enum { CPA_REGION_LEAST_BYTES = 1 << 14 };

/* Makes memory, which is zero, a region without parts. CPA_INVALID for less than CPA_REGION_LEAST_BYTES. */
cpa_status cpa_part_region_create(const cpa_region_access *access, cpa_part_region **out, cpa_error *err);
void cpa_part_region_destroy(cpa_part_region *region);
/* As cpa_block_store.put. CPA_INVALID for a part longer than the ring, and nothing is forgotten for it. */
cpa_status cpa_part_region_put(cpa_part_region *region, const cpa_block_key *key, const void *bytes, int64_t n,
                               cpa_error *err);

/* As cpa_block_store.get, in any process. */
cpa_status cpa_part_region_get(cpa_region_access *access, const cpa_block_key *key, void *bytes, int64_t most,
                               int64_t *n, cpa_error *err);

#endif
