/* The functions of Mooncake's C interface that a store over it calls, over files: the address of the master is a
 * folder, and an object is a file of it. What is got arrives in registered memory alone. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BAD = -1, PATH = 4096 };

typedef struct client {
    char folder[PATH];
    char *buffer;
    size_t buffer_bytes;
} client;

#define EXPORTED __attribute__((visibility("default")))

static int path_of(const client *c, const char *key, char path[PATH]) {
    return snprintf(path, PATH, "%s/%s", c->folder, key) < PATH;
}

EXPORTED void *mooncake_store_create(void);
void *mooncake_store_create(void) {
    return calloc(1, sizeof(client));
}

EXPORTED void mooncake_store_destroy(void *c);
void mooncake_store_destroy(void *c) {
    free(c);
}

EXPORTED int mooncake_store_setup(client *c, const char *hostname, const char *metadata, uint64_t segment,
                                  uint64_t buffer, const char *protocol, const char *device, const char *master);
int mooncake_store_setup(client *c, const char *hostname, const char *metadata, uint64_t segment, uint64_t buffer,
                         const char *protocol, const char *device, const char *master) {
    struct stat about;
    (void)segment;
    if (!hostname[0] || !metadata[0] || buffer == 0 || strcmp(protocol, "tcp") != 0 || device[0]) return BAD;
    if (stat(master, &about) != 0 || !S_ISDIR(about.st_mode)) return BAD;
    return snprintf(c->folder, sizeof c->folder, "%s", master) < (int)sizeof c->folder ? 0 : BAD;
}

EXPORTED int mooncake_store_register_buffer(client *c, void *buffer, size_t n);
int mooncake_store_register_buffer(client *c, void *buffer, size_t n) {
    if (c->buffer) return BAD;
    c->buffer = buffer;
    c->buffer_bytes = n;
    return 0;
}

EXPORTED int mooncake_store_unregister_buffer(client *c, const void *buffer);
int mooncake_store_unregister_buffer(client *c, const void *buffer) {
    if (c->buffer != buffer) return BAD;
    c->buffer = NULL;
    return 0;
}

/* An object that is there stays as it is. */
EXPORTED int mooncake_store_put(client *c, const char *key, const void *bytes, size_t n, const void *config);
int mooncake_store_put(client *c, const char *key, const void *bytes, size_t n, const void *config) {
    char path[PATH];
    if (config || !path_of(c, key, path)) return BAD;
    const int file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (file < 0) return access(path, R_OK);
    const int ok = write(file, bytes, n) == (ssize_t)n;
    close(file);
    return ok ? 0 : BAD;
}

EXPORTED int mooncake_store_is_exist(client *c, const char *key);
int mooncake_store_is_exist(client *c, const char *key) {
    char path[PATH];
    return path_of(c, key, path) ? access(path, R_OK) == 0 : BAD;
}

EXPORTED int64_t mooncake_store_get_size(client *c, const char *key);
int64_t mooncake_store_get_size(client *c, const char *key) {
    char path[PATH];
    struct stat about;
    return path_of(c, key, path) && stat(path, &about) == 0 ? about.st_size : BAD;
}

EXPORTED int64_t mooncake_store_get_into(client *c, const char *key, char *bytes, size_t n);
int64_t mooncake_store_get_into(client *c, const char *key, char *bytes, size_t n) {
    char path[PATH];
    if (bytes != c->buffer || n > c->buffer_bytes || !path_of(c, key, path)) return BAD;
    const int file = open(path, O_RDONLY);
    const int64_t got = file < 0 ? BAD : read(file, bytes, n);
    if (file >= 0) close(file);
    return got;
}
