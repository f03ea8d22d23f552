/* What the two MPI channels share: how they report a failing MPI call (their communicators carry MPI_ERRORS_RETURN), the
 * tags of messages on the control channel, and the length of one. */
#ifndef CPA_COMM_MPI_ERROR_H
#define CPA_COMM_MPI_ERROR_H

#include <mpi.h>

#include "base/check.h"

/* Bytes of one MPI call; counts are int there, so longer buffers travel in several. */
#define CPA_MPI_PIECE_BYTES ((int64_t)64 << 20)

enum { CPA_MPI_TAG_LENGTH = 1, CPA_MPI_TAG_BYTES, CPA_MPI_TAG_PRESENT };

static inline cpa_status cpa_mpi_check(int code, const char *call, cpa_error *err) {
    if (code == MPI_SUCCESS) return CPA_OK;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    return cpa_fail(err, CPA_COMM, "%s: %.*s", call, length, text);
}

/* A duplicate of comm that returns its errors. */
static inline cpa_status cpa_mpi_dup(MPI_Comm comm, MPI_Comm *out, cpa_error *err) {
    MPI_Comm copy;
    CPA_TRY(cpa_mpi_check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup", err));
    MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
    *out = copy;
    return CPA_OK;
}

#endif
