/* SIGINT and SIGTERM end a run: once its requests have finished, if they do within --shutdown-timeout; else after the
 * step in flight if that is over soon, else in the middle of it.
 *
 * Whichever rank gets the signal, rank 0 learns of it: from a rank of its host by the same signal, from others by the
 * end of theirs, which makes mpirun send SIGTERM. Rank 0 drains the engine, and when the time is up, or a second signal
 * comes, asks it to stop. Where the engine does not return within CPA_SIGNALS_GRACE_S of that, a thread of rank 0 says
 * what is known and ends the process. After a signal to mpirun all this is done before that, which waits for a second
 * each (or for odls_base_sigkill_timeout), sends SIGTERM and SIGKILL. */
#ifndef CPA_LAUNCHER_SIGNALS_H
#define CPA_LAUNCHER_SIGNALS_H

#include <cpattn/comm.h>
#include <cpattn/engine.h>

#define CPA_SIGNALS_GRACE_S 0.4

/* What the program does when a signal has come: on rank 0, in the watching thread, with the lock held. */
typedef struct cpa_signal_actions {
    void *ctx;
    /* Called with the seconds that requests are given to finish, which the engine is told next; NULL: nothing else
     * needs to know. */
    void (*drain)(void *ctx, double seconds);
    /* Whether requests are on their way in, for which the engine waits a little before it is told; NULL: none are. */
    int (*has_incoming)(void *ctx);
    /* Another rank of this host is gone, or about to go, and mpirun is about to end this one: there is a second at most
     * to say what is known of the run. */
    void (*lost)(void *ctx, int rank);
    /* The run is given up: says what is known of it. The process then ends with 128 + `signal`. */
    void (*give_up)(void *ctx, int signal);
} cpa_signal_actions;

/* Collective. From here on signals are kept, and requests are given shutdown_s to finish after one that comes while
 * there is an engine. A second one ends that time, or gives the run up where there is none; what is still written then
 * is not waited for. Where no thread can be had to watch them, signals end the process as usual. */
cpa_status cpa_signals_install(cpa_comm *comm, double shutdown_s, const cpa_signal_actions *actions, cpa_error *err);

/* The engine that a signal stops; NULL: none. */
void cpa_signals_watch(cpa_engine *engine);

/* Around what the callback reads and another thread writes. */
void cpa_signals_lock(void);
void cpa_signals_unlock(void);

/* The run is over: nothing is given up any more. Does not return if it is being given up. */
void cpa_signals_finish(void);

/* Before a rank ends the whole job, which mpirun does by signals. Does not return if one has come, which is then the
 * reason why something failed. `is_first`: no other rank has said that it does; rank 0 hears of it then. */
void cpa_signals_break_off(int is_first);

/* The signal that has come, or 0. */
int cpa_signals_received(void);

/* "SIGINT" or "SIGTERM". */
const char *cpa_signals_name(int signal);

#endif
