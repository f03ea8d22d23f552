/* A store of parts over NIXL: each process that puts has a region of its own, which the others read from memory to
 * memory. They find each other by a folder, where each that puts has a file:
 *
 *     cpattn-RANDOM.nixl    magic u32, version u32, address u64, bytes u64, what NIXL describes the agent by
 *
 * A file is written under another name and renamed, and removed when its store ends. One of a process that was killed
 * stays: who reads it finds nobody there, says so once, and asks it no more. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cpattn/blocks.h>
#include <utlist.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/cache/nixl_agent.h"
#include "src/cache/part_region.h"

enum { MAGIC = 0x4e415043 /* "CPAN" */, VERSION = 1, NAME_BYTES = 48, MOST_FILE_BYTES = 1 << 20 };

static const char SUFFIX[] = ".nixl";

typedef struct file_head {
    uint32_t magic, version;
    uint64_t address, bytes;
} file_head;

/* A process with a region. */
typedef struct peer {
    struct peer *next;
    cpa_nixl_store *store;
    char name[NAME_BYTES];
    uint64_t address;
    cpa_region_access access;
    int is_lost;
} peer;

struct cpa_nixl_store {
    pthread_mutex_t lock; /* of all below */
    cpa_nixl_agent *agent;
    int folder; /* descriptor */
    char name[NAME_BYTES];
    void *memory; /* NULL: it puts nothing */
    cpa_region_access access;
    cpa_part_region *region;
    int is_announced;
    peer *peers;
};

/* ---- its own region ---- */

static cpa_status read_own(void *ctx, int64_t at, void *bytes, int64_t n, cpa_error *err) {
    (void)err;
    memcpy(bytes, (char *)((cpa_nixl_store *)ctx)->memory + at, (size_t)n);
    return CPA_OK;
}

/* Others read at any time: a slot is written behind its part. */
static cpa_status write_own(void *ctx, int64_t at, const void *bytes, int64_t n, cpa_error *err) {
    (void)err;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)((cpa_nixl_store *)ctx)->memory + at, bytes, (size_t)n);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return CPA_OK;
}

static cpa_status make_region(cpa_nixl_store *store, int64_t bytes, cpa_error *err) {
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory for %" PRId64 " bytes of parts", bytes);
    store->memory = memory;
    store->access = (cpa_region_access){store, bytes, read_own, write_own, 0};
    CPA_TRY(cpa_part_region_create(&store->access, &store->region, err));
    return cpa_nixl_agent_offer(store->agent, memory, bytes, err);
}

/* ---- the folder ---- */

