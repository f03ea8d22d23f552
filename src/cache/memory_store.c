/* A store of parts in host memory, and its stream through a file descriptor:
 *
 *     start   magic u32, version u32
 *     part    digest [32], group u32, part u32, bytes u64, then these
 *     end     a part of digest 0 and no bytes */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cpattn/blocks.h>

#include "base/check.h"
#include "base/hash_table.h"

enum { STREAM_MAGIC = 0x53415043 /* "CPAS" */, STREAM_VERSION = 1, STREAM_HEAD = 48 };

/* No part of any model is longer. */
static const uint64_t MOST_BYTES = 1ULL << 32;

/* Entries stand in the order in which they came. */
typedef struct entry {
    cpa_block_key key;
    int64_t n;
    UT_hash_handle hh;
    uint8_t bytes[]; /* [n] */
} entry;

struct cpa_memory_store {
    pthread_mutex_t lock;
    entry *entries; /* hash table */
    int64_t bytes, most_bytes;
};

cpa_status cpa_memory_store_create(int64_t most_bytes, cpa_memory_store **out, cpa_error *err) {
    if (!out || most_bytes < 0)
        return cpa_fail(err, CPA_INVALID, "memory store: most_bytes is %lld and out is %s; expected 0 or more",
                        (long long)most_bytes, out ? "set" : "NULL");
    cpa_memory_store *store = calloc(1, sizeof *store);
    if (!store) return cpa_fail(err, CPA_NO_MEMORY, "memory store: no memory");
    pthread_mutex_init(&store->lock, NULL);
    store->most_bytes = most_bytes;
    *out = store;
    return CPA_OK;
}

/* What a part takes of the store's bound. */
static int64_t bytes_of(int64_t n) {
    return (int64_t)sizeof(entry) + n;
}

static void forget(cpa_memory_store *store, entry *e) {
    HASH_DEL(store->entries, e);
    store->bytes -= bytes_of(e->n);
    free(e);
}

void cpa_memory_store_destroy(cpa_memory_store *store) {
    if (!store) return;
    entry *e, *next;
    HASH_ITER(hh, store->entries, e, next) forget(store, e);
    pthread_mutex_destroy(&store->lock);
    free(store);
}

static entry *find(const cpa_memory_store *store, const cpa_block_key *key) {
    entry *e;
    HASH_FIND(hh, store->entries, key, sizeof *key, e);
    return e;
}

/* Takes an entry, which is no longer the caller's; 0 without memory. */
static int keep(cpa_memory_store *store, entry *e) {
    pthread_mutex_lock(&store->lock);
    entry *before = find(store, &e->key);
    if (before) forget(store, before);
    HASH_ADD(hh, store->entries, key, sizeof e->key, e);
    const int kept = e->hh.tbl != NULL;
    if (kept) store->bytes += bytes_of(e->n);
    while (kept && store->most_bytes > 0 && store->bytes > store->most_bytes) forget(store, store->entries);
    pthread_mutex_unlock(&store->lock);
    if (!kept) free(e);
    return kept;
}

static cpa_status check_bound(const cpa_memory_store *store, int64_t n, cpa_error *err) {
    if (store->most_bytes == 0 || bytes_of(n) <= store->most_bytes) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "memory store: a part of %lld bytes takes %lld, expected most_bytes, %lld, or less", (long long)n,
                    (long long)bytes_of(n), (long long)store->most_bytes);
}

static entry *create_entry(const cpa_block_key *key, int64_t n) {
    entry *e = calloc(1, sizeof *e + (size_t)n);
    if (!e) return NULL;
    e->key = *key;
    e->n = n;
    return e;
}

static cpa_status put(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err) {
    cpa_memory_store *store = ctx;
    CPA_TRY(check_bound(store, n, err));
    entry *e = create_entry(key, n);
    if (e) memcpy(e->bytes, bytes, (size_t)n);
    if (e && keep(store, e)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "memory store: no memory for %lld bytes", (long long)n);
}

static cpa_status get(void *ctx, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n, cpa_error *err) {
    cpa_memory_store *store = ctx;
    (void)err;
    pthread_mutex_lock(&store->lock);
    const entry *e = find(store, key);
    *n = e ? e->n : 0;
    if (e && e->n <= most) memcpy(bytes, e->bytes, (size_t)e->n);
    pthread_mutex_unlock(&store->lock);
    return CPA_OK;
}

void cpa_memory_store_table(cpa_memory_store *store, cpa_block_store *out) {
    if (out) *out = (cpa_block_store){.size = sizeof *out, .ctx = store, .put = put, .get = get};
}

int64_t cpa_memory_store_bytes(cpa_memory_store *store) {
    if (!store) return 0;
    pthread_mutex_lock(&store->lock);
    const int64_t bytes = store->bytes;
    pthread_mutex_unlock(&store->lock);
    return bytes;
}

/* ---- the stream ---- */

static void put_number(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get_number(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)at[i] << 8 * i;
    return value;
}

static cpa_status write_all(int fd, const void *bytes, size_t n, cpa_error *err) {
    for (size_t at = 0; at < n;) {
        const ssize_t written = write(fd, (const char *)bytes + at, n - at);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0)
            return cpa_fail(err, CPA_IO, "memory store: descriptor %d cannot be written: %s", fd, strerror(errno));
        at += (size_t)written;
    }
    return CPA_OK;
}

