/* The program: `mpirun -np N cp_attn [options]`, `cp_attn generate ...` or `cp_attn bench ...`. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench.h"
#include "launcher/placement.h"
#include "launcher/ranks.h"
#include "launcher/run.h"

static int run_bench(cpa_comm *comm, int argc, char **argv) {
    cpa_rank_placement placement;
    cpa_error err;
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
    int code = bench ? run_bench(comm, argc - 1, argv + 1) : (int)cpa_run_main(comm, argc, argv);
    cpa_ranks_leave(comm);
    return code;
}
