/* The process that has started this one. */
#ifndef CPA_PROGRAM_PARENT_H
#define CPA_PROGRAM_PARENT_H

#include <sys/types.h>

/* The process of Open MPI that has started this one; 0 if there is none, as where a script of it has. */
pid_t cpa_parent_of_mpi(void);

#endif
