/* What the planner needs, measured at start-up: C, FLOP/s of attention, and W, bytes/s of an exchange, both of one rank
 * while all ranks work; and on devices R and x of a decode step, and what chunks of prefill take by each algorithm. */
#ifndef CPA_CALIBRATE_H
#define CPA_CALIBRATE_H

#include "comm/comm.h"
#include "src/schedule/planner.h"
#include "src/worker/worker.h"

/* Collective; takes well under a second. Sets flops, bandwidth, memory_bandwidth, exchange_s and the probes of the
 * planner: every rank gets the same, mostly the mean over the ranks. bandwidth is infinite for one rank. There is
 * nothing behind it for one rank, and on the host, which promises bits: times must not decide on them. links[ranks,
 * ranks] gets its bandwidths. */
cpa_status cpa_calibrate(cpa_control *control, cpa_device *device, const cpa_worker_options *options,
                         cpa_planner *planner, cpa_link *links, cpa_error *err);

#endif
