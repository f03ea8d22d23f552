/* A limit on the time that calls of MPI take, from outside MPI: they wait without end for a rank that is stopped or cut
 * off, and before MPI is there, and while it goes, nothing else watches the ranks. */
#ifndef CPA_LAUNCHER_TIME_LIMIT_H
#define CPA_LAUNCHER_TIME_LIMIT_H

#include "launcher/exit_code.h"

/* Unless it is cleared within `seconds`, this process ends, with the line on stderr and that exit code. Time in which the
 * process is stopped itself hardly counts. One limit at a time; it is kept by SIGALRM, which needs no memory. */
__attribute__((format(printf, 3, 4))) void cpa_time_limit_set(double seconds, cpa_exit_code code, const char *line,
                                                              ...);
void cpa_time_limit_clear(void);

#endif
