/* A store of parts in memory of a device that processes of a host share: one of them puts, the others read. */
#include <pthread.h>
#include <stdlib.h>

#include <cpattn/blocks.h>

#include "base/check.h"
#include "src/cache/part_region.h"
#include "src/ops/shared_memory.h"

struct cpa_shared_store {
    const cpa_shared_memory *memory;
    cpa_region_access access;
    cpa_part_region *region; /* NULL: another process has created the memory, and puts */
    pthread_mutex_t lock;    /* of the stream */
    cpa_stream *stream;
};

static cpa_status copy(cpa_shared_store *store, void *dst, const void *src, int64_t n, cpa_error *err) {
    const cpa_device_table *table = store->stream->device->table;
    pthread_mutex_lock(&store->lock);
    cpa_status status = table->copy(dst, src, n, store->stream);
    if (status == CPA_OK) status = table->stream_sync(store->stream);
    if (status != CPA_OK) cpa_fail(err, status, "shared store: %s", store->stream->error.message);
    pthread_mutex_unlock(&store->lock);
    return status;
}

static cpa_status read_memory(void *ctx, int64_t at, void *bytes, int64_t n, cpa_error *err) {
    cpa_shared_store *store = ctx;
    return copy(store, bytes, (const char *)store->memory->address + at, n, err);
}

static cpa_status write_memory(void *ctx, int64_t at, const void *bytes, int64_t n, cpa_error *err) {
    cpa_shared_store *store = ctx;
    return copy(store, (char *)store->memory->address + at, bytes, n, err);
}

cpa_status cpa_shared_store_create(cpa_shared_memory *memory, cpa_shared_store **out, cpa_error *err) {
    if (!memory || !out) return cpa_fail(err, CPA_INVALID, "shared store: %s is NULL", memory ? "out" : "memory");
    cpa_shared_store *store = calloc(1, sizeof *store);
    if (!store) return cpa_fail(err, CPA_NO_MEMORY, "shared store: no memory");
    store->memory = memory;
    store->access = (cpa_region_access){store, memory->mark.bytes, read_memory, write_memory, 0};
    pthread_mutex_init(&store->lock, NULL);
    cpa_status status = cpa_stream_create(memory->device, &store->stream, err);
    if (status == CPA_OK && memory->is_own) status = cpa_part_region_create(&store->access, &store->region, err);
    if (status != CPA_OK) {
        cpa_shared_store_destroy(store);
        return status;
    }
    *out = store;
    return CPA_OK;
}

void cpa_shared_store_destroy(cpa_shared_store *store) {
    if (!store) return;
    cpa_part_region_destroy(store->region);
    cpa_stream_destroy(store->stream);
    pthread_mutex_destroy(&store->lock);
    free(store);
}

static cpa_status put(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err) {
    cpa_shared_store *store = ctx;
    if (!store->region)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "shared store: the process that has created its memory alone puts into it");
    return cpa_part_region_put(store->region, key, bytes, n, err);
}

static cpa_status get(void *ctx, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n, cpa_error *err) {
    return cpa_part_region_get(&((cpa_shared_store *)ctx)->access, key, bytes, most, n, err);
}

void cpa_shared_store_table(cpa_shared_store *store, cpa_block_store *out) {
    if (out) *out = (cpa_block_store){.size = sizeof *out, .ctx = store, .put = put, .get = get};
}
