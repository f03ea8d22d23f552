#include "tests/device_traffic.h"

#include <stdlib.h>
#include <string.h>

enum { MARGIN = 64 };

int cpa_world_size, cpa_world_rank;
int cpa_gpus_suffice;

/* ---- what travels ---- */

static int64_t random_size(int from, int to, uint64_t exchange) {
    uint64_t r = cpa_test_mixed(exchange * 4096 + (uint64_t)from * 64 + (uint64_t)to);
    switch (r % 8) {
        case 0: return 0;
        case 1: return (int64_t)(r >> 8) % 16;
        case 2: return (int64_t)(r >> 8) % 5000;
        case 3: return CPA_TRAFFIC_SMALL - 1 + (int64_t)(r >> 8) % 3;
        case 4: return (int64_t)(r >> 8) % CPA_TRAFFIC_SMALL;
        case 5: return CPA_TRAFFIC_LINES - 1 + (int64_t)(r >> 8) % 3;
        case 6: return (int64_t)(r >> 8) % CPA_TRAFFIC_LINES;
        default: return (int64_t)(r >> 8) % (CPA_TRAFFIC_MAX_BYTES - MARGIN);
    }
}

/* ---- one rank's side of an exchange with all others ---- */

static int64_t send_at(const cpa_traffic *t, int peer) {
    return (int64_t)peer * CPA_TRAFFIC_MAX_BYTES + t->shift;
}

static int64_t recv_at(const cpa_traffic *t, int peer) {
    return (int64_t)(cpa_world_size + peer) * CPA_TRAFFIC_MAX_BYTES + 16 + t->shift;
}

void cpa_traffic_create(cpa_traffic *t) {
    size_t bytes = (size_t)cpa_world_size * CPA_TRAFFIC_MAX_BYTES;
    memset(t, 0, sizeof *t);
    CUDA(cudaMalloc((void **)&t->device, 2 * bytes));
    CUDA(cudaMalloc((void **)&t->before, bytes));
    CUDA(cudaHostAlloc((void **)&t->host, 2 * bytes, cudaHostAllocDefault));
    CUDA(cudaHostAlloc((void **)&t->result, bytes, cudaHostAllocDefault));
}

void cpa_traffic_destroy(cpa_traffic *t) {
    cudaFree(t->device);
    cudaFree(t->before);
    cudaFreeHost(t->host);
    cudaFreeHost(t->result);
}

void cpa_traffic_fill_with(cpa_traffic *t, uint64_t id, uint64_t content) {
    const int shifts[] = {0, 1, 4, 0};
    t->id = id;
    t->content = content;
    t->shift = shifts[id % 4];
    t->n = 0;
    memset(t->host, CPA_TRAFFIC_POISON, 2 * (size_t)cpa_world_size * CPA_TRAFFIC_MAX_BYTES);
    for (int peer = 0; peer < cpa_world_size; peer++) {
        if (peer == cpa_world_rank) continue;
        int64_t sends = random_size(cpa_world_rank, peer, id), receives = random_size(peer, cpa_world_rank, id);
        for (int64_t i = 0; i < sends; i++)
            t->host[send_at(t, peer) + i] = cpa_test_pattern(cpa_world_rank, peer, content, i);
        t->msgs[t->n++] =
            (cpa_message){peer, t->device + send_at(t, peer), sends, t->device + recv_at(t, peer), receives};
    }
}

void cpa_traffic_fill(cpa_traffic *t, uint64_t id) {
    cpa_traffic_fill_with(t, id, id);
}

void cpa_traffic_produce(cpa_traffic *t, cudaStream_t stream, cudaHostFn_t delay) {
    size_t bytes = (size_t)cpa_world_size * CPA_TRAFFIC_MAX_BYTES;
    CUDA(cudaMemcpyAsync(t->device + bytes, t->host + bytes, bytes, cudaMemcpyHostToDevice, stream));
    if (delay) CUDA(cudaLaunchHostFunc(stream, delay, NULL));
    CUDA(cudaMemcpyAsync(t->before, t->device + bytes, bytes, cudaMemcpyDeviceToDevice, stream));
    CUDA(cudaMemcpyAsync(t->device, t->host, bytes, cudaMemcpyHostToDevice, stream));
}

