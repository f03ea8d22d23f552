/* The two rates that the planner needs, measured at start-up: C, FLOP/s of attention, and W, bytes/s of an exchange,
 * both of one rank while all ranks work. */
#ifndef CPA_CALIBRATE_H
#define CPA_CALIBRATE_H

#include "comm/comm.h"
#include "src/worker.h"

/* Collective; takes well under a second. Every rank gets the mean over the ranks. bandwidth is infinite for one rank.
 */
cpa_status cpa_calibrate(cpa_control *control, cpa_device *device, const cpa_worker_options *options, double *flops,
                         double *bandwidth, cpa_error *err);

#endif
