#include "launcher/ranks/signals.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/host.h"
#include "comm/communicator.h"
#include "program/parent.h"

/* Ranks that rank 0 does not end are left alone for so long; mpirun has killed them by then. */
static const double PEER_GRACE_S = 1.5;
/* One keystroke may reach a rank twice, by the terminal and by mpirun. */
static const double SAME_SIGNAL_S = 0.2;

/* From a signal on mpirun leaves its processes so long, and half of that before it sends them another one. */
static const double LAUNCHER_LEAVES_S = 2;
/* Of that, what it takes to end in the middle of a step and to write down what is known. */
static const double TO_END_S = 1;

/* Requests that are on their way in have so long to come whole, at most a quarter of what requests have to finish. */
static const double LET_IN_S = 1;
enum { LET_IN_POLL_US = 5000 };

/* Marks of what ranks of a host tell each other: a signal that one has got, and that one ends the job. */
enum { PASSED_ON = 0x637061, BREAKING_OFF };

/* Where a rank is: processes of one host and process namespace can signal each other. */
typedef struct process {
    uint64_t host; /* 0: not known */
    int64_t id;
} process;

static struct {
    int rank, size;
    process ranks[CPA_COMM_MAX_RANKS];
    pid_t launcher; /* the process of Open MPI, whose signals are all one; 0: none */
    int announces;  /* not 0: the launcher sends SIGCONT when it is about to end the job, and only then */
    cpa_signal_actions actions;
    pthread_mutex_t lock;
    cpa_engine *engine;
    sem_t came;        /* posted by each signal that counts */
    double shutdown_s; /* how long requests may take to finish */
    atomic_int received, is_direct, is_launchers, again, final;
    atomic_int breaking;     /* the rank that has said it ends the job, and 1; 0: none has */
    _Atomic double first_at; /* 0: none has come */
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int is_here(int rank) {
    return state.ranks[rank].host != 0 && state.ranks[rank].host == state.ranks[state.rank].host;
}

/* ---- in the handler ---- */

/* The sender of a mark is a rank of this host. */
static void note_breaking(pid_t sender) {
    for (int rank = 0; rank < state.size; rank++) {
        if (is_here(rank) && state.ranks[rank].id == sender) atomic_store(&state.breaking, rank + 1);
    }
}

static void on_signal(int number, siginfo_t *info, void *context) {
    (void)context;
    int saved = errno;
    double none = 0;
    int from_launcher = state.launcher != 0 && info->si_pid == state.launcher;
    const int mark = info->si_code == SI_QUEUE ? info->si_value.sival_int : 0;
    int passed_on = from_launcher || mark == PASSED_ON;
    if (mark == BREAKING_OFF) note_breaking(info->si_pid);
    /* Before a launcher ends a job by SIGTERM, it continues its processes, and waits for a second. */
    if (number == SIGCONT && !(from_launcher && state.announces)) return;
    if (number == SIGCONT) number = SIGTERM;
    const double now = cpa_clock_now();
    if (atomic_compare_exchange_strong(&state.first_at, &none, now)) {
        atomic_store(&state.received, number);
        atomic_store(&state.is_direct, !passed_on);
        atomic_store(&state.is_launchers, from_launcher);
        sem_post(&state.came);
    } else if (!from_launcher && (state.rank == 0 || !passed_on) &&
               now - atomic_load(&state.first_at) > SAME_SIGNAL_S) {
        if (atomic_load(&state.final)) _exit(128 + number);
        atomic_store(&state.again, 1);
        sem_post(&state.came);
    }
    errno = saved;
}

/* ---- in the watching thread ---- */

/* Waits for the next signal, at the longest until `end` on the monotonic clock. */
static void await_signal(double end) {
    const struct timespec until = cpa_clock_after(end - cpa_clock_now());
    while (sem_clockwait(&state.came, CLOCK_MONOTONIC, &until) != 0 && errno == EINTR) continue;
}

static void tell(int rank, int number, int mark) {
    union sigval value = {.sival_int = mark};
    if (is_here(rank)) sigqueue((pid_t)state.ranks[rank].id, number, value);
}

/* A rank of this host that is gone, or about to go: then mpirun has sent the signal, to end what broke off. -1: there
 * is none. */
static int find_lost(void) {
    for (int rank = 0; rank < state.size; rank++) {
        if (is_here(rank) && kill((pid_t)state.ranks[rank].id, 0) != 0 && errno == ESRCH) return rank;
    }
    return atomic_load(&state.breaking) - 1;
}

static void end_process(int number) {
    atomic_store(&state.final, 1); /* one more signal ends the process in whatever hangs now */
    if (state.rank == 0 && find_lost() < 0) state.actions.give_up(state.actions.ctx, number);
    for (int rank = 1; state.rank == 0 && rank < state.size; rank++) tell(rank, number, PASSED_ON);
    _exit(128 + number);
}

/* How long requests may go on after a signal that has come: of mpirun's, which kills, no longer than that leaves. */
static double shutdown_seconds(void) {
    const char *given = getenv("OMPI_MCA_odls_base_sigkill_timeout");
    if (!atomic_load(&state.is_launchers)) return state.shutdown_s;
    const double leaves = given ? LAUNCHER_LEAVES_S * atof(given) : LAUNCHER_LEAVES_S;
    return fmin(state.shutdown_s, fmax(leaves / 2 - TO_END_S, 0));
}

/* Whether the run is over, or given up by who sends a second signal, before `end`. */
static int wait_until(double end) {
    while (!atomic_load(&state.again) && !atomic_load(&state.final) && cpa_clock_now() < end) await_signal(end);
    return atomic_load(&state.again);
}

/* Waits for the requests that are on their way in, but not for one whose body does not come. */
static void let_in(double end) {
    int has_incoming = 1;
    while (has_incoming && cpa_clock_now() < end) {
        cpa_signals_lock();
        has_incoming = state.engine && !atomic_load(&state.final) && state.actions.has_incoming &&
                       state.actions.has_incoming(state.actions.ctx);
        cpa_signals_unlock();
        if (has_incoming) usleep(LET_IN_POLL_US);
    }
}

/* Rank 0: lets requests finish for a while, and then asks the engine to stop. */
static void shut_down(double seconds) {
    cpa_signals_lock();
    const int lost = find_lost();
    if (lost >= 0 || !state.engine) seconds = 0; /* no request can finish, or none is there yet */
    if (lost >= 0) state.actions.lost(state.actions.ctx, lost);
    if (seconds > 0 && state.actions.drain) state.actions.drain(state.actions.ctx, seconds);
    cpa_signals_unlock();
    if (seconds > 0) let_in(cpa_clock_now() + fmin(LET_IN_S, seconds / 4));
    cpa_signals_lock();
    if (seconds > 0 && state.engine) (void)cpa_engine_drain(state.engine, 0);
    cpa_signals_unlock();
    /* A second signal ends that, a third one what is left. */
    if (seconds > 0 && wait_until(atomic_load(&state.first_at) + seconds)) atomic_store(&state.again, 0);
    cpa_signals_lock();
    if (state.engine) cpa_engine_stop(state.engine);
    cpa_signals_unlock();
    (void)wait_until(cpa_clock_now() + CPA_SIGNALS_GRACE_S);
}

/* Another rank: tells rank 0, which ends the job, and this process if rank 0 does not. */
static void pass_on(int number, double seconds) {
    if (atomic_load(&state.is_direct)) tell(0, number, PASSED_ON);
    /* A rank 0 that could not be told hears of it by the end of this one. */
    double end = atomic_load(&state.first_at) + PEER_GRACE_S + (is_here(0) ? seconds : 0);
    if (wait_until(end)) {
        tell(0, number, PASSED_ON);
        atomic_store(&state.again, 0);
        (void)wait_until(cpa_clock_now() + PEER_GRACE_S);
    }
}

static void *watch(void *unused) {
    (void)unused;
    while (sem_wait(&state.came) != 0) continue;
    const int number = atomic_load(&state.received);
    const double seconds = shutdown_seconds();
    if (state.rank == 0) {
        shut_down(seconds);
    } else {
        pass_on(number, seconds);
    }
    cpa_signals_lock();
    if (!atomic_load(&state.final)) end_process(number);
    cpa_signals_unlock();
    return NULL;
}

/* ---- in the thread of the run ---- */

/* A number for this host and process namespace. */
static uint64_t find_host(void) {
    char text[256] = "";
    cpa_host_boot(text);
    size_t used = strlen(text);
    ssize_t space = readlink("/proc/self/ns/pid", text + used, sizeof text - used);
    if (used == 0 || space <= 0) return 0;
    uint64_t host = 0;
    for (size_t i = 0; i < used + (size_t)space; i++) host = cpa_mix64(host + (unsigned char)text[i] + CPA_GOLDEN);
    return host;
}

cpa_status cpa_signals_install(cpa_comm *comm, double shutdown_s, const cpa_signal_actions *actions, cpa_error *err) {
    pthread_t thread;
    const process here = {find_host(), getpid()};
    state.rank = cpa_comm_rank(comm);
    state.size = cpa_comm_size(comm);
    CPA_TRY(cpa_comm_all_gather(comm, &here, sizeof here, state.ranks, err));
    state.launcher = cpa_parent_of_mpi();
    /* Open MPI up to 4, unless it is to pass on that a job that goes on is continued. */
    state.announces = getenv("OMPI_MCA_orte_launch") && !getenv("OMPI_MCA_orte_forward_job_control");
    state.shutdown_s = shutdown_s;
    state.actions = *actions;
    if (sem_init(&state.came, 0, 0) != 0 || pthread_create(&thread, NULL, watch, NULL) != 0) return CPA_OK;
    pthread_detach(thread);
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = (int)(SA_RESTART | SA_SIGINFO)};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGCONT, &action, NULL);
    return CPA_OK;
}

void cpa_signals_watch(cpa_engine *engine) {
    cpa_signals_lock();
    state.engine = engine;
    if (engine && state.rank == 0 && cpa_signals_received()) cpa_engine_stop(engine);
    cpa_signals_unlock();
}

void cpa_signals_lock(void) {
    pthread_mutex_lock(&state.lock);
}

void cpa_signals_unlock(void) {
    pthread_mutex_unlock(&state.lock);
}

void cpa_signals_finish(void) {
    cpa_signals_lock();
    atomic_store(&state.final, 1);
    cpa_signals_unlock();
}

void cpa_signals_break_off(int is_first) {
    while (cpa_signals_received() && !atomic_load(&state.final)) pause();
    if (state.rank != 0 && is_first) tell(0, SIGCONT, BREAKING_OFF);
}

int cpa_signals_received(void) {
    return atomic_load(&state.received);
}

const char *cpa_signals_name(int signal) {
    return signal == SIGINT ? "SIGINT" : "SIGTERM";
}
