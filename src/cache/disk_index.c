#include "src/cache/disk_index.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "src/cache/file_bytes.h"

enum {
    MAGIC = 0x44415043 /* "CPAD" */,
    VERSION = 1,
    HEAD_BYTES = 20,
    ENTRY_BYTES = 12 + 8 + 32 + 32,
    DIGEST_BYTES = 32,
    MOST_IDENTITY = 4096,
    NAME_BYTES = 128
};

static void put(uint8_t **at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) *(*at)++ = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t **at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)(*at)[i] << 8 * i;
    *at += bytes;
    return value;
}

static int digest(const uint8_t *bytes, int64_t n, uint8_t out[DIGEST_BYTES]) {
    return EVP_Digest(bytes, (size_t)n, out, NULL, EVP_sha256(), NULL);
}

/* ---- out ---- */

static void put_entry(uint8_t **at, const cpa_disk_entry *entry) {
    put(at, (uint32_t)entry->group, 4);
    put(at, (uint32_t)entry->slot, 4);
    put(at, entry->ranks, 4);
    put(at, entry->used, 8);
    memcpy(*at, entry->key, sizeof entry->key);
    memcpy(*at + sizeof entry->key, entry->sha256, sizeof entry->sha256);
    *at += sizeof entry->key + sizeof entry->sha256;
}

/* Writes a file that did not exist; 0 if that fails, with errno. */
static int write_file(int folder, const char *name, const uint8_t *bytes, int64_t n) {
    (void)unlinkat(folder, name, 0); /* of one who has not come to its end */
    const int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int ok = fd >= 0 && cpa_file_write_at(fd, bytes, n, 0) && fsync(fd) == 0;
    const int why = errno;
    if (fd >= 0 && close(fd) != 0 && ok) return 0;
    errno = why;
    return ok;
}

cpa_status cpa_disk_index_write(int folder, const char *name, const char *identity, const cpa_disk_entry *entries,
                                int64_t n, cpa_error *err) {
    char new_name[NAME_BYTES];
    const int64_t length = (int64_t)strlen(identity);
    const int64_t bytes = HEAD_BYTES + length + n * ENTRY_BYTES + DIGEST_BYTES;
    uint8_t *file = malloc((size_t)bytes), *at = file;
    if (!file) return cpa_fail(err, CPA_NO_MEMORY, "no memory for an index of %" PRId64 " blocks", n);
    put(&at, MAGIC, 4);
    put(&at, VERSION, 4);
    put(&at, (uint64_t)length, 4);
    put(&at, (uint64_t)n, 8);
    memcpy(at, identity, (size_t)length);
    at += length;
    for (int64_t i = 0; i < n; i++) put_entry(&at, &entries[i]);
    const int hashed = digest(file, at - file, at);
    snprintf(new_name, sizeof new_name, "%s.new", name);
    const int ok = hashed && write_file(folder, new_name, file, bytes) &&
                   renameat(folder, new_name, folder, name) == 0 && fsync(folder) == 0;
    const int why = errno;
    free(file);
    if (ok) return CPA_OK;
    (void)unlinkat(folder, new_name, 0);
    return cpa_fail(err, CPA_IO, "%s cannot be written: %s", name, hashed ? strerror(why) : "OpenSSL gives no SHA-256");
}

/* ---- in ---- */

/* All of a file, to be freed; *n is -1 where there is none. NULL: see errno. */
static uint8_t *read_file(int folder, const char *name, int64_t *n) {
    struct stat about;
    uint8_t *bytes = NULL;
    *n = -1;
    const int fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return NULL;
    int ok = fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
    if (ok) bytes = malloc((size_t)about.st_size + 1);
    if (bytes && cpa_file_read_at(fd, bytes, about.st_size, 0)) *n = about.st_size;
    const int why = bytes ? errno : ok ? ENOMEM : EINVAL;
    close(fd);
    if (*n >= 0) return bytes;
    free(bytes);
    errno = why;
    return NULL;
}

