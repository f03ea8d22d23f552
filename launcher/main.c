/* The program: `mpirun -np N cp_attn [options]`, or `cp_attn bench ...`. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "bench/bench.h"
#include "launcher/placement.h"
#include "launcher/ranks.h"
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
        cpa_ranks_abort(CPA_EXIT_BAD_INPUT);
    }
    cpa_fault_named = fault;
    if (engine_started || at) cpa_fault_armed = fault;
}
#else
static const cpa_arm_fn arm_fault = NULL;
#endif

static int run_bench(cpa_comm *comm, int argc, char **argv) {
    cpa_rank_placement placement;
    cpa_error err;
#ifdef CPA_FAULT_POINTS
    arm_fault(1);
#endif
    cpa_status placed = cpa_placement_find(comm, 0, 1, &placement, &err);
    if (placed == CPA_OK) return cpa_bench_main(comm, argc, argv, &placement);
    fprintf(stderr, "cp_attn: %s\n", err.message);
    return (int)cpa_exit_code_of(placed);
}

/* What was closed when the program started is opened again, so that MPI's own descriptors do not take its number and
 * get what is printed; writing there fails as before. */
static int hold_standard_streams(void) {
    for (int d = STDIN_FILENO; d <= STDERR_FILENO; d++) {
        if (fcntl(d, F_GETFD) < 0 && open("/dev/null", d == STDIN_FILENO ? O_WRONLY : O_RDONLY) != d) return 0;
    }
    return 1;
}

int main(int argc, char **argv) {
    cpa_comm *comm = NULL;
    cpa_error err;
    if (!hold_standard_streams()) return CPA_EXIT_FAULT;
    cpa_status joined = cpa_ranks_join(&argc, &argv, &comm, &err);
    if (joined != CPA_OK) {
        fprintf(stderr, "cp_attn: %s\n", err.message);
        cpa_ranks_abort(cpa_exit_code_of(joined));
    }
    int bench = argc > 1 && strcmp(argv[1], "bench") == 0;
    int code = bench ? run_bench(comm, argc - 1, argv + 1) : (int)cpa_serve(comm, argc, argv, arm_fault);
    cpa_ranks_leave(comm);
    return code;
}
