/* What joins each two ranks of a communicator: NVLink or PCIe between GPUs, memory of a host, sockets. */
#ifndef CPA_LINKS_H
#define CPA_LINKS_H

#include <cpattn/engine.h>

#include "comm/comm.h"

/* The link between two ranks where no GPUs of one host decide it. Tensors go over a communicator of this name (empty: over
 * something else); has_rdma: programs on both hosts may use RDMA devices. Pure. */
cpa_link_kind cpa_link_kind_of(int one_host, const char *communicator, int has_rdma);

/* links[ranks, ranks], as in cpa_engine_links but for bandwidths, which stay 0; the same on every rank. `memory`: where
 * tensors lie; with CPA_BACKEND_CUDA the current device of the thread is the rank's. Collective. */
cpa_status cpa_links_find(cpa_control *control, cpa_backend memory, cpa_link *links, cpa_error *err);

/* What carries tensors: the name of the transport or, of messages over the communicator, that of the communicator. Lives
 * as long as both. */
const char *cpa_links_carrier(const cpa_transport_table *transport, const cpa_comm *comm);

#endif
