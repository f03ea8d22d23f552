#include "launcher/ranks.h"

#include <stdlib.h>

#include <cpattn/mpi.h>

cpa_status cpa_ranks_join(int *argc, char ***argv, cpa_comm **out, cpa_error *err) {
    int provided;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    return cpa_comm_from_mpi(MPI_COMM_WORLD, NULL, out, err);
}

void cpa_ranks_leave(cpa_comm *comm) {
    cpa_comm_destroy(comm);
    MPI_Finalize();
}

_Noreturn void cpa_ranks_abort(cpa_exit_code code) {
    MPI_Abort(MPI_COMM_WORLD, (int)code);
    exit((int)code);
}
