/* All-to-all between GPUs over the device transports, one process a GPU: mpirun -np N device_exchange
 *
 * `bytes` is what a rank holds for all ranks, itself included, so a message has bytes / N. Modes: `rounds`, the N - 1
 * pairwise rounds of comm/rounds.h, two in flight; `at once`, one exchange with all peers. Times are of one all-to-all:
 * `us` of the device, one after another on a stream, the median over batches of the slowest rank; `graph us` the same
 * in a CUDA graph; `host us` what the host needs to enqueue it. GB/s = bytes * (N - 1) / N / us. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/device_transport.h"
#include "comm/rounds.h"

enum { BATCHES = 9, MAX_RANKS = 64 };

static const int64_t SIZES[] = {(int64_t)16 << 10, (int64_t)128 << 10, (int64_t)1 << 20,  (int64_t)8 << 20,
                                (int64_t)64 << 20, (int64_t)256 << 20, (int64_t)512 << 20};
enum { N_SIZES = sizeof SIZES / sizeof *SIZES };

typedef enum exchange_mode { ROUNDS = 0, AT_ONCE, N_MODES } exchange_mode;
static const char *const MODE_NAMES[N_MODES] = {"rounds", "at once"};

typedef struct site {
    cpa_control control;
    cpa_transport *transport;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    char *send, *recv;
} site;

static void check(cpa_status status, const cpa_error *err) {
    if (status == CPA_OK) return;
    fprintf(stderr, "device_exchange: %s\n", err->message);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check_cuda(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "device_exchange: CUDA: %s\n", cudaGetErrorString(error));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* ---- one all-to-all ---- */

static cpa_exchange *start_round(site *s, int64_t bytes, int32_t round) {
    int32_t to = cpa_round_send_peer(s->control.size, s->control.rank, round);
    int32_t from = cpa_round_recv_peer(s->control.size, s->control.rank, round);
    cpa_message msgs[2] = {{to, s->send + to * bytes, bytes, NULL, 0}, {from, NULL, 0, s->recv + from * bytes, bytes}};
    if (to == from) msgs[0].recv = msgs[1].recv, msgs[0].recv_bytes = bytes;
    cpa_exchange *exchange;
    cpa_error err;
    check(s->transport->table->start(s->transport, msgs, to == from ? 1 : 2, s->stream, &exchange, &err), &err);
    return exchange;
}

static void finish(site *s, cpa_exchange *exchange) {
    cpa_error err;
    check(s->transport->table->finish(s->transport, exchange, s->stream, NULL, &err), &err);
}

static void run_rounds(site *s, int64_t bytes) {
    cpa_exchange *current = start_round(s, bytes, 1), *next = NULL;
    for (int32_t round = 1; round < s->control.size; round++) {
        if (round + 1 < s->control.size) next = start_round(s, bytes, round + 1);
        finish(s, current);
        current = next;
    }
}

static void run_at_once(site *s, int64_t bytes) {
    cpa_message msgs[MAX_RANKS];
    int32_t n = 0;
    for (int32_t d = 1; d < s->control.size; d++) {
        int32_t peer = (s->control.rank + d) % s->control.size;
        msgs[n++] = (cpa_message){peer, s->send + peer * bytes, bytes, s->recv + peer * bytes, bytes};
    }
    cpa_exchange *exchange;
    cpa_error err;
    check(s->transport->table->start(s->transport, msgs, n, s->stream, &exchange, &err), &err);
    finish(s, exchange);
}

static void run(site *s, exchange_mode mode, int64_t bytes) {
    if (mode == ROUNDS) {
        run_rounds(s, bytes);
    } else {
        run_at_once(s, bytes);
    }
}

/* ---- its time ---- */

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, compare);
    return values[n / 2];
}

static void drain(site *s) {
    cpa_error err;
    check(s->transport->table->drain(s->transport, s->stream, &err), &err);
}

/* Microseconds of one all-to-all of a batch. */
typedef struct timing {
    double device_us;
    double host_us;
} timing;

static timing time_batches(site *s, exchange_mode mode, int64_t bytes, int inner, cudaGraphExec_t graph) {
    double device[BATCHES], host[BATCHES];
    for (int batch = -1; batch < BATCHES; batch++) { /* the first warms up */
        float ms;
        drain(s);
        MPI_Barrier(s->control.comm);
        check_cuda(cudaEventRecord(s->begin, s->stream));
        double begin = cpa_clock_now();
        if (graph) {
            check_cuda(cudaGraphLaunch(graph, s->stream));
        } else {
            for (int i = 0; i < inner; i++) run(s, mode, bytes);
        }
        double enqueued = cpa_clock_now();
        check_cuda(cudaEventRecord(s->end, s->stream));
        drain(s);
        check_cuda(cudaEventElapsedTime(&ms, s->begin, s->end));
        if (batch < 0) continue;
        device[batch] = ms * 1e3 / inner;
        host[batch] = (enqueued - begin) * 1e6 / inner;
    }
    double slowest[2] = {median(device, BATCHES), median(host, BATCHES)};
    cpa_error err;
    check(cpa_control_max(&s->control, slowest, 2, &err), &err);
    return (timing){slowest[0], slowest[1]};
}

