/* Which transport carries the tensors of a device. */
#ifndef CPA_TRANSPORT_CHOICE_H
#define CPA_TRANSPORT_CHOICE_H

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "kernels/device.h"

/* The transport for the memory of a device; the same on every rank. Collective. With CPA_TRANSPORT_AUTO it measures
 * NCCL and peer memory on a CUDA device and says at info level what it found. */
cpa_status cpa_transport_for(cpa_control *control, const cpa_device *device, cpa_transport_kind wanted,
                             const cpa_transport_table **out, cpa_error *err);

#endif
