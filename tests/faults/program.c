/* The twin of the program: CPATTN_FAULT=<name> arms a fault once the engine has started, or for a benchmark;
 * <name>@start before. */
#include <cpattn/engine.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/bench.h"
#include "launcher/ranks/job_ranks.h"
#include "launcher/ranks/ranks.h"
#include "program/exit_code.h"
#include "tests/faults/fault.h"

static void arm_fault(int engine_started) {
    const char *text = getenv("CPATTN_FAULT");
    if (!text) return;
    char name[64];
    const char *at = strchr(text, '@');
    snprintf(name, sizeof name, "%.*s", at ? (int)(at - text) : (int)strlen(text), text);
    cpa_fault fault = cpa_fault_by_name(name);
    if (fault == CPA_FAULT_COUNT || (at && strcmp(at, "@start") != 0)) {
        fprintf(stderr, "cp_attn: CPATTN_FAULT: found '%s', expected the name of a fault\n", text);
        cpa_ranks_abort(CPA_EXIT_BAD_INPUT);
    }
    cpa_fault_named = fault;
    if (engine_started || at) cpa_fault_armed = fault;
}

cpa_status __real_cpa_engine_create(cpa_comm *comm, const cpa_engine_options *options, cpa_engine **out,
                                    cpa_error *err);
cpa_status __wrap_cpa_engine_create(cpa_comm *comm, const cpa_engine_options *options, cpa_engine **out,
                                    cpa_error *err);

cpa_status __wrap_cpa_engine_create(cpa_comm *comm, const cpa_engine_options *options, cpa_engine **out,
                                    cpa_error *err) {
    arm_fault(0);
    CPA_TRY(__real_cpa_engine_create(comm, options, out, err));
    arm_fault(1);
    return CPA_OK;
}

int __real_cpa_bench_main(cpa_comm *comm, int argc, char **argv, cpa_rank_placement *placement);
int __wrap_cpa_bench_main(cpa_comm *comm, int argc, char **argv, cpa_rank_placement *placement);

int __wrap_cpa_bench_main(cpa_comm *comm, int argc, char **argv, cpa_rank_placement *placement) {
    arm_fault(1);
    return __real_cpa_bench_main(comm, argc, argv, placement);
}

/* Stops the last rank, with that fault. */
static void stop_last(cpa_fault fault) {
    int rank, size;
    if (!cpa_fault_is(fault)) return;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank == size - 1) raise(SIGSTOP);
}

void __real_cpa_job_ranks_part(const cpa_job_ranks *ranks, cpa_exit_code code);
void __wrap_cpa_job_ranks_part(const cpa_job_ranks *ranks, cpa_exit_code code);

void __wrap_cpa_job_ranks_part(const cpa_job_ranks *ranks, cpa_exit_code code) {
    stop_last(CPA_FAULT_STOPPED_LAST);
    __real_cpa_job_ranks_part(ranks, code);
}

int __real_MPI_Finalize(void);
int __wrap_MPI_Finalize(void);

int __wrap_MPI_Finalize(void) {
    stop_last(CPA_FAULT_STOPPED_IN_MPI);
    return __real_MPI_Finalize();
}
