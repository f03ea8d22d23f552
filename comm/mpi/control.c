/* The control channel: blocking MPI collectives on a communicator of its own. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/mpi/mpi_error.h"

cpa_status cpa_control_open(MPI_Comm comm, cpa_control *out, cpa_error *err) {
    cpa_control control = {.origin = comm};
    CPA_TRY(cpa_mpi_dup(comm, &control.comm, err));
    MPI_Comm_rank(control.comm, &control.rank);
    MPI_Comm_size(control.comm, &control.size);
    *out = control;
    return CPA_OK;
}

void cpa_control_close(cpa_control *control) {
    if (control->comm != MPI_COMM_NULL) MPI_Comm_free(&control->comm);
}

cpa_status cpa_control_bcast(cpa_control *control, void *data, int64_t bytes, int32_t root, cpa_error *err) {
    for (int64_t done = 0; done < bytes; done += CPA_MPI_PIECE_BYTES) {
        int64_t left = bytes - done;
        int piece = (int)(left < CPA_MPI_PIECE_BYTES ? left : CPA_MPI_PIECE_BYTES);
        CPA_TRY(cpa_mpi_check(MPI_Bcast((char *)data + done, piece, MPI_BYTE, root, control->comm), "MPI_Bcast", err));
    }
    return CPA_OK;
}

static cpa_status reduce(cpa_control *control, void *values, int32_t n, MPI_Datatype type, MPI_Op op, cpa_error *err) {
    int code = MPI_Allreduce(MPI_IN_PLACE, values, n, type, op, control->comm);
    return cpa_mpi_check(code, "MPI_Allreduce", err);
}

cpa_status cpa_control_max(cpa_control *control, double *values, int32_t n, cpa_error *err) {
    return reduce(control, values, n, MPI_DOUBLE, MPI_MAX, err);
}

cpa_status cpa_control_sum(cpa_control *control, double *values, int32_t n, cpa_error *err) {
    return reduce(control, values, n, MPI_DOUBLE, MPI_SUM, err);
}

cpa_status cpa_control_sum_u64(cpa_control *control, uint64_t *values, int32_t n, cpa_error *err) {
    return reduce(control, values, n, MPI_UINT64_T, MPI_SUM, err);
}

cpa_status cpa_control_gather(cpa_control *control, const void *mine, int64_t bytes, void *all, int32_t root,
                              cpa_error *err) {
    if (bytes < 0 || bytes > INT_MAX) {
        return cpa_fail(err, CPA_INVALID, "gather of %lld bytes a rank, at most %d", (long long)bytes, INT_MAX);
    }
    int code = MPI_Gather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, root, control->comm);
    return cpa_mpi_check(code, "MPI_Gather", err);
}

/* Counts and offsets as MPI wants them; 0 if their sum passes INT_MAX. */
static int to_counts(const int64_t *bytes, int32_t size, int *counts, int *offsets) {
    int64_t total = 0;
    for (int32_t r = 0; r < size; r++) {
        offsets[r] = (int)total;
        counts[r] = (int)bytes[r];
        total += bytes[r];
        if (bytes[r] < 0 || total > INT_MAX) return 0;
    }
    return 1;
}

cpa_status cpa_control_exchange(cpa_control *control, const void *send, const int64_t *send_bytes, void *recv,
                                const int64_t *recv_bytes, cpa_error *err) {
    size_t size = (size_t)control->size;
    int *counts = malloc(4 * size * sizeof *counts);
    if (!counts) return cpa_fail(err, CPA_NO_MEMORY, "exchange: no memory for the counts of %d ranks", control->size);
    cpa_status status;
    if (to_counts(send_bytes, control->size, counts, counts + size) &&
        to_counts(recv_bytes, control->size, counts + 2 * size, counts + 3 * size)) {
        int code = MPI_Alltoallv(send, counts, counts + size, MPI_BYTE, recv, counts + 2 * size, counts + 3 * size,
                                 MPI_BYTE, control->comm);
        status = cpa_mpi_check(code, "MPI_Alltoallv", err);
    } else {
        status = cpa_fail(err, CPA_INVALID, "exchange: more than %d bytes in one direction", INT_MAX);
    }
    free(counts);
    return status;
}

cpa_status cpa_control_agree(cpa_control *control, cpa_status mine, cpa_error *err) {
    int32_t lowest = mine == CPA_OK ? control->size : control->rank;
    CPA_TRY(reduce(control, &lowest, 1, MPI_INT32_T, MPI_MIN, err));
    if (lowest == control->size) return CPA_OK;

    cpa_error failure = {.status = mine};
    if (lowest == control->rank) {
        const char *message = err && err->message[0] ? err->message : cpa_status_name(mine);
        cpa_fail(&failure, mine, "rank %d: %s", lowest, message);
    }
    CPA_TRY(cpa_control_bcast(control, &failure, sizeof failure, lowest, err));
    if (err) memcpy(err, &failure, sizeof failure);
    return failure.status;
}
