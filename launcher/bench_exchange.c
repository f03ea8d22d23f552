/* bench exchange: every rank sends the same number of bytes to every other, in the rounds of comm/rounds.h, two rounds
 * in flight, as context attention does. The check sends bytes that depend on sender, receiver and place into poisoned
 * buffers and counts those that differ. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "comm/rounds.h"
#include "launcher/bench.h"

enum { POISON = 0xa5 };

typedef struct exchange_state {
    cpa_bench_site *site;
    cpa_transport *transport;
    int64_t bytes;        /* to each peer */
    uint8_t *send, *recv; /* [ranks, bytes] */
} exchange_state;

static uint8_t pattern(int32_t from, int32_t to, int64_t at) {
    return (uint8_t)(cpa_bench_hash(((uint64_t)from << 52) + ((uint64_t)to << 40) + (uint64_t)at / 8) >> at % 8 * 8);
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    exchange_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench exchange: no memory");
    *state = s;
    s->site = site;
    s->bytes = shape[0];
    int32_t size = site->control.size;
    cpa_status status = cpa_transport_mpi.open(&site->control, &s->transport, err);
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    CPA_TRY(cpa_device_alloc(site->device, s->bytes * size, (void **)&s->send, err));
    CPA_TRY(cpa_device_alloc(site->device, s->bytes * size, (void **)&s->recv, err));
    memset(s->recv, POISON, (size_t)(s->bytes * size));
    for (int32_t peer = 0; peer < size; peer++) {
        for (int64_t i = 0; i < s->bytes; i++) s->send[peer * s->bytes + i] = pattern(site->control.rank, peer, i);
    }
    row->bytes = (double)(size - 1) * (double)s->bytes;
    return CPA_OK;
}

static cpa_status start_round(exchange_state *s, int32_t round, cpa_exchange **out, cpa_error *err) {
    const cpa_control *control = &s->site->control;
    int32_t to = cpa_round_send_peer(control->size, control->rank, round);
    int32_t from = cpa_round_recv_peer(control->size, control->rank, round);
    cpa_message messages[2] = {
        {.peer = to, .send = s->send + to * s->bytes, .send_bytes = s->bytes},
        {.peer = from, .recv = s->recv + from * s->bytes, .recv_bytes = s->bytes},
    };
    int32_t n = 2;
    if (to == from) {
        messages[0].recv = messages[1].recv;
        messages[0].recv_bytes = messages[1].recv_bytes;
        n = 1;
    }
    return s->transport->table->start(s->transport, messages, n, NULL, out, err);
}

static cpa_status run(void *state, cpa_error *err) {
    exchange_state *s = state;
    int32_t size = s->site->control.size;
    cpa_exchange *current, *next = NULL;
    double waited_s;
    CPA_TRY(start_round(s, 1, &current, err));
    for (int32_t round = 1; round < size; round++) {
        if (round + 1 < size) CPA_TRY(start_round(s, round + 1, &next, err));
        CPA_TRY(s->transport->table->finish(s->transport, current, NULL, &waited_s, err));
        current = next;
    }
    return CPA_OK;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    exchange_state *s = state;
    int32_t rank = s->site->control.rank, size = s->site->control.size;
    memset(s->recv, POISON, (size_t)(s->bytes * size));
    CPA_TRY(run(state, err));
    row->checked = s->bytes * (size - 1);
    row->wrong = 0;
    for (int32_t peer = 0; peer < size; peer++) {
        for (int64_t i = 0; peer != rank && i < s->bytes; i++) {
            row->wrong += s->recv[peer * s->bytes + i] != pattern(peer, rank, i);
        }
    }
    return CPA_OK;
}

static void release(void *state) {
    exchange_state *s = state;
    if (!s) return;
    cpa_device_free(s->site->device, s->recv);
    cpa_device_free(s->site->device, s->send);
    if (s->transport) s->transport->table->close(s->transport);
    free(s);
}

const cpa_bench cpa_bench_exchange = {
    .name = "exchange",
    .dims = "bytes to each peer",
    .n_dims = 1,
    .default_shapes = "1K,16K,256K,1M,4M,16M",
    .checked = "bytes",
    .min_ranks = 2,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
