/* A store of parts in Mooncake's distributed store (https://github.com/kvcache-ai/Mooncake), by its C interface,
 * mooncake-store/include/store_c.h, whose library is opened at run time. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/blocks.h>

#include "base/check.h"
#include "base/shared_library.h"
#include "base/struct_size.h"

enum { KEY_BYTES = 128 };

/* What its functions return is 0 or more, and a number below 0 for a failure. */
#define MOONCAKE_FUNCTIONS(F)                                                                                          \
    F(void *, create, (void))                                                                                          \
    F(void, destroy, (void *store))                                                                                    \
    F(int, setup,                                                                                                      \
      (void *store, const char *hostname, const char *metadata, uint64_t segment, uint64_t buffer,                     \
       const char *protocol, const char *device, const char *master))                                                  \
    F(int, put, (void *store, const char *key, const void *bytes, size_t n, const void *config))                       \
    F(int64_t, get_into, (void *store, const char *key, void *bytes, size_t n))                                        \
    F(int, is_exist, (void *store, const char *key))                                                                   \
    F(int64_t, get_size, (void *store, const char *key))                                                               \
    F(int, register_buffer, (void *store, void *bytes, size_t n))                                                      \
    F(int, unregister_buffer, (void *store, void *bytes))

typedef struct mooncake {
#define MOONCAKE_POINTER(result, name, parameters) result(*name) parameters;
    MOONCAKE_FUNCTIONS(MOONCAKE_POINTER)
#undef MOONCAKE_POINTER
} mooncake;

struct cpa_mooncake_store {
    mooncake mooncake;
    void *client;
    pthread_mutex_t lock; /* of what is below */
    void *landing;        /* registered memory where parts arrive */
    int64_t landing_bytes;
};

