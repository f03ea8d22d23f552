/* The ranks of this job: those that mpirun started, or those that meet at MASTER_ADDR and MASTER_PORT. */
#ifndef CPA_LAUNCHER_RANKS_H
#define CPA_LAUNCHER_RANKS_H

#include <cpattn/comm.h>

#include "program/exit_code.h"

/* Joins the other ranks; once in a process, before anything else. A process that mpirun did not start goes without MPI:
 * where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, the ranks meet there, and need a secret of the job
 * (join_settings.h); else it is the only one. *out is set only on success. A rank that MPI waits for longer than
 * --join-timeout ends the process, with a line. */
cpa_status cpa_ranks_join(int *argc, char ***argv, cpa_comm **out, cpa_error *err);
/* The end of a rank that joined: of every one, unless the job is aborted. Where MPI waits for one for longer than that,
 * the process ends, with a line, and with `code` unless that is CPA_EXIT_DONE. The process is to exit with it next, and
 * does in any case soon. */
void cpa_ranks_leave(cpa_comm *comm, double timeout_s, cpa_exit_code code);
/* Lets the ranks before this one speak of what all of them see: one that does ends the others, which takes mpirun a
 * second. */
void cpa_ranks_await_turn(int rank);
/* Waits to be ended by another rank that has a fault and speaks of it, which takes mpirun long where processors are
 * busy. Returns where that does not happen. */
void cpa_ranks_await_end(void);
/* Whether the end of one rank by cpa_ranks_abort ends the processes of all, as mpirun does. */
int cpa_ranks_end_together(void);
/* Ends this process with that exit code, and so all other ranks, if MPI still can. Does not return. */
_Noreturn void cpa_ranks_abort(cpa_exit_code code);

#endif
