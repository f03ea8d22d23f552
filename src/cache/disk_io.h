/* Runs of bytes of files, several at once: by io_uring (J. Axboe, "Efficient IO with io_uring", 2019) where the kernel lets
 * the process have it, otherwise one after another by pread and pwrite. A run is done, or has an error, either way alike.
 * One thread calls these functions for one cpa_disk_io. */
#ifndef CPA_CACHE_DISK_IO_H
#define CPA_CACHE_DISK_IO_H

#include <stdint.h>

enum { CPA_DISK_RUNS = 16 /* at once, at most */ };

typedef struct cpa_disk_io {
    struct io_uring *ring; /* NULL: pread and pwrite */
} cpa_disk_io;

/* With a ring, if there can be one and it can read and write; otherwise, and without `wants_ring`, without. Returns why there
 * is none, NULL where there is one. */
const char *cpa_disk_io_open(cpa_disk_io *io, int wants_ring);
void cpa_disk_io_close(cpa_disk_io *io);

typedef struct cpa_disk_run {
    int file, writes;
    void *bytes;
    int64_t n, at; /* bytes from offset `at` of the file on; n = 0: nothing is to be done */
    int error;     /* 0, or the errno: EIO where the file ends before them */
} cpa_disk_run;

/* Does the runs [n], n <= CPA_DISK_RUNS, which do not overlap where they write, and sets their errors. */
void cpa_disk_io_do(cpa_disk_io *io, cpa_disk_run *runs, int32_t n);

#endif
