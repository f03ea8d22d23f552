/* A limit on the time that other libraries take, from outside them. MPI waits without end for a rank that is stopped
 * or cut off, and nothing else watches the ranks before it is there and while it goes; and libraries hang in their own
 * ends where there is no memory. */
#ifndef CPA_LAUNCHER_TIME_LIMIT_H
#define CPA_LAUNCHER_TIME_LIMIT_H

#include "program/exit_code.h"

/* Unless it is cleared within `seconds`, this process ends, with that exit code and the line on stderr (NULL: without
 * one). Time in which the process is stopped itself hardly counts. One limit at a time; it is kept by SIGALRM, which
 * needs no memory. */
void cpa_time_limit_set(double seconds, cpa_exit_code code, const char *line);
void cpa_time_limit_clear(void);

#endif
