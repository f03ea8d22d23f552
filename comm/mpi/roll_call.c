/* Who is still there: an empty message from each rank to each other one. A rank that hangs sends none. */
#include <sched.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "comm/mpi/mpi_error.h"

/* The messages are empty, so that nothing is lost by those that never arrive. */
static void tell_all(const cpa_control *control) {
    for (int32_t rank = 0; rank < control->size; rank++) {
        MPI_Request request;
        if (rank == control->rank) continue;
        int code = MPI_Isend(NULL, 0, MPI_BYTE, rank, CPA_MPI_TAG_PRESENT, control->comm, &request);
        if (code == MPI_SUCCESS) MPI_Request_free(&request);
    }
}

/* Whether a message of the rank is there; receives it. */
static int hear(const cpa_control *control, int32_t rank) {
    int heard = 0;
    int code = MPI_Iprobe(rank, CPA_MPI_TAG_PRESENT, control->comm, &heard, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS || !heard) return 0;
    code = MPI_Recv(NULL, 0, MPI_BYTE, rank, CPA_MPI_TAG_PRESENT, control->comm, MPI_STATUS_IGNORE);
    return code == MPI_SUCCESS;
}

uint64_t cpa_control_roll_call(cpa_control *control, double seconds) {
    uint64_t all = control->size < 64 ? ((uint64_t)1 << control->size) - 1 : UINT64_MAX;
    uint64_t silent = all & ~((uint64_t)1 << control->rank);
    const double begin = cpa_clock_now();
    tell_all(control);
    do {
        for (int32_t rank = 0; rank < control->size; rank++) {
            if (silent >> rank & 1 && hear(control, rank)) silent &= ~((uint64_t)1 << rank);
        }
        sched_yield();
    } while (silent && cpa_clock_now() - begin < seconds);
    return silent;
}

int cpa_control_all_failed(cpa_control *control) {
    const double seconds = 5; /* those that failed alike come here at once */
    return cpa_control_roll_call(control, seconds) == 0;
}
