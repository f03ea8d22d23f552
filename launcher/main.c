/* The program: `mpirun -np N cp_attn [options]`, or `cp_attn bench ...`. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "bench/bench.h"
#include "launcher/placement.h"
#include "launcher/serve.h"

#ifdef CPA_FAULT_POINTS
/* The test twin: CPATTN_FAULT=<name> arms a fault point once the engine has started, <name>@start before. */
static void arm_fault(int engine_started) {
    const char *text = getenv("CPATTN_FAULT");
    if (!text) return;
    char name[64];
    const char *at = strchr(text, '@');
    snprintf(name, sizeof name, "%.*s", at ? (int)(at - text) : (int)strlen(text), text);
    cpa_fault fault = cpa_fault_by_name(name);
    if (fault == CPA_FAULT_COUNT || (at && strcmp(at, "@start") != 0)) {
        fprintf(stderr, "cp_attn: CPATTN_FAULT: found '%s', expected the name of a fault point\n", text);
        MPI_Abort(MPI_COMM_WORLD, CPA_EXIT_BAD_INPUT);
    }
    if (engine_started || at) cpa_fault_armed = fault;
}
#else
static const cpa_arm_fn arm_fault = NULL;
#endif

static int run_bench(int argc, char **argv) {
    cpa_rank_placement placement;
#ifdef CPA_FAULT_POINTS
    arm_fault(1);
#endif
    cpa_placement_find(MPI_COMM_WORLD, 0, 1, &placement);
    return cpa_bench_main(argc, argv, &placement);
}

int main(int argc, char **argv) {
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    int bench = argc > 1 && strcmp(argv[1], "bench") == 0;
    int code = bench ? run_bench(argc - 1, argv + 1) : (int)cpa_serve(MPI_COMM_WORLD, argc, argv, arm_fault);
    MPI_Finalize();
    return code;
}
