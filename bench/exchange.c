/* bench exchange: every rank sends the same number of bytes to every other, in the rounds of comm/rounds.h, two rounds
 * in flight, or all at once. The check sends bytes that depend on sender, receiver and place into poisoned buffers and
 * counts those that differ. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/benchmark.h"
#include "bench/memory.h"
#include "bench/noise.h"
#include "comm/rounds.h"
#include "comm/transports.h"
#include "kernels/device.h"

typedef struct exchange_state {
    cpa_bench_site *site;
    cpa_transport *transport;
    int64_t bytes;         /* to each peer */
    uint8_t *send, *recv;  /* [ranks, bytes] */
    cpa_message *messages; /* [ranks] */
} exchange_state;

enum { WORD = sizeof(uint64_t) };

/* The eight bytes at `at` of what `from` sends to `to`. */
static uint64_t pattern(int32_t from, int32_t to, int64_t at) {
    return cpa_bench_hash(((uint64_t)from << 52) + ((uint64_t)to << 40) + (uint64_t)at / WORD);
}

static int64_t bytes_left(int64_t bytes, int64_t at) {
    return bytes - at < WORD ? bytes - at : WORD;
}

static void fill_message(int32_t from, int32_t to, int64_t bytes, uint8_t *dst) {
    for (int64_t at = 0; at < bytes; at += WORD) {
        uint64_t word = pattern(from, to, at);
        memcpy(dst + at, &word, (size_t)bytes_left(bytes, at));
    }
}

/* Bytes of a message that are not what was sent. */
static int64_t count_wrong(int32_t from, int32_t to, int64_t bytes, const uint8_t *got) {
    int64_t wrong = 0;
    for (int64_t at = 0; at < bytes; at += WORD) {
        uint64_t word = pattern(from, to, at);
        int64_t n = bytes_left(bytes, at);
        if (memcmp(got + at, &word, (size_t)n) == 0) continue;
        for (int64_t i = 0; i < n; i++) wrong += got[at + i] != ((const uint8_t *)&word)[i];
    }
    return wrong;
}

/* The transport that was asked for, if it carries the memory of the device. */
static cpa_status find_transport(const cpa_bench_site *site, const cpa_transport_table **out, cpa_error *err) {
    const cpa_transport_kind kind = (cpa_transport_kind)site->options.transport;
    *out = site->transport;
    return kind == CPA_TRANSPORT_AUTO ? CPA_OK : cpa_transport_find(kind, site->backend, out, err);
}

static cpa_status fill_send(exchange_state *s, cpa_error *err) {
    const cpa_control *control = &s->site->control;
    int64_t total = s->bytes * control->size;
    uint8_t *host = malloc((size_t)total);
    if (!host) return cpa_fail(err, CPA_NO_MEMORY, "bench exchange: no memory");
    for (int32_t peer = 0; peer < control->size; peer++) {
        fill_message(control->rank, peer, s->bytes, host + peer * s->bytes);
    }
    cpa_status status = cpa_bench_upload(s->site, host, total, (void **)&s->send, err);
    free(host);
    return status;
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    exchange_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench exchange: no memory");
    *state = s;
    s->site = site;
    s->bytes = shape[0];
    int32_t size = site->control.size;
    const cpa_transport_table *table = NULL;
    CPA_TRY(find_transport(site, &table, err));
    cpa_status status = table->open(&site->control, &s->transport, err);
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    s->messages = calloc((size_t)size, sizeof *s->messages);
    if (!s->messages) return cpa_fail(err, CPA_NO_MEMORY, "bench exchange: no memory");
    CPA_TRY(fill_send(s, err));
    CPA_TRY(cpa_bench_poisoned(site, s->bytes * size, (void **)&s->recv, err));
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
    return s->transport->table->start(s->transport, messages, n, s->site->stream->native, out, err);
}

static cpa_status finish(exchange_state *s, cpa_exchange *exchange, cpa_error *err) {
    double waited_s;
    return s->transport->table->finish(s->transport, exchange, s->site->stream->native, &waited_s, err);
}

