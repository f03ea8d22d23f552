/* Runs of bytes at a place of a file, all of them or none. */
#ifndef CPA_CACHE_FILE_BYTES_H
#define CPA_CACHE_FILE_BYTES_H

#include <errno.h>
#include <stdint.h>
#include <unistd.h>

/* 0 if that fails, with errno. */
static inline int cpa_file_write_at(int fd, const void *bytes, int64_t n, int64_t at) {
    for (int64_t done = 0; done < n;) {
        const ssize_t written = pwrite(fd, (const char *)bytes + done, (size_t)(n - done), at + done);
        if (written < 0 && errno != EINTR) return 0;
        if (written > 0) done += written;
    }
    return 1;
}

/* The same; a file that ends before them is EIO. */
static inline int cpa_file_read_at(int fd, void *bytes, int64_t n, int64_t at) {
    for (int64_t done = 0; done < n;) {
        const ssize_t got = pread(fd, (char *)bytes + done, (size_t)(n - done), at + done);
        if (got == 0) errno = EIO;
        if (got == 0 || (got < 0 && errno != EINTR)) return 0;
        if (got > 0) done += got;
    }
    return 1;
}

#endif