static timing time_graph(site *s, exchange_mode mode, int64_t bytes, int inner) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_cuda(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < inner; i++) run(s, mode, bytes);
    check_cuda(cudaStreamEndCapture(s->stream, &graph));
    check_cuda(cudaGraphInstantiate(&executable, graph, 0));
    timing result = time_batches(s, mode, bytes, inner, executable);
    check_cuda(cudaGraphExecDestroy(executable));
    check_cuda(cudaGraphDestroy(graph));
    return result;
}

/* ---- right? ---- */

static uint8_t pattern(int32_t from, int32_t to, int64_t at) {
    return (uint8_t)((uint64_t)(from * 131 + to * 17 + 7) * (uint64_t)(at + 1) >> 3);
}

/* Bytes of one all-to-all that are not what their sender sent. */
static int64_t count_wrong(site *s, exchange_mode mode, int64_t bytes) {
    int32_t size = s->control.size, rank = s->control.rank;
    uint8_t *host = malloc((size_t)(bytes * size));
    if (!host) abort();
    for (int32_t peer = 0; peer < size; peer++) {
        for (int64_t i = 0; i < bytes; i++) host[peer * bytes + i] = pattern(rank, peer, i);
    }
    check_cuda(cudaMemcpy(s->send, host, (size_t)(bytes * size), cudaMemcpyHostToDevice));
    check_cuda(cudaMemset(s->recv, 0xa5, (size_t)(bytes * size)));
    check_cuda(cudaDeviceSynchronize());
    run(s, mode, bytes);
    drain(s);
    check_cuda(cudaMemcpy(host, s->recv, (size_t)(bytes * size), cudaMemcpyDeviceToHost));
    double wrong = 0;
    for (int32_t peer = 0; peer < size; peer++) {
        for (int64_t i = 0; peer != rank && i < bytes; i++) wrong += host[peer * bytes + i] != pattern(peer, rank, i);
    }
    free(host);
    cpa_error err;
    check(cpa_control_sum(&s->control, &wrong, 1, &err), &err);
    return (int64_t)wrong;
}

static void measure(site *s, int64_t total, exchange_mode mode) {
    int64_t bytes = total / s->control.size;
    int inner = total >= (int64_t)64 << 20 ? 5 : 20;
    int64_t wrong = total <= (int64_t)8 << 20 ? count_wrong(s, mode, bytes) : -1;
    timing streamed = time_batches(s, mode, bytes, inner, NULL);
    timing captured = time_graph(s, mode, bytes, inner);
    if (s->control.rank > 0) return;
    double moved = (double)bytes * (s->control.size - 1) / 1e3;
    char checked[24] = "-";
    if (wrong >= 0) snprintf(checked, sizeof checked, "%lld", (long long)wrong);
    printf("%10lld  %-5s %-8s %9.1f %8.1f %10.1f %8.1f %9.1f %8s\n", (long long)total, s->transport->table->name,
           MODE_NAMES[mode], streamed.device_us, moved / streamed.device_us, captured.device_us,
           moved / captured.device_us, streamed.host_us, checked);
    fflush(stdout);
}

/* ---- the program ---- */

static void measure_transport(site *s, const cpa_transport_table *table) {
    cpa_error err;
    cpa_status status = cpa_control_agree(&s->control, table->open(&s->control, &s->transport, &err), &err);
    if (status != CPA_OK) {
        if (s->control.rank == 0) printf("# %s: %s\n", table->name, err.message);
        return;
    }
    for (int i = 0; i < N_SIZES; i++) {
        for (exchange_mode mode = ROUNDS; mode < N_MODES; mode++) {
            if (mode == AT_ONCE && s->control.size == 2) continue; /* the same */
            measure(s, SIZES[i], mode);
        }
    }
    table->close(s->transport);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    site s;
    cpa_error err;
    cpa_transport_choice choice;
    int devices = 0;
    check(cpa_control_open(MPI_COMM_WORLD, &s.control, &err), &err);
    check_cuda(cudaGetDeviceCount(&devices));
    check_cuda(cudaSetDevice(s.control.rank % devices));
    check_cuda(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    check_cuda(cudaEventCreate(&s.begin));
    check_cuda(cudaEventCreate(&s.end));
    check_cuda(cudaMalloc((void **)&s.send, (size_t)SIZES[N_SIZES - 1]));
    check_cuda(cudaMalloc((void **)&s.recv, (size_t)SIZES[N_SIZES - 1]));
    if (s.control.rank == 0) {
        struct cudaDeviceProp properties;
        check_cuda(cudaGetDeviceProperties(&properties, 0));
        printf("# device_exchange: %d ranks, %d x %s\n", s.control.size, devices, properties.name);
        printf("%10s  %-5s %-8s %9s %8s %10s %8s %9s %8s\n", "bytes", "", "mode", "us", "GB/s", "graph us", "GB/s",
               "host us", "#wrong");
    }
    measure_transport(&s, &cpa_transport_nccl);
    measure_transport(&s, &cpa_transport_peer);
    double begin = cpa_clock_now();
    check(cpa_transport_choose(&s.control, &choice, &err), &err);
    if (s.control.rank == 0) {
        printf("# chosen at start-up: %s, in %.2f s\n", choice.table->name, cpa_clock_now() - begin);
    }
    cpa_control_close(&s.control);
    MPI_Finalize();
    return 0;
}