static cpa_status load(const char *file, mooncake *out, cpa_error *err) {
    static const char WHAT[] = "mooncake store";
    void *library;
    CPA_TRY(cpa_library_open(WHAT, file, &library, err));
#define MOONCAKE_FIND(result, name, parameters)                                                                        \
    CPA_TRY(cpa_library_find(WHAT, library, file, "mooncake_store_" #name, &out->name, err));
    MOONCAKE_FUNCTIONS(MOONCAKE_FIND)
#undef MOONCAKE_FIND
    return CPA_OK;
}

static cpa_status check_options(const cpa_mooncake_options *o, cpa_error *err) {
    const char *missing = !o->local_hostname    ? "local_hostname"
                          : !o->metadata_server ? "metadata_server"
                          : !o->master_server   ? "master_server"
                                                : NULL;
    if (missing) return cpa_fail(err, CPA_INVALID, "mooncake store: %s is NULL", missing);
    if (o->segment_bytes < 0 || o->buffer_bytes < 0)
        return cpa_fail(err, CPA_INVALID,
                        "mooncake store: segment_bytes is %" PRId64 ", buffer_bytes %" PRId64 "; expected 0 or more",
                        o->segment_bytes, o->buffer_bytes);
    return CPA_OK;
}

static cpa_status open_client(cpa_mooncake_store *store, const cpa_mooncake_options *o, cpa_error *err) {
    enum { BUFFER_BYTES = 64 << 20 };
    CPA_TRY(load(o->library ? o->library : "libmooncake_store.so", &store->mooncake, err));
    store->client = store->mooncake.create();
    if (!store->client) return cpa_fail(err, CPA_COMM, "mooncake store: Mooncake gives no client");
    const int status = store->mooncake.setup(
        store->client, o->local_hostname, o->metadata_server, (uint64_t)o->segment_bytes,
        (uint64_t)(o->buffer_bytes ? o->buffer_bytes : BUFFER_BYTES), o->protocol ? o->protocol : "tcp",
        o->device_name ? o->device_name : "", o->master_server);
    if (status == 0) return CPA_OK;
    return cpa_fail(err, CPA_COMM, "mooncake store: client %s does not reach master %s with metadata at %s: %d",
                    o->local_hostname, o->master_server, o->metadata_server, status);
}

cpa_status cpa_mooncake_store_create(const cpa_mooncake_options *given, cpa_mooncake_store **out, cpa_error *err) {
    cpa_mooncake_options options;
    CPA_TRY(CPA_STRUCT_TAKE("mooncake store", given, cpa_mooncake_options, master_server, &options, err));
    if (!out || !CPA_RESERVED_IS_ZERO(options))
        return cpa_fail(err, CPA_INVALID, "mooncake store: %s",
                        out ? "reserved bytes of its options are not zero" : "out is NULL");
    CPA_TRY(check_options(&options, err));
    cpa_mooncake_store *store = calloc(1, sizeof *store);
    if (!store) return cpa_fail(err, CPA_NO_MEMORY, "mooncake store: no memory");
    pthread_mutex_init(&store->lock, NULL);
    const cpa_status status = open_client(store, &options, err);
    if (status != CPA_OK) {
        cpa_mooncake_store_destroy(store);
        return status;
    }
    *out = store;
    return CPA_OK;
}

static void drop_landing(cpa_mooncake_store *store) {
    if (store->landing) store->mooncake.unregister_buffer(store->client, store->landing);
    free(store->landing);
    store->landing = NULL;
    store->landing_bytes = 0;
}

void cpa_mooncake_store_destroy(cpa_mooncake_store *store) {
    if (!store) return;
    drop_landing(store);
    if (store->client) store->mooncake.destroy(store->client);
    pthread_mutex_destroy(&store->lock);
    free(store);
}

static cpa_status make_landing(cpa_mooncake_store *store, int64_t n, cpa_error *err) {
    enum { PAGE = 4096, LEAST = 4 << 20 };
    if (store->landing_bytes >= n) return CPA_OK;
    drop_landing(store);
    const size_t bytes = n > LEAST ? ((size_t)n + PAGE - 1) / PAGE * PAGE : LEAST;
    void *memory = aligned_alloc(PAGE, bytes);
    if (!memory) return cpa_fail(err, CPA_NO_MEMORY, "mooncake store: no memory for %zu bytes", bytes);
    const int status = store->mooncake.register_buffer(store->client, memory, bytes);
    if (status != 0) {
        free(memory);
        return cpa_fail(err, CPA_COMM, "mooncake store: %zu bytes of memory cannot be registered: %d", bytes, status);
    }
    store->landing = memory;
    store->landing_bytes = (int64_t)bytes;
    return CPA_OK;
}

static void name_of(const cpa_block_key *key, char name[KEY_BYTES]) {
    int at = snprintf(name, KEY_BYTES, "cpattn-");
    for (size_t i = 0; i < sizeof key->digest; i++)
        at += snprintf(name + at, (size_t)(KEY_BYTES - at), "%02x", key->digest[i]);
    snprintf(name + at, (size_t)(KEY_BYTES - at), "-%" PRId32 "-%" PRId32, key->group, key->part);
}

static cpa_status put(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err) {
    cpa_mooncake_store *store = ctx;
    char name[KEY_BYTES];
    name_of(key, name);
    const int status = store->mooncake.put(store->client, name, bytes, (size_t)n, NULL);
    if (status == 0) return CPA_OK;
    return cpa_fail(err, CPA_IO, "mooncake store: %" PRId64 " bytes cannot be put as %.20s...: %d", n, name, status);
}

static cpa_status get_locked(cpa_mooncake_store *store, const char *name, void *bytes, int64_t n, cpa_error *err) {
    CPA_TRY(make_landing(store, n, err));
    const int64_t got = store->mooncake.get_into(store->client, name, store->landing, (size_t)store->landing_bytes);
    if (got != n)
        return cpa_fail(err, CPA_IO, "mooncake store: %" PRId64 " bytes cannot be got as %.20s...: %" PRId64, n, name,
                        got);
    memcpy(bytes, store->landing, (size_t)n);
    return CPA_OK;
}

static cpa_status get(void *ctx, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n, cpa_error *err) {
    cpa_mooncake_store *store = ctx;
    char name[KEY_BYTES];
    *n = 0;
    name_of(key, name);
    const int is_there = store->mooncake.is_exist(store->client, name);
    if (is_there == 0) return CPA_OK;
    const int64_t found = is_there < 0 ? is_there : store->mooncake.get_size(store->client, name);
    if (found < 0) return cpa_fail(err, CPA_IO, "mooncake store: %.20s... cannot be looked up: %" PRId64, name, found);
    if (found <= most) {
        pthread_mutex_lock(&store->lock);
        const cpa_status status = get_locked(store, name, bytes, found, err);
        pthread_mutex_unlock(&store->lock);
        if (status != CPA_OK) return status;
    }
    *n = found;
    return CPA_OK;
}

void cpa_mooncake_store_table(cpa_mooncake_store *store, cpa_block_store *out) {
    if (out) *out = (cpa_block_store){.size = sizeof *out, .ctx = store, .put = put, .get = get};
}