static cpa_status read_all(int fd, void *bytes, size_t n, cpa_error *err) {
    for (size_t at = 0; at < n;) {
        const ssize_t got = read(fd, (char *)bytes + at, n - at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return cpa_fail(err, CPA_IO, "memory store: descriptor %d cannot be read: %s", fd, strerror(errno));
        if (got == 0)
            return cpa_fail(err, CPA_IO, "memory store: descriptor %d ends %zu bytes before the end of a part", fd,
                            n - at);
        at += (size_t)got;
    }
    return CPA_OK;
}

static cpa_status send_part(int fd, const entry *e, cpa_error *err) {
    uint8_t head[STREAM_HEAD];
    memcpy(head, e->key.digest, sizeof e->key.digest);
    put_number(head + 32, (uint32_t)e->key.group, 4);
    put_number(head + 36, (uint32_t)e->key.part, 4);
    put_number(head + 40, (uint64_t)e->n, 8);
    CPA_TRY(write_all(fd, head, sizeof head, err));
    return write_all(fd, e->bytes, (size_t)e->n, err);
}

/* The keys of all parts, in their order; free() them. NULL without memory. */
static cpa_block_key *list_keys(cpa_memory_store *store, int64_t *n) {
    entry *e, *next;
    pthread_mutex_lock(&store->lock);
    *n = 0;
    cpa_block_key *keys = malloc((HASH_COUNT(store->entries) + 1) * sizeof *keys);
    if (keys) HASH_ITER(hh, store->entries, e, next) keys[(*n)++] = e->key;
    pthread_mutex_unlock(&store->lock);
    return keys;
}

/* A copy of what the store has by that key, *out, to be freed: NULL where it has forgotten that. 0 without memory. */
static int copy_entry(cpa_memory_store *store, const cpa_block_key *key, entry **out) {
    pthread_mutex_lock(&store->lock);
    const entry *e = find(store, key);
    *out = e ? create_entry(key, e->n) : NULL;
    if (*out) memcpy((*out)->bytes, e->bytes, (size_t)e->n);
    const int ok = !e || *out;
    pthread_mutex_unlock(&store->lock);
    return ok;
}

/* Who is written to may wait for the store itself before it reads on: no lock is held meanwhile. */
static cpa_status send_parts(cpa_memory_store *store, const cpa_block_key *keys, int64_t n, int fd, cpa_error *err) {
    for (int64_t i = 0; i < n; i++) {
        entry *e;
        if (!copy_entry(store, &keys[i], &e)) return cpa_fail(err, CPA_NO_MEMORY, "memory store: no memory for a copy");
        if (!e) continue;
        const cpa_status status = send_part(fd, e, err);
        free(e);
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

cpa_status cpa_memory_store_send(cpa_memory_store *store, int fd, cpa_error *err) {
    const entry end = {.n = 0};
    uint8_t start[8];
    int64_t n;
    if (!store) return cpa_fail(err, CPA_INVALID, "memory store: store is NULL");
    put_number(start, STREAM_MAGIC, 4);
    put_number(start + 4, STREAM_VERSION, 4);
    cpa_block_key *keys = list_keys(store, &n);
    if (!keys) return cpa_fail(err, CPA_NO_MEMORY, "memory store: no memory for its keys");
    cpa_status status = write_all(fd, start, sizeof start, err);
    if (status == CPA_OK) status = send_parts(store, keys, n, fd, err);
    free(keys);
    return status == CPA_OK ? send_part(fd, &end, err) : status;
}

/* *last: it was the end. */
static cpa_status receive_part(cpa_memory_store *store, int fd, int *last, cpa_error *err) {
    static const cpa_block_key none;
    uint8_t head[STREAM_HEAD];
    cpa_block_key key;
    CPA_TRY(read_all(fd, head, sizeof head, err));
    memcpy(key.digest, head, sizeof key.digest);
    key.group = (int32_t)get_number(head + 32, 4);
    key.part = (int32_t)get_number(head + 36, 4);
    const uint64_t n = get_number(head + 40, 8);
    *last = n == 0 && memcmp(&key, &none, sizeof key) == 0;
    if (*last) return CPA_OK;
    if (n == 0 || n > MOST_BYTES)
        return cpa_fail(err, CPA_IO, "memory store: a part of %llu bytes from descriptor %d, expected 1 to 2^32",
                        (unsigned long long)n, fd);
    CPA_TRY(check_bound(store, (int64_t)n, err));
    entry *e = create_entry(&key, (int64_t)n);
    if (!e)
        return cpa_fail(err, CPA_NO_MEMORY, "memory store: no memory for a part of %llu bytes", (unsigned long long)n);
    const cpa_status status = read_all(fd, e->bytes, (size_t)n, err);
    if (status != CPA_OK) {
        free(e);
        return status;
    }
    return keep(store, e) ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "memory store: no memory");
}

cpa_status cpa_memory_store_receive(cpa_memory_store *store, int fd, cpa_error *err) {
    uint8_t start[8];
    if (!store) return cpa_fail(err, CPA_INVALID, "memory store: store is NULL");
    CPA_TRY(read_all(fd, start, sizeof start, err));
    if (get_number(start, 4) != STREAM_MAGIC || get_number(start + 4, 4) != STREAM_VERSION)
        return cpa_fail(err, CPA_IO, "memory store: descriptor %d begins with %08llx, version %llu; expected %08x, %d",
                        fd, (unsigned long long)get_number(start, 4), (unsigned long long)get_number(start + 4, 4),
                        STREAM_MAGIC, STREAM_VERSION);
    for (int last = 0; !last;) CPA_TRY(receive_part(store, fd, &last, err));
    return CPA_OK;
}
