/* Communicators from MPI: non-blocking point-to-point messages on a duplicate of the caller's communicator. Counts are
 * int in MPI, so a long message travels in fragments, which keep their order. */
#include <cpattn/mpi.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Bytes of one MPI call. */
#define PIECE_BYTES ((int64_t)64 << 20)
/* How long messages that are given up one after the other may go on, all of them together. */
#define LINGER_S 1.0

struct cpa_comm_request {
    struct cpa_comm_request *next; /* free ones */
    MPI_Request mpi;               /* of the fragment that is under way */
    char *data;
    int64_t bytes, at; /* of the message, and where the fragment begins */
    int32_t peer, tag;
    int is_send;
};

typedef struct mpi_state {
    MPI_Comm comm;
    int rank;
    double let_go_s; /* when the first of the messages that were last given up was, as MPI_Wtime says */
    cpa_comm_request *free_requests;
} mpi_state;

/* Failures that happen here, where nothing of the library but its public functions is at hand. */
static cpa_status fail(cpa_error *err, cpa_status status, const char *what, const char *why) {
    if (err) {
        snprintf(err->message, sizeof err->message, "%s: %s", what, why);
        err->status = status;
    }
    return status;
}

static cpa_status check(int code, const char *call, cpa_error *err) {
    if (code == MPI_SUCCESS) return CPA_OK;
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    text[length] = 0;
    return fail(err, CPA_COMM, call, text);
}

/* ---- messages ---- */

static int fragment_bytes(const cpa_comm_request *r) {
    return (int)(r->bytes - r->at < PIECE_BYTES ? r->bytes - r->at : PIECE_BYTES);
}

static cpa_status start_fragment(mpi_state *s, cpa_comm_request *r, cpa_error *err) {
    char *at = r->data ? r->data + r->at : NULL;
    if (r->is_send) {
        return check(MPI_Isend(at, fragment_bytes(r), MPI_BYTE, r->peer, r->tag, s->comm, &r->mpi), "MPI_Isend", err);
    }
    return check(MPI_Irecv(at, fragment_bytes(r), MPI_BYTE, r->peer, r->tag, s->comm, &r->mpi), "MPI_Irecv", err);
}

static void put_back(mpi_state *s, cpa_comm_request *r) {
    r->next = s->free_requests;
    s->free_requests = r;
}

static cpa_status start(mpi_state *s, const cpa_comm_request *message, cpa_comm_request **out, cpa_error *err) {
    cpa_comm_request *r = s->free_requests;
    if (r) {
        s->free_requests = r->next;
    } else {
        r = malloc(sizeof *r);
        if (!r) return fail(err, CPA_NO_MEMORY, "a message over MPI", "no memory");
    }
    *r = *message;
    cpa_status status = start_fragment(s, r, err);
    if (status != CPA_OK) {
        put_back(s, r);
        return status;
    }
    *out = r;
    return CPA_OK;
}

static cpa_status mpi_send(void *state, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                           cpa_comm_request **out, cpa_error *err) {
    const cpa_comm_request message = {
        .data = (char *)(uintptr_t)data, .bytes = bytes, .peer = peer, .tag = tag, .is_send = 1};
    return start(state, &message, out, err);
}

static cpa_status mpi_receive(void *state, int32_t peer, int32_t tag, void *data, int64_t bytes, cpa_comm_request **out,
                              cpa_error *err) {
    const cpa_comm_request message = {.data = data, .bytes = bytes, .peer = peer, .tag = tag};
    return start(state, &message, out, err);
}

/* A fragment is here: is it whole? */
static cpa_status check_fragment(const mpi_state *s, const cpa_comm_request *r, const MPI_Status *arrived,
                                 cpa_error *err) {
    char why[128];
    int got = 0;
    MPI_Get_count(arrived, MPI_BYTE, &got);
    if (got == fragment_bytes(r)) return CPA_OK;
    snprintf(why, sizeof why, "received %d bytes from rank %d, expected %d", got, r->peer, fragment_bytes(r));
    char who[32];
    snprintf(who, sizeof who, "rank %d", s->rank);
    return fail(err, CPA_COMM, who, why);
}

