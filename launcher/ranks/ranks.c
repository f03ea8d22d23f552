#include "launcher/ranks/ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cpattn/mpi.h>

#include "base/check.h"
#include "base/clock.h"
#include "launcher/ranks/launcher_end.h"
#include "launcher/ranks/time_limit.h"
#include "launcher/settings/join_settings.h"
#include "launcher/settings/settings_table.h"

/* The rank that a launcher of MPI gave this process: Open MPI, or one that speaks PMI or PMIx, as Slurm does. NULL: no
 * such has started it. */
static const char *rank_of_mpi(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *rank = getenv(names[i]);
        if (rank) return rank;
    }
    return NULL;
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

static int number_of_mpi(void) {
    const char *rank = rank_of_mpi();
    return rank ? atoi(rank) : 0;
}

/* How many seconds a rank lets those before it speak. */
static double turn_s(int rank) {
    enum { TURN_S = 2, MOST_TURNS = 3 };
    return TURN_S * (rank < MOST_TURNS ? rank : MOST_TURNS);
}

static void sleep_for(double seconds) {
    struct timespec left = {.tv_sec = (time_t)seconds};
    while (nanosleep(&left, &left) != 0) continue; /* a signal of mpirun is no reason to speak */
}

void cpa_ranks_await_turn(int rank) {
    sleep_for(turn_s(rank));
}

void cpa_ranks_await_end(void) {
    enum { MOST_S = 30 };
    sleep_for(MOST_S);
}

/* MPI may take so long for `call`; `option` says what sets that. Then the process ends with `code`, and the first to
 * end says so. */
static void limit_mpi(double seconds, const char *call, const char *option, cpa_exit_code code) {
    char line[160];
    snprintf(line, sizeof line, "rank %d: %s has taken more than %g s%s: a rank is stopped, cut off, or has failed",
             number_of_mpi(), call, seconds, option);
    cpa_time_limit_set(seconds + turn_s(number_of_mpi()), code, line);
}

static int mpi_begins; /* MPI_Init has been called, and has not returned */

/* Where MPI cannot start, for want of memory or of a file, parts of it exit with codes of their own. */
static void on_exit_of_process(void) {
    if (!mpi_begins) return;
    cpa_ranks_await_turn(number_of_mpi());
    fprintf(stderr, "cp_attn: rank %d: MPI_Init has failed\n", number_of_mpi());
    _exit(CPA_EXIT_FAULT);
}

static cpa_status join_mpi(const cpa_join_settings *settings, int *argc, char ***argv, cpa_comm **out, cpa_error *err) {
    enum { CONNECT_S = 10 }; /* the communicator's own limits come first: they say more */
    int provided;
    limit_mpi(settings->timeout_s, "MPI_Init", " (--join-timeout)", CPA_EXIT_FAULT);
    atexit(on_exit_of_process);
    mpi_begins = 1;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    mpi_begins = 0;
    limit_mpi(settings->timeout_s + CONNECT_S, "MPI_Comm_dup", " (--join-timeout, and 10)", CPA_EXIT_FAULT);
    const cpa_comm_options options = {.size = sizeof options, .join_s = settings->timeout_s};
    const cpa_status status = cpa_comm_from_mpi(MPI_COMM_WORLD, &options, out, err);
    cpa_time_limit_clear();
    return status;
}

cpa_status cpa_ranks_join(int *argc, char ***argv, cpa_comm **out, cpa_error *err) {
    cpa_join_settings settings;
    CPA_TRY(cpa_join_settings_load(*argc, *argv, &settings, err));
    if (rank_of_mpi()) return join_mpi(&settings, argc, argv, out, err);
    if (getenv("RANK") && getenv("WORLD_SIZE") && getenv("MASTER_ADDR") && getenv("MASTER_PORT"))
        return join_store(&settings, out, err);
    return cpa_comm_alone(out, err);
}

int cpa_ranks_end_together(void) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    return initialized;
}

/* What libraries do in exit may take so long: threads of OpenBLAS that have no memory, for one, try again for ever. */
static void limit_exit(cpa_exit_code code) {
    enum { MOST_S = 3 };
    cpa_time_limit_set(MOST_S, code, NULL);
}

/* An mpirun that has no processor for two seconds does not answer what MPI_Finalize says to it, which then goes on
 * without; if it next sees the end of the process before it reads that, it reports one without MPI_Finalize. So a process
 * that has had no answer stays for as long again. */
static void finalize_mpi(void) {
    const double answered_s = 1.5, most_s = 10, begin = cpa_clock_now();
    MPI_Finalize();
    cpa_time_limit_clear();
    const double took_s = cpa_clock_now() - begin;
    if (took_s > answered_s) sleep_for(fmin(ceil(took_s), most_s));
}

void cpa_ranks_leave(cpa_comm *comm, double timeout_s, cpa_exit_code code) {
    const int has_mpi = cpa_ranks_end_together();
    if (has_mpi)
        limit_mpi(timeout_s, "MPI_Finalize", " (--rank-timeout)", code == CPA_EXIT_DONE ? CPA_EXIT_FAULT : code);
    cpa_comm_destroy(comm);
    if (has_mpi) finalize_mpi();
    limit_exit(code);
}

_Noreturn void cpa_ranks_abort(cpa_exit_code code) {
    enum { MOST_S = 5 };
    if (cpa_ranks_end_together()) {
        cpa_launcher_end_later();
        limit_mpi(MOST_S, "MPI_Abort", "", code);
        MPI_Abort(MPI_COMM_WORLD, (int)code);
    }
    limit_exit(code);
    exit((int)code);
}