void cpa_traffic_start(cpa_transport *transport, cpa_traffic *t, cudaStream_t stream) {
    cpa_error err = {.message = ""};
    OK(transport->table->start(transport, t->msgs, t->n, stream, &t->exchange, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
}

void cpa_traffic_consume(cpa_transport *transport, cpa_traffic *t, cudaStream_t stream) {
    size_t bytes = (size_t)cpa_world_size * CPA_TRAFFIC_MAX_BYTES;
    double waited = -1;
    OK(transport->table->finish(transport, t->exchange, stream, &waited, NULL));
    CU_ASSERT(waited == 0);
    CUDA(cudaMemcpyAsync(t->result, t->device + bytes, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemcpyAsync(t->host + bytes, t->before, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemsetAsync(t->device, 0, 2 * bytes, stream));
}

void cpa_traffic_check(const cpa_traffic *t) {
    size_t bytes = (size_t)cpa_world_size * CPA_TRAFFIC_MAX_BYTES;
    int64_t wrong = 0, early = 0, beyond = 0;
    for (int32_t m = 0; m < t->n; m++) {
        int peer = t->msgs[m].peer;
        const uint8_t *got = t->result + recv_at(t, peer) - bytes;
        for (int64_t i = 0; i < t->msgs[m].recv_bytes; i++)
            wrong += got[i] != cpa_test_pattern(peer, cpa_world_rank, t->content, i);
        beyond += got[-1] != CPA_TRAFFIC_POISON || got[t->msgs[m].recv_bytes] != CPA_TRAFFIC_POISON;
    }
    /* Without a message the consumer waits for no one, the producer included. */
    for (size_t i = 0; t->n > 0 && i < bytes; i++) early += t->host[bytes + i] != CPA_TRAFFIC_POISON;
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(beyond, 0);
    CU_ASSERT_EQUAL(early, 0);
}

/* ---- the frame ---- */

void cpa_with_transport(void (*body)(cpa_site *)) {
    const cpa_transport_table *table = cpa_test_transport();
    cpa_site s = {.transport = NULL};
    cpa_error err = {.message = ""};
    OK(cpa_control_open(MPI_COMM_WORLD, &s.control, NULL));
    CUDA(cudaStreamCreateWithFlags(&s.producer, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&s.consumer, cudaStreamNonBlocking));
    OK(table->open(&s.control, &s.transport, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
    if (s.transport) {
        s.transport->timeout_s = 20;
        body(&s);
        table->close(s.transport);
    }
    CUDA(cudaStreamDestroy(s.producer));
    CUDA(cudaStreamDestroy(s.consumer));
    cpa_control_close(&s.control);
}

void cpa_site_drain(cpa_site *s, cudaStream_t stream) {
    cpa_error err = {.message = ""};
    OK(s->transport->table->drain(s->transport, stream, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
}

void cpa_site_exchange(cpa_site *s, const cpa_message *msgs, int32_t n) {
    cpa_exchange *exchange = NULL;
    cpa_error err = {.message = ""};
    OK(s->transport->table->start(s->transport, msgs, n, s->producer, &exchange, &err));
    OK(s->transport->table->finish(s->transport, exchange, s->producer, NULL, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
}

void cpa_site_begin_capture(cpa_site *s) {
    CUDA(cudaStreamBeginCapture(s->producer, cudaStreamCaptureModeThreadLocal));
}

cudaGraphExec_t cpa_site_end_capture(cpa_site *s) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA(cudaStreamEndCapture(s->producer, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return executable;
}

int cpa_traffic_missing(void) {
    int none = cpa_test_cuda_missing();
    if (!none) none = cpa_test_transport_missing();
    if (none) return none;
    int devices = cpa_device_count(CPA_BACKEND_CUDA);
    MPI_Comm_rank(MPI_COMM_WORLD, &cpa_world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &cpa_world_size);
    cpa_gpus_suffice = devices >= cpa_world_size;
    cudaSetDevice(cpa_world_rank % devices);
    return 0;
}
