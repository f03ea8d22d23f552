/* Times an exchange with the peer of the first round over each transport. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/device/driver.h"
#include "comm/device_transport.h"
#include "comm/rounds.h"

enum { WARM_UPS = 3, REPETITIONS = 10 };
static const int64_t SIZES[CPA_CHOICE_SIZES] = {(int64_t)16 << 10, (int64_t)1 << 20, (int64_t)64 << 20};

typedef struct site {
    cpa_control *control;
    cudaStream_t stream;
    const cpa_allocator *memory;
    char *buffers; /* two of the largest size */
} site;

static cpa_status exchange_once(const site *s, cpa_transport *transport, int64_t bytes, cpa_error *err) {
    int32_t to = cpa_round_send_peer(s->control->size, s->control->rank, 1);
    int32_t from = cpa_round_recv_peer(s->control->size, s->control->rank, 1);
    char *recv = s->buffers + SIZES[CPA_CHOICE_SIZES - 1];
    cpa_message msgs[2] = {{to, s->buffers, bytes, NULL, 0}, {from, NULL, 0, recv, bytes}};
    if (to == from) msgs[0] = (cpa_message){to, s->buffers, bytes, recv, bytes};
    cpa_exchange *exchange;
    CPA_TRY(transport->table->start(transport, msgs, to == from ? 1 : 2, s->stream, &exchange, err));
    return transport->table->finish(transport, exchange, s->stream, NULL, err);
}

static cpa_status time_size(const site *s, cpa_transport *transport, int64_t bytes, double *seconds, cpa_error *err) {
    double begin = 0;
    for (int i = -WARM_UPS; i < REPETITIONS; i++) {
        if (i == 0) {
            CPA_TRY(transport->table->drain(transport, s->stream, NULL, err));
            begin = cpa_clock_now();
        }
        CPA_TRY(exchange_once(s, transport, bytes, err));
    }
    CPA_TRY(transport->table->drain(transport, s->stream, NULL, err));
    *seconds = (cpa_clock_now() - begin) / REPETITIONS;
    return CPA_OK;
}

/* Times of the slowest rank; INFINITY and the reason if the transport does not work. Fails only if the communicator
 * does. */
static cpa_status time_transport(const site *s, const cpa_transport_table *table, double *seconds, char *why,
                                 size_t why_size, cpa_error *err) {
    cpa_transport *transport = NULL;
    cpa_error own = {.message = ""};
    cpa_status status = table->open(s->control, &transport, &own); /* the same on all ranks */
    for (int i = 0; i < CPA_CHOICE_SIZES; i++) {
        if (status == CPA_OK) {
            status = cpa_control_agree(s->control, time_size(s, transport, SIZES[i], &seconds[i], &own), &own);
        }
        if (status != CPA_OK) seconds[i] = INFINITY;
    }
    if (transport) table->close(transport);
    snprintf(why, why_size, "%.*s", (int)why_size - 1, status == CPA_OK ? "" : own.message);
    return cpa_control_max(s->control, seconds, CPA_CHOICE_SIZES, err);
}

static double product(const double *seconds) {
    double all = 1;
    for (int i = 0; i < CPA_CHOICE_SIZES; i++) all *= seconds[i];
    return all;
}

/* Appends what is wrong with a transport to a line. */
static void complain(cpa_error *line, const cpa_transport_row *row, const char *why) {
    const size_t used = strlen(line->message);
    snprintf(line->message + used, sizeof line->message - used, "%s%s: %.200s", used ? "; " : "", row->name, why);
}

