/* Sends the requests of a workload to a server, each at its time, and takes the answers. */
#ifndef CPA_BENCH_SERVE_DRIVE_H
#define CPA_BENCH_SERVE_DRIVE_H

#include "bench/serve/target.h"
#include "bench/serve/tenants.h"
#include "program/metrics.h"
#include "program/workload.h"

/* Ends when every request has ended, each in metrics and those of its tenant as completed or failed, or at a signal:
 * requests that were under way have then failed, and others are not in metrics. *duration_s is the time from the first
 * to then. Whatever the server does is a failed request; CPA_NO_MEMORY, or CPA_IO, is a fault of this side. */
cpa_status cpa_serve_drive(const cpa_target *target, cpa_workload *workload, cpa_metrics *metrics,
                           cpa_serve_tenants *tenants, double *duration_s, cpa_error *err);

#endif
