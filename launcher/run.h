/* A batch run: the requests that the settings ask for, and a report of what happened; or the answer of `generate`. */
#ifndef CPA_LAUNCHER_RUN_H
#define CPA_LAUNCHER_RUN_H

#include "launcher/service.h"

/* Collective. The service has its ranks and its job, and is closed but for its ranks; the workload is rank 0's. Returns
 * the same code on every rank. A fault that the other ranks cannot learn of ends them all (cpa_job_ranks_abort). */
cpa_exit_code cpa_run_batch(cpa_service *service, cpa_workload *workload);

#endif
