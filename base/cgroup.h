/* What the system leaves to this process: of its memory, and of its processors. */
#ifndef CPA_BASE_CGROUP_H
#define CPA_BASE_CGROUP_H

#include <stdint.h>

/* Bytes of memory that are free, and that the cgroup (version 2) of the process does not keep from it. */
int64_t cpa_cgroup_memory(void);

/* Processors that the CPU quota of the cgroup pays for, rounded up; 0: there is no quota. */
int32_t cpa_cgroup_cores(void);

#endif
