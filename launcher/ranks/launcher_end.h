/* The end of the process of Open MPI that has started this rank, mpirun or a daemon of it. Where a link between hosts is
 * cut, these wait for each other without end, also when the job is aborted and every rank has ended; and a signal that
 * asks mpirun to end finds it aborting already. */
#ifndef CPA_LAUNCHER_LAUNCHER_END_H
#define CPA_LAUNCHER_LAUNCHER_END_H

/* When this rank aborts a job on several hosts: a process of its own, which outlives this one, kills the one that has
 * started it, if that is still there after CPA_LAUNCHER_END_S seconds. Where none can be made nothing is done. */
enum { CPA_LAUNCHER_END_S = 10 };
void cpa_launcher_end_later(void);

#endif
