#include "src/cache/disk_io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "src/cache/file_bytes.h"

/* What is left of a run whose first bytes are done. */
static void finish(cpa_disk_run *run, int64_t done) {
    char *bytes = (char *)run->bytes + done;
    const int64_t left = run->n - done, at = run->at + done;
    const int ok =
        run->writes ? cpa_file_write_at(run->file, bytes, left, at) : cpa_file_read_at(run->file, bytes, left, at);
    run->error = ok ? 0 : errno;
}

#ifdef CPA_HAVE_URING

#include <liburing.h>

#include "base/min_max.h"

static const int64_t MOST_BYTES = 1 << 30; /* that a system call moves */

/* Whether the kernel knows what is asked of a ring, and does something: others than its set-up may be forbidden. */
static int can_move(struct io_uring *ring) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    const int knows =
        probe && io_uring_opcode_supported(probe, IORING_OP_READ) && io_uring_opcode_supported(probe, IORING_OP_WRITE);
    struct io_uring_cqe *done;
    io_uring_free_probe(probe);
    if (!knows) return 0;
    io_uring_prep_nop(io_uring_get_sqe(ring));
    if (io_uring_submit_and_wait(ring, 1) != 1 || io_uring_peek_cqe(ring, &done) != 0) return 0;
    io_uring_cqe_seen(ring, done);
    return 1;
}

const char *cpa_disk_io_open(cpa_disk_io *io, int wants_ring) {
    struct io_uring_params none = {.flags = 0};
    io->ring = NULL;
    if (!wants_ring) return "not asked for";
    struct io_uring *ring = malloc(sizeof *ring);
    if (!ring) return "no memory";
    const int code = io_uring_queue_init_params(CPA_DISK_RUNS, ring, &none);
    if (code == 0 && can_move(ring)) {
        io->ring = ring;
        return NULL;
    }
    if (code == 0) io_uring_queue_exit(ring);
    free(ring);
    return code < 0 ? strerror(-code) : "the kernel's reads and writes nothing";
}

void cpa_disk_io_close(cpa_disk_io *io) {
    if (!io->ring) return;
    io_uring_queue_exit(io->ring);
    free(io->ring);
    io->ring = NULL;
}

/* Takes what has completed; a run that was cut short, or failed, goes on by system calls, which tell the error. */
static int32_t take_completed(struct io_uring *ring) {
    struct io_uring_cqe *cqe;
    int32_t n = 0;
    for (; io_uring_peek_cqe(ring, &cqe) == 0; n++) {
        cpa_disk_run *run = io_uring_cqe_get_data(cqe);
        const int64_t done = cpa_max64(cqe->res, 0);
        io_uring_cqe_seen(ring, cqe);
        run->error = 0;
        if (done < run->n) finish(run, done);
    }
    return n;
}

static void do_by_ring(struct io_uring *ring, cpa_disk_run *runs, int32_t n) {
    int32_t left = 0;
    for (int32_t i = 0; i < n; i++) {
        cpa_disk_run *run = &runs[i];
        if (run->n == 0) continue;
        struct io_uring_sqe *sqe = io_uring_get_sqe(ring); /* never NULL: the ring has room for all */
        const unsigned bytes = (unsigned)cpa_min64(run->n, MOST_BYTES);
        if (run->writes) {
            io_uring_prep_write(sqe, run->file, run->bytes, bytes, (uint64_t)run->at);
        } else {
            io_uring_prep_read(sqe, run->file, run->bytes, bytes, (uint64_t)run->at);
        }
        io_uring_sqe_set_data(sqe, run);
        left++;
    }
    while (left > 0) {
        (void)io_uring_submit_and_wait(ring,
                                       1); /* what it does not submit for lack of memory it submits the next time */
        left -= take_completed(ring);
    }
}

void cpa_disk_io_do(cpa_disk_io *io, cpa_disk_run *runs, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        runs[i].error = 0;
        if (!io->ring && runs[i].n > 0) finish(&runs[i], 0);
    }
    if (io->ring) do_by_ring(io->ring, runs, n);
}

#else

const char *cpa_disk_io_open(cpa_disk_io *io, int wants_ring) {
    io->ring = NULL;
    return wants_ring ? "built without liburing" : "not asked for";
}

void cpa_disk_io_close(cpa_disk_io *io) {
    (void)io;
}

void cpa_disk_io_do(cpa_disk_io *io, cpa_disk_run *runs, int32_t n) {
    (void)io;
    for (int32_t i = 0; i < n; i++) {
        runs[i].error = 0;
        if (runs[i].n > 0) finish(&runs[i], 0);
    }
}

#endif