static cpa_status write_file(const cpa_nixl_store *store, const char *name, const void *bytes, size_t n,
                             cpa_error *err) {
    char own[NAME_BYTES + 8];
    snprintf(own, sizeof own, "%s.new", store->name);
    const int file = openat(store->folder, own, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    FILE *stream = file < 0 ? NULL : fdopen(file, "w");
    int ok = stream && fwrite(bytes, 1, n, stream) == n;
    if (stream) ok = fclose(stream) == 0 && ok;
    if (ok && renameat(store->folder, own, store->folder, name) == 0) return CPA_OK;
    const int why = errno;
    unlinkat(store->folder, own, 0);
    return cpa_fail(err, CPA_IO, "nixl store: file %s cannot be written: %s", name, strerror(why));
}

static void name_file(const cpa_nixl_store *store, char name[NAME_BYTES + 8]) {
    snprintf(name, NAME_BYTES + 8, "%s%s", store->name, SUFFIX);
}

/* Tells the others of the region. */
static cpa_status announce(cpa_nixl_store *store, cpa_error *err) {
    const file_head head = {MAGIC, VERSION, (uintptr_t)store->memory, (uint64_t)store->access.bytes};
    char name[NAME_BYTES + 8];
    void *description;
    size_t n;
    CPA_TRY(cpa_nixl_agent_describe(store->agent, &description, &n, err));
    char *bytes = malloc(sizeof head + n);
    cpa_status status = bytes ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory");
    if (bytes) {
        memcpy(bytes, &head, sizeof head);
        memcpy(bytes + sizeof head, description, n);
        name_file(store, name);
        status = write_file(store, name, bytes, sizeof head + n, err);
    }
    store->is_announced = status == CPA_OK;
    free(bytes);
    free(description);
    return status;
}

/* The content of a file of the folder; free() it. */
static cpa_status read_file(const cpa_nixl_store *store, const char *name, char **out, size_t *n, cpa_error *err) {
    char *bytes = malloc(MOST_FILE_BYTES);
    if (!bytes) return cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory");
    const int file = openat(store->folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *stream = file < 0 ? NULL : fdopen(file, "r");
    *n = stream ? fread(bytes, 1, MOST_FILE_BYTES, stream) : 0;
    if (stream) fclose(stream);
    if (*n <= sizeof(file_head) || *n == MOST_FILE_BYTES) {
        free(bytes);
        return cpa_fail(err, CPA_IO, "nixl store: file %s has %zu bytes, expected a head of %zu and a description",
                        name, *n, sizeof(file_head));
    }
    *out = bytes;
    return CPA_OK;
}

/* ---- other processes ---- */

static cpa_status read_peer(void *ctx, int64_t at, void *bytes, int64_t n, cpa_error *err) {
    const peer *p = ctx;
    return cpa_nixl_agent_read(p->store->agent, p->name, p->address + (uint64_t)at, bytes, n, err);
}

static cpa_status meet(peer *p, const char *file, cpa_error *err) {
    file_head head;
    char *bytes = NULL;
    size_t n = 0;
    CPA_TRY(read_file(p->store, file, &bytes, &n, err));
    memcpy(&head, bytes, sizeof head);
    cpa_status status = CPA_OK;
    if (head.magic != MAGIC || head.version != VERSION || head.bytes > (uint64_t)INT64_MAX)
        status =
            cpa_fail(err, CPA_IO,
                     "nixl store: file %s begins with %08" PRIx32 ", version %" PRIu32 "; expected %08x, version %d",
                     file, head.magic, head.version, MAGIC, VERSION);
    p->address = head.address;
    p->access = (cpa_region_access){p, (int64_t)head.bytes, read_peer, NULL, 0};
    if (status == CPA_OK)
        status = cpa_nixl_agent_meet(p->store->agent, p->name, bytes + sizeof head, n - sizeof head, err);
    free(bytes);
    return status;
}

static void lose(peer *p, const cpa_error *why) {
    p->is_lost = 1;
    cpa_log(CPA_LOG_WARN, "nixl store: nothing is read from agent %s any more: %s", p->name, why->message);
}

/* A peer for a file of the folder that is another's and was not seen before; NULL: it is not, or there is no memory. */
static peer *add_peer(cpa_nixl_store *store, const char *file) {
    const size_t length = strlen(file), suffix = strlen(SUFFIX);
    if (length <= suffix || length - suffix >= NAME_BYTES || strcmp(file + length - suffix, SUFFIX) != 0) return NULL;
    peer *p = calloc(1, sizeof *p), *known;
    if (!p) return NULL;
    memcpy(p->name, file, length - suffix);
    p->store = store;
    LL_FOREACH(store->peers, known) if (strcmp(known->name, p->name) == 0) break;
    if (known || strcmp(p->name, store->name) == 0) {
        free(p);
        return NULL;
    }
    LL_PREPEND(store->peers, p);
    return p;
}

/* What the peers from the first up to `end` have of a part; 1: they have it. What is not reached is lost. */
static int ask(peer *first, const peer *end, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n) {
    for (peer *p = first; p != end; p = p->next) {
        cpa_error why = {CPA_OK, ""};
        if (p->is_lost) continue;
        if (cpa_part_region_get(&p->access, key, bytes, most, n, &why) != CPA_OK) {
            *n = 0;
            lose(p, &why);
        }
        if (*n > 0) return 1;
    }
    return 0;
}

/* Meets those who have come since. */
static cpa_status look_around(cpa_nixl_store *store, cpa_error *err) {
    const int copy = openat(store->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *files = copy < 0 ? NULL : fdopendir(copy);
    if (!files) {
        const int why = errno;
        if (copy >= 0) close(copy);
        return cpa_fail(err, CPA_IO, "nixl store: its folder cannot be read: %s", strerror(why));
    }
    for (struct dirent *file = readdir(files); file; file = readdir(files)) {
        cpa_error why = {CPA_OK, ""};
        peer *p = add_peer(store, file->d_name);
        if (p && meet(p, file->d_name, &why) != CPA_OK) lose(p, &why);
    }
    closedir(files);
    return CPA_OK;
}

/* ---- the store ---- */

static cpa_status check_options(const cpa_nixl_options *o, cpa_error *err) {
    if (!o->folder) return cpa_fail(err, CPA_INVALID, "nixl store: folder is NULL, expected where processes meet");
    if (o->bytes != 0 && o->bytes < CPA_REGION_LEAST_BYTES)
        return cpa_fail(err, CPA_INVALID, "nixl store: bytes is %" PRId64 ", expected 0, or %d or more", o->bytes,
                        CPA_REGION_LEAST_BYTES);
    return CPA_OK;
}

static cpa_status open_store(cpa_nixl_store *store, const cpa_nixl_options *o, cpa_error *err) {
    uint64_t random[2];
    store->folder = open(o->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->folder < 0)
        return cpa_fail(err, CPA_IO, "nixl store: %s cannot be opened: %s", o->folder, strerror(errno));
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return cpa_fail(err, CPA_INTERNAL, "nixl store: the system gives no random number");
    snprintf(store->name, sizeof store->name, "cpattn-%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    CPA_TRY(cpa_nixl_agent_create(o->library ? o->library : "libnixl_capi.so", o->backend ? o->backend : "UCX",
                                  store->name, &store->agent, err));
    if (o->bytes == 0) return CPA_OK;
    CPA_TRY(make_region(store, o->bytes, err));
    return announce(store, err);
}

cpa_status cpa_nixl_store_create(const cpa_nixl_options *given, cpa_nixl_store **out, cpa_error *err) {
    cpa_nixl_options options;
    CPA_TRY(CPA_STRUCT_TAKE("nixl store", given, cpa_nixl_options, folder, &options, err));
    if (!out || !CPA_RESERVED_IS_ZERO(options))
        return cpa_fail(err, CPA_INVALID, "nixl store: %s",
                        out ? "reserved bytes of its options are not zero" : "out is NULL");
    CPA_TRY(check_options(&options, err));
    cpa_nixl_store *store = calloc(1, sizeof *store);
    if (!store) return cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory");
    pthread_mutex_init(&store->lock, NULL);
    store->folder = -1;
    const cpa_status status = open_store(store, &options, err);
    if (status != CPA_OK) {
        cpa_nixl_store_destroy(store);
        return status;
    }
    *out = store;
    return CPA_OK;
}

void cpa_nixl_store_destroy(cpa_nixl_store *store) {
    char name[NAME_BYTES + 8];
    peer *p, *next;
    if (!store) return;
    name_file(store, name);
    if (store->is_announced) unlinkat(store->folder, name, 0);
    cpa_nixl_agent_destroy(store->agent);
    LL_FOREACH_SAFE(store->peers, p, next) free(p);
    cpa_part_region_destroy(store->region);
    if (store->memory) munmap(store->memory, (size_t)store->access.bytes);
    if (store->folder >= 0) close(store->folder);
    pthread_mutex_destroy(&store->lock);
    free(store);
}

static cpa_status put(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err) {
    cpa_nixl_store *store = ctx;
    if (!store->region)
        return cpa_fail(err, CPA_UNSUPPORTED, "nixl store: it was created without memory for parts, and only gets");
    pthread_mutex_lock(&store->lock);
    const cpa_status status = cpa_part_region_put(store->region, key, bytes, n, err);
    pthread_mutex_unlock(&store->lock);
    return status;
}

/* Here, with those who are known, and with those who have come since. */
static cpa_status get_locked(cpa_nixl_store *store, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n,
                             cpa_error *err) {
    peer *known = store->peers;
    *n = 0;
    if (store->region) CPA_TRY(cpa_part_region_get(&store->access, key, bytes, most, n, err));
    if (*n > 0 || ask(known, NULL, key, bytes, most, n)) return CPA_OK;
    CPA_TRY(look_around(store, err));
    ask(store->peers, known, key, bytes, most, n);
    return CPA_OK;
}

static cpa_status get(void *ctx, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n, cpa_error *err) {
    cpa_nixl_store *store = ctx;
    pthread_mutex_lock(&store->lock);
    const cpa_status status = get_locked(store, key, bytes, most, n, err);
    pthread_mutex_unlock(&store->lock);
    return status;
}

void cpa_nixl_store_table(cpa_nixl_store *store, cpa_block_store *out) {
    if (out) *out = (cpa_block_store){.size = sizeof *out, .ctx = store, .put = put, .get = get};
}
