#include "launcher/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cpattn/mpi.h>

#include "base/check.h"
#include "launcher/join_settings.h"
#include "launcher/settings_table.h"

/* Whether a launcher of MPI started this process: Open MPI, or one that speaks PMI or PMIx, as Slurm does. */
static int is_started_by_mpi(void) {
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMIX_RANK") || getenv("PMI_RANK");
}

static cpa_status read_number(const char *name, long least, long most, int32_t *out, cpa_error *err) {
    const char *text = getenv(name);
    char *end;
    long number = strtol(text, &end, 10);
    if (!*text || *end || number < least || number > most)
        return cpa_fail(err, CPA_INVALID, "%s: found '%.64s', expected a number of %ld..%ld", name, text, least, most);
    *out = (int32_t)number;
    return CPA_OK;
}

static cpa_status join_store(const cpa_join_settings *settings, cpa_comm **out, cpa_error *err) {
    enum { MOST_RANKS = 64, MOST_PORT = 65535 };
    int32_t rank = 0, size = 0, port = 0;
    CPA_TRY(read_number("WORLD_SIZE", 1, MOST_RANKS, &size, err));
    CPA_TRY(read_number("RANK", 0, size - 1, &rank, err));
    CPA_TRY(read_number("MASTER_PORT", 1, MOST_PORT, &port, err));
    if (size > 1 && !settings->secret[0])
        return cpa_fail(err, CPA_INVALID,
                        CPA_JOB_SECRET_VARIABLE
                        ": found none, expected a secret that all %d ranks are given, there or in "
                        "the file of --job-secret-file",
                        size);
    const cpa_comm_options options = {
        .size = sizeof options, .join_s = settings->timeout_s, .secret = settings->secret[0] ? settings->secret : NULL};
    return cpa_comm_from_store(getenv("MASTER_ADDR"), port, rank, size, &options, out, err);
}

cpa_status cpa_ranks_join(int *argc, char ***argv, cpa_comm **out, cpa_error *err) {
    int provided;
    cpa_join_settings settings;
    CPA_TRY(cpa_join_settings_load(*argc, *argv, &settings, err));
    if (getenv("RANK") && getenv("WORLD_SIZE") && getenv("MASTER_ADDR") && getenv("MASTER_PORT") &&
        !is_started_by_mpi())
        return join_store(&settings, out, err);
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    const cpa_comm_options options = {.size = sizeof options, .join_s = settings.timeout_s};
    return cpa_comm_from_mpi(MPI_COMM_WORLD, &options, out, err);
}

int cpa_ranks_end_together(void) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    return initialized;
}

void cpa_ranks_leave(cpa_comm *comm) {
    cpa_comm_destroy(comm);
    if (cpa_ranks_end_together()) MPI_Finalize();
}

pid_t cpa_ranks_launcher(void) {
    static const char *const names[] = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte"};
    const pid_t parent = getppid();
    char path[64], name[32] = "";
    snprintf(path, sizeof path, "/proc/%d/comm", (int)parent);
    FILE *file = fopen(path, "r");
    if (file && !fgets(name, sizeof name, file)) name[0] = 0;
    if (file) fclose(file);
    name[strcspn(name, "\n")] = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i]) == 0) return parent;
    }
    return 0;
}

_Noreturn void cpa_ranks_abort(cpa_exit_code code) {
    if (cpa_ranks_end_together()) MPI_Abort(MPI_COMM_WORLD, (int)code);
    exit((int)code);
}
