/* A store of parts in files of a folder, each named by its key. A file is written under a name of its own, which nobody
 * else has on any machine that reaches the folder, and then renamed, so that whoever reads one reads all of it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cpattn/blocks.h>

#include "base/check.h"

enum { NAME_BYTES = 128 };

struct cpa_folder_store {
    int folder;            /* descriptor */
    uint64_t random;       /* tells its files that are being written from those of other stores */
    atomic_ullong written; /* number of the next of them */
};

cpa_status cpa_folder_store_create(const char *path, cpa_folder_store **out, cpa_error *err) {
    if (!path || !out) return cpa_fail(err, CPA_INVALID, "folder store: %s is NULL", path ? "out" : "path");
    cpa_folder_store *store = calloc(1, sizeof *store);
    if (!store) return cpa_fail(err, CPA_NO_MEMORY, "folder store: no memory");
    if (getrandom(&store->random, sizeof store->random, 0) != (ssize_t)sizeof store->random) {
        free(store);
        return cpa_fail(err, CPA_INTERNAL, "folder store: the system gives no random number");
    }
    store->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->folder < 0) {
        const int why = errno;
        free(store);
        return cpa_fail(err, CPA_IO, "folder store: %s cannot be opened: %s", path, strerror(why));
    }
    *out = store;
    return CPA_OK;
}

void cpa_folder_store_destroy(cpa_folder_store *store) {
    if (!store) return;
    close(store->folder);
    free(store);
}

static void name_of(const cpa_block_key *key, char name[NAME_BYTES]) {
    int at = 0;
    for (size_t i = 0; i < sizeof key->digest; i++)
        at += snprintf(name + at, (size_t)(NAME_BYTES - at), "%02x", key->digest[i]);
    snprintf(name + at, (size_t)(NAME_BYTES - at), "-%" PRId32 "-%" PRId32, key->group, key->part);
}

/* Reads or writes n bytes; 0 if that fails, with errno. */
static int write_all(int fd, const char *bytes, int64_t n) {
    for (int64_t at = 0; at < n;) {
        const ssize_t written = write(fd, bytes + at, (size_t)(n - at));
        if (written < 0 && errno != EINTR) return 0;
        if (written > 0) at += written;
    }
    return 1;
}

static int read_all(int fd, char *bytes, int64_t n) {
    for (int64_t at = 0; at < n;) {
        const ssize_t got = read(fd, bytes + at, (size_t)(n - at));
        if (got == 0) errno = EIO;
        if (got == 0 || (got < 0 && errno != EINTR)) return 0;
        if (got > 0) at += got;
    }
    return 1;
}

static cpa_status put(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err) {
    cpa_folder_store *store = ctx;
    char name[NAME_BYTES], own[NAME_BYTES + 64];
    name_of(key, name);
    snprintf(own, sizeof own, "%s.%016" PRIx64 ".%llu", name, store->random, atomic_fetch_add(&store->written, 1));
    const int fd = openat(store->folder, own, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int ok = fd >= 0 && write_all(fd, bytes, n);
    int why = errno;
    if (fd >= 0 && close(fd) != 0 && ok) {
        ok = 0;
        why = errno;
    }
    if (ok && renameat(store->folder, own, store->folder, name) == 0) return CPA_OK;
    if (ok) why = errno;
    if (fd >= 0) unlinkat(store->folder, own, 0);
    return cpa_fail(err, CPA_IO, "folder store: file %s cannot be written: %s", own, strerror(why));
}

static cpa_status get(void *ctx, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n, cpa_error *err) {
    const cpa_folder_store *store = ctx;
    char name[NAME_BYTES];
    struct stat about;
    name_of(key, name);
    *n = 0;
    const int fd = openat(store->folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) return CPA_OK;
    int ok = fd >= 0 && fstat(fd, &about) == 0;
    if (ok && !S_ISREG(about.st_mode)) {
        ok = 0;
        errno = EINVAL;
    }
    if (ok && about.st_size <= most) ok = read_all(fd, bytes, about.st_size);
    const int why = errno;
    if (fd >= 0) close(fd);
    if (!ok) return cpa_fail(err, CPA_IO, "folder store: file %s cannot be read: %s", name, strerror(why));
    *n = about.st_size;
    return CPA_OK;
}

void cpa_folder_store_table(cpa_folder_store *store, cpa_block_store *out) {
    if (out) *out = (cpa_block_store){.size = sizeof *out, .ctx = store, .put = put, .get = get};
}
