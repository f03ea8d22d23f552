/* What exchanges between ranks bring, measured at start-up. */
#ifndef CPA_CALIBRATE_EXCHANGE_H
#define CPA_CALIBRATE_EXCHANGE_H

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "kernels/device.h"

/* *bandwidth: bytes/s that this rank sends while every rank exchanges with its peer of the first round; of links[ranks,
 * ranks], the same on every rank, the bandwidth of each pair that there was time for. At least two ranks. Collective. */
cpa_status cpa_calibrate_exchange(cpa_control *control, cpa_device *device, const cpa_transport_table *table,
                                  double *bandwidth, cpa_link *links, cpa_error *err);

#endif
