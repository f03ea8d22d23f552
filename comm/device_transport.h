/* The transports for device memory, and the choice between them.
 *
 * They carry buffers of the CUDA device that was current in the thread that opened them; a stream handle is a
 * cudaStream_t. start and finish only enqueue, so they also work on streams in capture, once every buffer has been
 * exchanged outside of one. All ranks launch such a graph alike, and streams order its launches among themselves and
 * with the exchanges outside of it: none of those is in flight when a graph is launched. Streams live until what was
 * started on them is finished. Destroy the graphs before closing the transport. */
#ifndef CPA_DEVICE_TRANSPORT_H
#define CPA_DEVICE_TRANSPORT_H

#include <cpattn/device.h>

#include "comm/transports.h"

/* Grouped send and receive of NCCL (libnccl.so.2, loaded by open), on any hosts. Takes some multiprocessors. */
extern const cpa_transport_table cpa_transport_nccl;

/* Peer memory between the GPUs of one host, through CUDA IPC. Messages of up to 1 MiB are stored by a kernel on the
 * stream of start, and taken out by one on the stream of finish: short ones cost a few microseconds of that stream.
 * Longer ones go by copy engines and take no multiprocessor; their receive buffers lie in memory from cudaMalloc, and
 * in start a rank that sends one waits on the host until the receiver has started the same exchange too. */
extern const cpa_transport_table cpa_transport_peer;

/* What was chosen, and the times of one exchange of `bytes` with the peer of the first round over each transport of
 * cpa_transport_rows; INFINITY where it does not work, and `why_not` says why. Zero for one that carries no device
 * memory. The same on every rank. */
enum { CPA_CHOICE_SIZES = 3 };
typedef struct cpa_transport_choice {
    const cpa_transport_table *table;
    int64_t bytes[CPA_CHOICE_SIZES];
    double seconds[CPA_TRANSPORTS][CPA_CHOICE_SIZES];
    char why_not[CPA_TRANSPORTS][256];
} cpa_transport_choice;

/* Measures the transports of CUDA devices and picks the faster (by the geometric mean over the sizes), once for the
 * communicator that `control` was opened on, the ranks' current devices and `memory`: the choice stays with that
 * communicator. Collective; measuring takes 128 MiB of the current device from `memory`, with its functions NULL from
 * cudaMalloc, since not every transport carries any memory. Fails if none works. One rank needs no transport: it gets
 * peer, unmeasured. */
cpa_status cpa_transport_choose(cpa_control *control, const cpa_allocator *memory, cpa_transport_choice *out,
                                cpa_error *err);

#endif
