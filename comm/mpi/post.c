/* Messages from rank 0 that travel while the ranks do something else: non-blocking point-to-point messages on the
 * control channel, whose other traffic is collective. First the length goes to each rank, then the bytes in pieces. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "comm/mpi/mpi_error.h"

typedef enum receive_state { IDLE = 0, LENGTH_EXPECTED, BYTES_EXPECTED } receive_state;

struct cpa_post {
    cpa_control *control;
    int64_t length; /* of the message that is sent, or expected */
    MPI_Request *requests;
    int n_requests, capacity;
    receive_state state;
    void *buffer; /* of what is received, or sent */
    int64_t buffer_capacity;
};

static cpa_status reserve(cpa_post *post, int64_t n, cpa_error *err) {
    if (n <= post->capacity) return CPA_OK;
    MPI_Request *requests = realloc(post->requests, (size_t)n * sizeof *requests);
    if (!requests) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld messages", (long long)n);
    post->requests = requests;
    post->capacity = (int)n;
    return CPA_OK;
}

static cpa_status reserve_buffer(cpa_post *post, int64_t bytes, cpa_error *err) {
    if (bytes <= post->buffer_capacity) return CPA_OK;
    void *grown = realloc(post->buffer, (size_t)bytes);
    if (!grown) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a message of %lld bytes", (long long)bytes);
    post->buffer = grown;
    post->buffer_capacity = bytes;
    return CPA_OK;
}

static int64_t pieces(int64_t bytes) {
    return bytes > 0 ? (bytes + CPA_MPI_PIECE_BYTES - 1) / CPA_MPI_PIECE_BYTES : 0;
}

static int piece_bytes(int64_t bytes, int64_t at) {
    return (int)(bytes - at < CPA_MPI_PIECE_BYTES ? bytes - at : CPA_MPI_PIECE_BYTES);
}

cpa_status cpa_post_open(cpa_control *control, cpa_post **out, cpa_error *err) {
    cpa_post *post = calloc(1, sizeof *post);
    if (!post) return cpa_fail(err, CPA_NO_MEMORY, "no memory for messages of rank 0");
    post->control = control;
    cpa_status status = reserve(post, 1, err);
    if (status != CPA_OK) {
        free(post);
        return status;
    }
    *out = post;
    return CPA_OK;
}

/* Whether what is under way ends within a second: a rank that failed may take no part in it any more. */
static int settle(cpa_post *post) {
    enum { SECONDS = 1 };
    int done = post->n_requests == 0;
    for (const double begin = cpa_clock_now(); !done && cpa_clock_now() - begin < SECONDS; sched_yield()) {
        if (MPI_Testall(post->n_requests, post->requests, &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) return 0;
    }
    return done;
}

void cpa_post_close(cpa_post *post) {
    if (!post) return;
    for (int i = 0; i < post->n_requests && post->state != IDLE; i++) {
        if (post->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&post->requests[i]);
    }
    if (!settle(post)) return; /* left to the end of the process: MPI may still use the buffer */
    free(post->requests);
    free(post->buffer);
    free(post);
}

/* Whether all that is under way is done; `wait`: waits for it. */
static cpa_status test(cpa_post *post, int wait, int *done, cpa_error *err) {
    for (*done = post->n_requests == 0; !*done;) {
        int code = MPI_Testall(post->n_requests, post->requests, done, MPI_STATUSES_IGNORE);
        CPA_TRY(cpa_mpi_check(code, "MPI_Testall", err));
        if (!*done && !wait) return CPA_OK;
        if (!*done) sched_yield(); /* ranks may outnumber cores: the one we wait for needs this one */
    }
    post->n_requests = 0;
    return CPA_OK;
}

cpa_status cpa_post_flush(cpa_post *post, int wait, int *flushed, cpa_error *err) {
    return test(post, wait, flushed, err);
}

cpa_status cpa_post_send(cpa_post *post, const void *data, int64_t bytes, cpa_error *err) {
    const MPI_Comm comm = post->control->comm;
    CPA_TRY(reserve(post, (pieces(bytes) + 1) * post->control->size, err));
    CPA_TRY(reserve_buffer(post, bytes, err));
    if (bytes > 0) memcpy(post->buffer, data, (size_t)bytes);
    post->length = bytes;
    for (int32_t rank = 1; rank < post->control->size; rank++) {
        int code =
            MPI_Isend(&post->length, 1, MPI_INT64_T, rank, CPA_MPI_TAG_LENGTH, comm, &post->requests[post->n_requests]);
        CPA_TRY(cpa_mpi_check(code, "MPI_Isend", err));
        post->n_requests++;
        for (int64_t at = 0; at < bytes; at += CPA_MPI_PIECE_BYTES) {
            code = MPI_Isend((const char *)post->buffer + at, piece_bytes(bytes, at), MPI_BYTE, rank, CPA_MPI_TAG_BYTES,
                             comm, &post->requests[post->n_requests]);
            CPA_TRY(cpa_mpi_check(code, "MPI_Isend", err));
            post->n_requests++;
        }
    }
    return CPA_OK;
}

static cpa_status expect_length(cpa_post *post, cpa_error *err) {
    int code = MPI_Irecv(&post->length, 1, MPI_INT64_T, 0, CPA_MPI_TAG_LENGTH, post->control->comm, post->requests);
    CPA_TRY(cpa_mpi_check(code, "MPI_Irecv", err));
    post->n_requests = 1;
    post->state = LENGTH_EXPECTED;
    return CPA_OK;
}

static cpa_status expect_bytes(cpa_post *post, cpa_error *err) {
    CPA_TRY(reserve(post, pieces(post->length), err));
    CPA_TRY(reserve_buffer(post, post->length, err));
    post->state = BYTES_EXPECTED;
    for (int64_t at = 0; at < post->length; at += CPA_MPI_PIECE_BYTES) {
        int code = MPI_Irecv((char *)post->buffer + at, piece_bytes(post->length, at), MPI_BYTE, 0, CPA_MPI_TAG_BYTES,
                             post->control->comm, &post->requests[post->n_requests]);
        CPA_TRY(cpa_mpi_check(code, "MPI_Irecv", err));
        post->n_requests++;
    }
    return CPA_OK;
}

cpa_status cpa_post_receive(cpa_post *post, int wait, int *arrived, const void **data, int64_t *bytes, cpa_error *err) {
    int done;
    *arrived = 0;
    *data = NULL;
    if (post->state == IDLE) CPA_TRY(expect_length(post, err));
    if (post->state == LENGTH_EXPECTED) {
        CPA_TRY(test(post, wait, &done, err));
        if (!done) return CPA_OK;
        CPA_TRY(expect_bytes(post, err));
    }
    CPA_TRY(test(post, wait, &done, err));
    if (!done) return CPA_OK;
    post->state = IDLE;
    *arrived = 1;
    *bytes = post->length;
    if (post->length > 0) *data = post->buffer;
    return CPA_OK;
}
