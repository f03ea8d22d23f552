/* What travels in the tests of transports for device memory, and the frame of such a test. Rank r takes device r,
 * modulo the number of devices: two ranks may share one, which peer memory allows and NCCL refuses. */
#ifndef CPA_TESTS_DEVICE_TRAFFIC_H
#define CPA_TESTS_DEVICE_TRAFFIC_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "comm/device_transport.h"
#include "tests/mpi_unit.h"
#include "tests/transport_fixture.h"

#define OK(call) CU_ASSERT_EQUAL((call), CPA_OK)
#define CUDA(call) CU_ASSERT_EQUAL((call), cudaSuccess)

/* CPA_TRAFFIC_SMALL is the longest message that peer memory stores by a kernel, CPA_TRAFFIC_LINES the longest of which
 * it does so in lines. */
enum {
    CPA_TRAFFIC_POISON = 0xa5,
    CPA_TRAFFIC_MAX_RANKS = 8,
    CPA_TRAFFIC_LINES = 192 << 10,
    CPA_TRAFFIC_SMALL = 1 << 20,
    CPA_TRAFFIC_MAX_BYTES = 3 << 20
};

extern int cpa_world_size, cpa_world_rank;
extern int cpa_gpus_suffice; /* one for each rank */

/* One rank's side of an exchange with all others. */
typedef struct cpa_traffic {
    uint64_t id;      /* stands for the sizes */
    uint64_t content; /* and this for what is sent */
    int shift;        /* of all buffers, in bytes from a multiple of 16 */
    cpa_message msgs[CPA_TRAFFIC_MAX_RANKS];
    int32_t n;
    uint8_t *device; /* send and receive buffers of CPA_TRAFFIC_MAX_BYTES for each rank */
    uint8_t *before; /* device, [ranks, CPA_TRAFFIC_MAX_BYTES]: what the receive buffers held when they became ready */
    uint8_t *host;   /* pinned, the same as `device` */
    uint8_t *result; /* pinned, [ranks, CPA_TRAFFIC_MAX_BYTES]: what was received */
    cpa_exchange *exchange;
} cpa_traffic;

void cpa_traffic_create(cpa_traffic *t);
void cpa_traffic_destroy(cpa_traffic *t);
/* Sizes, and the contents of all buffers on the host; the same ids on all ranks. */
void cpa_traffic_fill_with(cpa_traffic *t, uint64_t id, uint64_t content);
void cpa_traffic_fill(cpa_traffic *t, uint64_t id);
/* The producer: after `delay` the send buffers get their contents, and the receive buffers, poisoned, are read. */
void cpa_traffic_produce(cpa_traffic *t, cudaStream_t stream, cudaHostFn_t delay);
void cpa_traffic_start(cpa_transport *transport, cpa_traffic *t, cudaStream_t stream);
/* The consumer: reads what was received and at once spoils all buffers. */
void cpa_traffic_consume(cpa_transport *transport, cpa_traffic *t, cudaStream_t stream);
/* After the consumer's stream was drained. */
void cpa_traffic_check(const cpa_traffic *t);

/* The transport under test, and two streams. */
typedef struct cpa_site {
    cpa_control control;
    cpa_transport *transport;
    cudaStream_t producer, consumer;
} cpa_site;

/* Runs `body` with the transport open. */
void cpa_with_transport(void (*body)(cpa_site *));
void cpa_site_drain(cpa_site *s, cudaStream_t stream);
/* A whole exchange on the producer's stream. */
void cpa_site_exchange(cpa_site *s, const cpa_message *msgs, int32_t n);
/* What is enqueued on the producer's stream between the two becomes a graph. */
void cpa_site_begin_capture(cpa_site *s);
cudaGraphExec_t cpa_site_end_capture(cpa_site *s);

/* As cpa_test_device_missing; takes the device of the rank. */
int cpa_traffic_missing(void);

#endif
