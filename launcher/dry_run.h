/* A run in which every step is planned and none computed: what the cache and the scheduler would do. */
#ifndef CPA_LAUNCHER_DRY_RUN_H
#define CPA_LAUNCHER_DRY_RUN_H

#include "launcher/job.h"

/* Plans the workload for cp_size ranks, prints the report and writes the result file that the settings ask for. No
 * device and no other rank takes part. A step counts as one millisecond: that is how arrival times pass. */
cpa_status cpa_dry_run(const cpa_job *job, int32_t cp_size, const cpa_workload *workload, cpa_error *err);

#endif
