/* The kernels of comm/peer/stores.h. Host and device share what lies here. */
#ifndef CPA_PEER_STORE_KERNELS_H
#define CPA_PEER_STORE_KERNELS_H

#include <cuda_runtime_api.h>

#include "base/stored.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Messages of up to so many bytes travel in lines of 16 bytes: 4 of the message, the number of the message in the slot,
 * 4 of the message, that number again. A half is written at once, so a receiver that sees the number has the bytes; the
 * sender need not wait until they are there to say so. (The LL protocol of NCCL.) With longer ones the doubled bytes
 * take longer than that wait. */
enum { CPA_STORE_LINE_BYTES = 192 << 10 };

/* Loads the kernels: the first launch of one that is not loaded may wait for what runs on the device. */
cudaError_t cpa_store_load_kernels(void);
/* Waits until the receivers have taken out what was in the slot before, and writes. */
cudaError_t cpa_store_launch_push(const cpa_store_batch *batch, cudaStream_t stream);
/* Waits until the messages are there, and takes them out. */
cudaError_t cpa_store_launch_pull(const cpa_store_batch *batch, cudaStream_t stream);
/* Tells the receivers of messages that lie there. */
cudaError_t cpa_store_launch_tell(const cpa_store_batch *batch, cudaStream_t stream);
/* Waits until those of others lie here. */
cudaError_t cpa_store_launch_take(const cpa_store_batch *batch, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