/* The part of an identity that begins there, up to a comma. */
static int part_length(const char *part, int left) {
    int n = 0;
    while (n < left && part[n] != ',' && part[n] != 0) n++;
    return n;
}

/* Names the first part that differs. */
static cpa_status check_identity(const char *name, const char *expected, const char *found, int left, cpa_error *err) {
    for (int more = 1; more;) {
        const int n = part_length(found, left), m = part_length(expected, INT_MAX);
        if (n != m || memcmp(found, expected, (size_t)n) != 0)
            return cpa_fail(err, CPA_INVALID, "%s is of another job, of%s%.*s; expected%s%.*s", name,
                            found[0] == ' ' ? "" : " ", n, found, expected[0] == ' ' ? "" : " ", m, expected);
        more = n < left;
        if (more != (expected[m] == ','))
            return cpa_fail(err, CPA_INVALID, "%s is of another job, which tells %s of itself", name,
                            more ? "more" : "less");
        found += n + more;
        left -= n + more;
        expected += m + more;
    }
    return CPA_OK;
}

static cpa_status check_head(const char *name, const char *identity, const uint8_t *file, int64_t bytes, int64_t *n,
                             cpa_error *err) {
    const uint8_t *at = file;
    uint8_t found[DIGEST_BYTES];
    if (bytes < HEAD_BYTES + DIGEST_BYTES) return cpa_fail(err, CPA_IO, "%s has %" PRId64 " bytes", name, bytes);
    const uint64_t magic = get(&at, 4), version = get(&at, 4), length = get(&at, 4), entries = get(&at, 8);
    if (magic != MAGIC || version != VERSION)
        return cpa_fail(err, CPA_INVALID, "%s begins with %08" PRIx64 ", version %" PRIu64 "; expected %08x, %d", name,
                        magic, version, MAGIC, VERSION);
    const int64_t rest = bytes - HEAD_BYTES - DIGEST_BYTES;
    if (length > MOST_IDENTITY || entries > (uint64_t)rest / ENTRY_BYTES ||
        (int64_t)length + (int64_t)entries * ENTRY_BYTES != rest)
        return cpa_fail(err, CPA_IO, "%s has %" PRId64 " bytes, which %" PRIu64 " entries do not fit", name, bytes,
                        entries);
    if (!digest(file, bytes - DIGEST_BYTES, found) || memcmp(found, file + bytes - DIGEST_BYTES, sizeof found) != 0)
        return cpa_fail(err, CPA_IO, "%s has another SHA-256 than it says", name);
    *n = (int64_t)entries;
    return check_identity(name, identity, (const char *)at, (int)length, err);
}

static void get_entry(const uint8_t **at, cpa_disk_entry *out) {
    out->group = (int32_t)get(at, 4);
    out->slot = (int32_t)get(at, 4);
    out->ranks = (uint32_t)get(at, 4);
    out->used = get(at, 8);
    memcpy(out->key, *at, sizeof out->key);
    memcpy(out->sha256, *at + sizeof out->key, sizeof out->sha256);
    *at += sizeof out->key + sizeof out->sha256;
}

cpa_status cpa_disk_index_read(int folder, const char *name, const char *identity, cpa_disk_entry **entries, int64_t *n,
                               cpa_error *err) {
    int64_t bytes;
    uint8_t *file = read_file(folder, name, &bytes);
    *entries = NULL;
    *n = 0;
    if (!file && errno == ENOENT) return CPA_OK;
    if (!file) return cpa_fail(err, CPA_IO, "%s cannot be read: %s", name, strerror(errno));
    cpa_status status = check_head(name, identity, file, bytes, n, err);
    if (status == CPA_OK) *entries = malloc(((size_t)*n + 1) * sizeof **entries);
    if (status == CPA_OK && !*entries)
        status = cpa_fail(err, CPA_NO_MEMORY, "no memory for an index of %" PRId64 " blocks", *n);
    if (status != CPA_OK) *n = 0;
    const uint8_t *at = file + HEAD_BYTES + strlen(identity);
    for (int64_t i = 0; i < *n; i++) get_entry(&at, &(*entries)[i]);
    free(file);
    return status;
}
