/* The transports for device memory, and the choice between them.
 *
 * Both carry buffers of the CUDA device that was current in the thread that opened them; a stream handle is a
 * cudaStream_t. start and finish only enqueue, so they also work on streams in capture, once every buffer has been
 * exchanged outside of one. All ranks launch such a graph alike, and streams order its launches among themselves and
 * with the exchanges outside of it. Destroy the graphs before closing the transport. */
#ifndef CPA_DEVICE_TRANSPORT_H
#define CPA_DEVICE_TRANSPORT_H

#include "comm/comm.h"

/* Grouped send and receive of NCCL (libnccl.so.2, loaded by open), on any hosts. Takes some multiprocessors. */
extern const cpa_transport_table cpa_transport_nccl;

/* Copy engines between the GPUs of one host, through CUDA IPC. Takes no multiprocessor. Receive buffers lie in memory
 * from cudaMalloc. In start a rank that sends waits on the host until the receiver has started the same exchange too.
 */
extern const cpa_transport_table cpa_transport_peer;

/* What was chosen, and the times of one exchange of `bytes` with the peer of the first round; INFINITY where a
 * transport does not work, and `why` says why. The same on every rank. */
enum { CPA_CHOICE_SIZES = 2 };
typedef struct cpa_transport_choice {
    const cpa_transport_table *table;
    int64_t bytes[CPA_CHOICE_SIZES];
    double nccl_s[CPA_CHOICE_SIZES];
    double peer_s[CPA_CHOICE_SIZES];
    char why_no_nccl[256];
    char why_no_peer[256];
} cpa_transport_choice;

/* Measures both transports once, at start-up, and picks the faster (by the geometric mean over the sizes). Collective;
 * allocates and frees 128 MiB of the current device. Fails if neither works. One rank needs no transport: it gets peer,
 * unmeasured. */
cpa_status cpa_transport_choose(cpa_control *control, cpa_transport_choice *out, cpa_error *err);

#endif
