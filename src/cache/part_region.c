#include "src/cache/part_region.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#include "base/check.h"

enum {
    MAGIC = 0x52415043 /* "CPAR" */,
    VERSION = 1,
    WAYS = 4,       /* slots of a bucket */
    TABLE_PART = 32 /* so much of the memory is the table, a 32nd: parts of 2 KiB and more do not fill it */
};

typedef struct region_head {
    uint32_t magic, version;
    uint64_t buckets;
    uint8_t unused[48];
} region_head;

typedef struct region_slot {
    cpa_block_key key;
    int64_t at, n;   /* the part in the memory; at 0: no part */
    uint64_t number; /* of the put: two parts of a key have different ones */
} region_slot;

_Static_assert(sizeof(region_head) == 64 && sizeof(region_slot) == 64, "as other processes read them");

typedef struct bucket {
    region_slot slots[WAYS];
} bucket;

static int64_t bucket_at(uint64_t index) {
    return (int64_t)(sizeof(region_head) + index * sizeof(bucket));
}

/* The digest is evenly spread as it is, and the same for the groups and parts of a parcel. */
static uint64_t bucket_of(const cpa_block_key *key, uint64_t buckets) {
    uint64_t hash;
    memcpy(&hash, key->digest, sizeof hash);
    hash += ((uint64_t)(uint32_t)key->group << 8 | (uint32_t)key->part) * 0x9e3779b97f4a7c15ULL;
    return buckets > 0 ? hash % buckets : 0;
}

static int has_key(const region_slot *slot, const cpa_block_key *key) {
    return slot->at != 0 && memcmp(&slot->key, key, sizeof *key) == 0;
}

/* ---- its owner ---- */

/* A slot as it stands in the memory; those with parts are in a list, in the order in which they came. */
typedef struct held_slot {
    region_slot slot;
    struct held_slot *prev, *next;
} held_slot;

struct cpa_part_region {
    pthread_mutex_t lock;
    cpa_region_access access;
    uint64_t buckets, puts;
    int64_t ring, next; /* where the ring begins, and the next part if there is room */
    held_slot *slots;   /* [buckets][WAYS] */
    held_slot *oldest;
};

cpa_status cpa_part_region_create(const cpa_region_access *access, cpa_part_region **out, cpa_error *err) {
    if (access->bytes < CPA_REGION_LEAST_BYTES)
        return cpa_fail(err, CPA_INVALID, "memory of %" PRId64 " bytes for parts, expected %d or more", access->bytes,
                        CPA_REGION_LEAST_BYTES);
    cpa_part_region *region = calloc(1, sizeof *region);
    if (!region) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a region of parts");
    region->access = *access;
    region->buckets = (uint64_t)access->bytes / TABLE_PART / sizeof(bucket);
    region->ring = region->next = bucket_at(region->buckets);
    region->slots = calloc(region->buckets * WAYS, sizeof *region->slots);
    const region_head head = {.magic = MAGIC, .version = VERSION, .buckets = region->buckets};
    cpa_status status = region->slots ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for a table of parts");
    if (status == CPA_OK) status = access->write(access->ctx, 0, &head, sizeof head, err);
    if (status != CPA_OK) {
        free(region->slots);
        free(region);
        return status;
    }
    pthread_mutex_init(&region->lock, NULL);
    *out = region;
    return CPA_OK;
}

void cpa_part_region_destroy(cpa_part_region *region) {
    if (!region) return;
    pthread_mutex_destroy(&region->lock);
    free(region->slots);
    free(region);
}

static cpa_status write_slot(const cpa_part_region *region, const held_slot *held, cpa_error *err) {
    const int64_t at = bucket_at(0) + (held - region->slots) * (int64_t)sizeof held->slot;
    return region->access.write(region->access.ctx, at, &held->slot, sizeof held->slot, err);
}

static cpa_status forget(cpa_part_region *region, held_slot *held, cpa_error *err) {
    DL_DELETE(region->oldest, held);
    memset(&held->slot, 0, sizeof held->slot);
    return write_slot(region, held, err);
}

/* Forgets what lies where n bytes go next, *at: behind the last part, or from the start of the ring where the end is
 * too near. Parts lie in the order of the list from `next` on, once around. */
static cpa_status make_room(cpa_part_region *region, int64_t n, int64_t *at, cpa_error *err) {
    if (region->next + n > region->access.bytes) {
        while (region->oldest && region->oldest->slot.at >= region->next) CPA_TRY(forget(region, region->oldest, err));
        region->next = region->ring;
    }
    *at = region->next;
    while (region->oldest && region->oldest->slot.at < *at + n &&
           region->oldest->slot.at + region->oldest->slot.n > *at)
        CPA_TRY(forget(region, region->oldest, err));
    return CPA_OK;
}