static cpa_status run_rounds(exchange_state *s, cpa_error *err) {
    int32_t size = s->site->control.size;
    cpa_exchange *current, *next = NULL;
    CPA_TRY(start_round(s, 1, &current, err));
    for (int32_t round = 1; round < size; round++) {
        if (round + 1 < size) CPA_TRY(start_round(s, round + 1, &next, err));
        CPA_TRY(finish(s, current, err));
        current = next;
    }
    return CPA_OK;
}

static cpa_status run_at_once(exchange_state *s, cpa_error *err) {
    const cpa_control *control = &s->site->control;
    int32_t n = 0;
    for (int32_t distance = 1; distance < control->size; distance++) {
        int32_t peer = (control->rank + distance) % control->size;
        int64_t at = peer * s->bytes;
        s->messages[n++] = (cpa_message){peer, s->send + at, s->bytes, s->recv + at, s->bytes};
    }
    cpa_exchange *exchange;
    CPA_TRY(s->transport->table->start(s->transport, s->messages, n, s->site->stream->native, &exchange, err));
    return finish(s, exchange, err);
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    (void)call;
    exchange_state *s = state;
    return s->site->options.at_once ? run_at_once(s, err) : run_rounds(s, err);
}

static cpa_status wait(void *state, cpa_error *err) {
    exchange_state *s = state;
    const cpa_transport_table *table = s->transport->table;
    if (table->drain) return table->drain(s->transport, s->site->stream->native, NULL, err);
    return cpa_bench_enqueued(s->site, cpa_stream_sync(s->site->stream), err);
}

/* One more exchange, into poisoned memory. */
static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    exchange_state *s = state;
    int32_t rank = s->site->control.rank, size = s->site->control.size;
    int64_t total = s->bytes * size;
    uint8_t *host = malloc((size_t)total);
    cpa_status status = host ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench exchange: no memory");
    if (status == CPA_OK) memset(host, CPA_BENCH_POISON, (size_t)total);
    if (status == CPA_OK) status = cpa_bench_copy(s->site, s->recv, host, total, err);
    CPA_TRY_GOTO(cpa_control_agree(&s->site->control, status, err), done);
    CPA_TRY_GOTO(run(s, 0, err), done);
    CPA_TRY_GOTO(wait(s, err), done);
    CPA_TRY_GOTO(cpa_bench_copy(s->site, host, s->recv, total, err), done);
    row->checked = s->bytes * (size - 1);
    row->wrong = 0;
    for (int32_t peer = 0; peer < size; peer++) {
        if (peer != rank) row->wrong += count_wrong(peer, rank, s->bytes, host + peer * s->bytes);
    }
done:
    free(host);
    return status;
}

static void release(void *state) {
    exchange_state *s = state;
    if (!s) return;
    if (s->transport) s->transport->table->close(s->transport);
    free(s->messages);
    cpa_device_free(s->site->device, s->recv);
    cpa_device_free(s->site->device, s->send);
    free(s);
}

const cpa_bench cpa_bench_exchange = {
    .name = "exchange",
    .dims = "bytes to each peer",
    .n_dims = 1,
    .shapes_host = "1K,16K,256K,1M,4M,16M",
    .shapes_cuda =
        "16K:transport=nccl,128K:transport=nccl,1M:transport=nccl,8M:transport=nccl,64M:transport=nccl,"
        "256M:transport=nccl,16K:transport=peer,128K:transport=peer,1M:transport=peer,8M:transport=peer,"
        "64M:transport=peer,256M:transport=peer,16K:transport=nccl:pattern=at-once,"
        "16K:transport=peer:pattern=at-once,1M:transport=nccl:pattern=at-once,"
        "1M:transport=peer:pattern=at-once",
    .checked = "bytes",
    .min_ranks = 2,
    .has_bus_bandwidth = 1,
    .prepare = prepare,
    .run = run,
    .wait = wait,
    .check = check,
    .release = release,
};