static cpa_status measure(const site *s, cpa_transport_choice *choice, cpa_error *err) {
    double least = INFINITY;
    cpa_error none = {.message = ""};
    choice->table = NULL;
    for (int i = 0; i < CPA_TRANSPORTS; i++) {
        const cpa_transport_row *row = &cpa_transport_rows[i];
        if (row->memory != CPA_BACKEND_CUDA) continue;
        CPA_TRY(time_transport(s, row->table, choice->seconds[i], choice->why_not[i], sizeof choice->why_not[i], err));
        const double all = product(choice->seconds[i]);
        if (isinf(all)) complain(&none, row, choice->why_not[i]);
        if (isinf(all) || all > least) continue;
        least = all;
        choice->table = row->table;
    }
    return choice->table ? CPA_OK : cpa_fail(err, CPA_COMM, "no transport between the GPUs: %s", none.message);
}

static cpa_status open_site(site *s, cpa_error *err) {
    size_t bytes = 2 * (size_t)SIZES[CPA_CHOICE_SIZES - 1];
    CPA_TRY(cpa_runtime_check(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
                              err));
    if (!s->memory->alloc) return cpa_runtime_check(cudaMalloc((void **)&s->buffers, bytes), "cudaMalloc", err);
    s->buffers = s->memory->alloc(s->memory->ctx, (int64_t)bytes);
    if (!s->buffers)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for %zu bytes to measure the transports with", bytes);
    return CPA_OK;
}

static void close_site(const site *s) {
    if (s->buffers && s->memory->free) {
        cudaDeviceSynchronize();
        s->memory->free(s->memory->ctx, s->buffers);
    } else {
        cudaFree(s->buffers);
    }
    if (s->stream) cudaStreamDestroy(s->stream);
}

/* ---- the choice stays with the communicator: to make a communicator of NCCL takes a second ---- */

typedef struct remembered {
    cpa_transport_choice choice;
    int device;
    cpa_allocator memory;
} remembered;

static int same_memory(const cpa_allocator *a, const cpa_allocator *b) {
    return a->alloc == b->alloc && a->ctx == b->ctx;
}

/* Whether every rank remembers a choice for its current device and memory, the same one then. */
static cpa_status recall(cpa_control *control, const cpa_allocator *memory, int *found, cpa_transport_choice *choice,
                         cpa_error *err) {
    const remembered *r = control->comm->remembered;
    int device;
    CPA_TRY(cpa_control_agree(control, cpa_runtime_check(cudaGetDevice(&device), "cudaGetDevice", err), err));
    double missing = !r || r->device != device || !same_memory(&r->memory, memory);
    CPA_TRY(cpa_control_max(control, &missing, 1, err));
    *found = missing == 0;
    if (*found) *choice = r->choice;
    return CPA_OK;
}

/* A rank that has no memory for it measures again next time, and so do the others. */
static void remember(const cpa_control *control, const cpa_allocator *memory, const cpa_transport_choice *choice) {
    remembered *r = control->comm->remembered;
    if (!r) r = control->comm->remembered = calloc(1, sizeof *r);
    if (!r) return;
    r->choice = *choice;
    r->memory = *memory;
    if (cudaGetDevice(&r->device) != cudaSuccess) r->device = -1;
}

static cpa_status measure_on_device(cpa_control *control, const cpa_allocator *memory, cpa_transport_choice *choice,
                                    cpa_error *err) {
    site s = {.control = control, .memory = memory};
    cpa_status status = cpa_control_agree(control, open_site(&s, err), err);
    if (status == CPA_OK) status = measure(&s, choice, err);
    close_site(&s);
    return status;
}

cpa_status cpa_transport_choose(cpa_control *control, const cpa_allocator *memory, cpa_transport_choice *out,
                                cpa_error *err) {
    cpa_transport_choice choice = {.table = &cpa_transport_peer};
    memcpy(choice.bytes, SIZES, sizeof SIZES);
    int found = control->size == 1;
    if (!found) CPA_TRY(recall(control, memory, &found, &choice, err));
    if (!found) {
        CPA_TRY(measure_on_device(control, memory, &choice, err));
        remember(control, memory, &choice);
    }
    *out = choice;
    return CPA_OK;
}