/* The slot of the bucket that has the key, else a free one, else that of its oldest part. */
static held_slot *choose_slot(cpa_part_region *region, const cpa_block_key *key) {
    held_slot *ways = &region->slots[bucket_of(key, region->buckets) * WAYS], *chosen = ways;
    for (int i = 0; i < WAYS; i++) {
        if (has_key(&ways[i].slot, key)) return &ways[i];
        if (ways[i].slot.number < chosen->slot.number) chosen = &ways[i]; /* a free one has number 0 */
    }
    return chosen;
}

static cpa_status put_locked(cpa_part_region *region, const cpa_block_key *key, const void *bytes, int64_t n,
                             cpa_error *err) {
    enum { ALIGNMENT = 64 };
    int64_t at;
    held_slot *held = choose_slot(region, key);
    if (held->slot.at != 0) CPA_TRY(forget(region, held, err));
    CPA_TRY(make_room(region, n, &at, err));
    CPA_TRY(region->access.write(region->access.ctx, at, bytes, n, err));
    held->slot = (region_slot){*key, at, n, ++region->puts};
    DL_APPEND(region->oldest, held);
    region->next = (at + n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return write_slot(region, held, err);
}

cpa_status cpa_part_region_put(cpa_part_region *region, const cpa_block_key *key, const void *bytes, int64_t n,
                               cpa_error *err) {
    const int64_t most = region->access.bytes - region->ring;
    if (n < 1 || n > most)
        return cpa_fail(err, CPA_INVALID, "a part of %" PRId64 " bytes, expected 1 to %" PRId64, n, most);
    pthread_mutex_lock(&region->lock);
    const cpa_status status = put_locked(region, key, bytes, n, err);
    pthread_mutex_unlock(&region->lock);
    return status;
}

/* ---- whoever reads ---- */

/* The number of buckets, which stays what it is; threads that come here together read it each. */
static cpa_status read_head(cpa_region_access *access, uint64_t *buckets, cpa_error *err) {
    region_head head;
    *buckets = __atomic_load_n(&access->buckets, __ATOMIC_RELAXED);
    if (*buckets > 0) return CPA_OK;
    CPA_TRY(access->read(access->ctx, 0, &head, sizeof head, err));
    if (head.magic != MAGIC || head.version != VERSION || head.buckets < 1 ||
        head.buckets > (uint64_t)access->bytes / sizeof(bucket))
        return cpa_fail(err, CPA_IO,
                        "memory of parts begins with %08" PRIx32 ", version %" PRIu32 ", %" PRIu64
                        " buckets; expected %08x, version %d, 1 to %" PRIu64,
                        head.magic, head.version, head.buckets, MAGIC, VERSION,
                        (uint64_t)access->bytes / sizeof(bucket));
    *buckets = head.buckets;
    __atomic_store_n(&access->buckets, head.buckets, __ATOMIC_RELAXED);
    return CPA_OK;
}

/* The slot of the key in the bucket that lies there; all zeros: it has none. */
static cpa_status find_slot(const cpa_region_access *access, int64_t at, const cpa_block_key *key, region_slot *out,
                            cpa_error *err) {
    bucket b;
    memset(out, 0, sizeof *out);
    CPA_TRY(access->read(access->ctx, at, &b, sizeof b, err));
    for (int i = 0; i < WAYS; i++)
        if (has_key(&b.slots[i], key)) *out = b.slots[i];
    return CPA_OK;
}

cpa_status cpa_part_region_get(cpa_region_access *access, const cpa_block_key *key, void *bytes, int64_t most,
                               int64_t *n, cpa_error *err) {
    uint64_t buckets = 0;
    region_slot slot, after;
    *n = 0;
    CPA_TRY(read_head(access, &buckets, err));
    const int64_t at = bucket_at(bucket_of(key, buckets));
    CPA_TRY(find_slot(access, at, key, &slot, err));
    if (slot.at == 0) return CPA_OK;
    if (slot.at < bucket_at(buckets) || slot.n < 1 || slot.n > access->bytes || slot.at > access->bytes - slot.n)
        return cpa_fail(err, CPA_IO, "a part of %" PRId64 " bytes at %" PRId64 " in memory of %" PRId64, slot.n,
                        slot.at, access->bytes);
    if (slot.n <= most) {
        CPA_TRY(access->read(access->ctx, slot.at, bytes, slot.n, err));
        CPA_TRY(find_slot(access, at, key, &after, err));
        if (memcmp(&after, &slot, sizeof slot) != 0) return CPA_OK;
    }
    *n = slot.n;
    return CPA_OK;
}
