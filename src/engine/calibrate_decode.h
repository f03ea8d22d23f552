/* What a decode step costs: R, bytes/s at which a rank reads its cache, and x, what a layer takes longer when it
 * exchanges. */
#ifndef CPA_CALIBRATE_DECODE_H
#define CPA_CALIBRATE_DECODE_H

#include "comm/comm.h"
#include "src/worker/worker.h"

/* Collective; the same on every rank. */
cpa_status cpa_calibrate_decode(cpa_control *control, cpa_device *device, const cpa_worker_options *options,
                                double *memory_bandwidth, double *exchange_s, cpa_error *err);

#endif