static cpa_status mpi_test(void *state, cpa_comm_request *r, int *done, cpa_error *err) {
    mpi_state *s = state;
    MPI_Status arrived;
    int fragment_done = 0;
    *done = 0;
    cpa_status status = check(MPI_Test(&r->mpi, &fragment_done, &arrived), "MPI_Test", err);
    if (status == CPA_OK && !fragment_done) return CPA_OK;
    if (status == CPA_OK && !r->is_send) status = check_fragment(s, r, &arrived, err);
    if (status == CPA_OK) {
        r->at += fragment_bytes(r);
        if (r->at < r->bytes) status = start_fragment(s, r, err);
        *done = r->at >= r->bytes;
    }
    if (status != CPA_OK || *done) put_back(s, r);
    return status;
}

/* MPI takes no send back. One that its receiver has begun to take reads the buffer until it ends, and ends soon, as the
 * receiver waits for it too; one that nobody takes is let go after a while, and does not read. */
static void let_go(mpi_state *s, cpa_comm_request *r) {
    const struct timespec pause = {.tv_nsec = 100000};
    const double now = MPI_Wtime();
    int done = 0;
    if (now > s->let_go_s + 2 * LINGER_S) s->let_go_s = now;
    while (MPI_Test(&r->mpi, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done && MPI_Wtime() < s->let_go_s + LINGER_S)
        nanosleep(&pause, NULL);
    if (!done) MPI_Request_free(&r->mpi);
}

static void mpi_cancel(void *state, cpa_comm_request *r) {
    if (r->is_send) {
        let_go(state, r);
    } else {
        MPI_Cancel(&r->mpi);
        MPI_Wait(&r->mpi, MPI_STATUS_IGNORE);
    }
    put_back(state, r);
}

/* ---- life ---- */

static void mpi_close(void *state) {
    mpi_state *s = state;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized) MPI_Comm_free(&s->comm);
    while (s->free_requests) {
        cpa_comm_request *next = s->free_requests->next;
        free(s->free_requests);
        s->free_requests = next;
    }
    free(s);
}

/* Whether MPI may be called from here. */
static cpa_status check_mpi(MPI_Comm comm, cpa_error *err) {
    static const char what[] = "cpa_comm_from_mpi";
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    if (!initialized) return fail(err, CPA_INVALID, what, "MPI is not initialised, expected MPI_Init_thread before");
    MPI_Finalized(&finalized);
    if (finalized) return fail(err, CPA_INVALID, what, "MPI is finalised");
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_FUNNELED) {
        return fail(err, CPA_INVALID, what,
                    "MPI runs at MPI_THREAD_SINGLE, expected MPI_Init_thread with MPI_THREAD_FUNNELED or more");
    }
    if (comm == MPI_COMM_NULL) return fail(err, CPA_INVALID, what, "MPI_COMM_NULL");
    return CPA_OK;
}

cpa_status cpa_comm_from_mpi(MPI_Comm mpi_comm, const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    static const cpa_comm_ops ops = {sizeof ops, "mpi", mpi_send, mpi_receive, mpi_test, mpi_cancel, mpi_close};
    int rank, size, has_memory, all_have;
    MPI_Comm copy;
    cpa_status status = check_mpi(mpi_comm, err);
    if (status != CPA_OK) return status;
    status = check(MPI_Comm_dup(mpi_comm, &copy), "MPI_Comm_dup", err);
    if (status != CPA_OK) return status;
    MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
    MPI_Comm_rank(copy, &rank);
    MPI_Comm_size(copy, &size);

    mpi_state *s = malloc(sizeof *s);
    if (s) *s = (mpi_state){.comm = copy, .rank = rank};
    has_memory = s != NULL;
    status = check(MPI_Allreduce(&has_memory, &all_have, 1, MPI_INT, MPI_MIN, copy), "MPI_Allreduce", err);
    if (status == CPA_OK && !all_have) status = fail(err, CPA_NO_MEMORY, "cpa_comm_from_mpi", "no memory on a rank");
    if (status == CPA_OK) status = cpa_comm_create(&ops, s, rank, size, options, out, err);
    if (status == CPA_OK) return CPA_OK;
    if (s) {
        mpi_close(s);
    } else {
        MPI_Comm_free(&copy);
    }
    return status;
}
