/* What a layer of a prefill chunk takes by pass-KV and by pass-Q where a long context is cached: which of them is
 * faster depends on how the rows fill the device and how transfers and attention get in each other's way, which no
 * formula knows. */
#ifndef CPA_CALIBRATE_PREFILL_H
#define CPA_CALIBRATE_PREFILL_H

#include "comm/comm.h"
#include "src/schedule/planner.h"
#include "src/worker/worker.h"

/* Collective, for several ranks; the same on every rank. Sets probes and n_probes of the planner, of chunks that a step
 * of the options has room for. */
cpa_status cpa_calibrate_prefill(cpa_control *control, cpa_device *device, const cpa_worker_options *options,
                                 cpa_planner *planner, cpa_error *err);

#endif
