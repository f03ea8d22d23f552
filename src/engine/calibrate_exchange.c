#include "src/engine/calibrate_exchange.h"

#include <math.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/rounds.h"

/* An exchange grows until it takes long enough that starting it does not count. */
enum { LEAST_BYTES = 4 << 20, MOST_BYTES = 64 << 20, GROWTH = 4, EXCHANGES = 4 };
static const double LONG_EXCHANGE_S = 5e-4;
/* Pairs are many, and some may be slow. What all rounds of them together should take, and when no more begin. */
static const double PAIRS_S = 0.25, PAIRS_LIMIT_S = 0.5;
/* Of each pair the best of so many times, where that is soon done; what others do only adds. */
enum { TIMES = 3, LEAST_PAIR_BYTES = 256 << 10, ALIGNED_BYTES = 4096 };

typedef struct exchange_probe {
    cpa_control *control;
    cpa_transport *transport;
    cpa_stream *stream;
    char *buffers; /* what is sent, and behind it what is received */
    int64_t bytes; /* of each */
} exchange_probe;

/* One exchange of so many bytes each way with the ranks `to` and `from`; with itself a rank takes part without a
 * message. */
static cpa_status exchange(const exchange_probe *p, int32_t to, int32_t from, int64_t bytes, cpa_error *err) {
    const cpa_transport_table *table = p->transport->table;
    char *send = p->buffers, *recv = send + p->bytes;
    cpa_message messages[2] = {{to, send, bytes, NULL, 0}, {from, NULL, 0, recv, bytes}};
    if (to == from) messages[0] = (cpa_message){to, send, bytes, recv, bytes};
    const int32_t n = to == p->control->rank ? 0 : to == from ? 1 : 2;
    cpa_exchange *started;
    double waited;
    CPA_TRY(table->start(p->transport, messages, n, p->stream->native, &started, err));
    return table->finish(p->transport, started, p->stream->native, &waited, err);
}

static cpa_status drain(const exchange_probe *p, cpa_error *err) {
    const cpa_transport_table *table = p->transport->table;
    return table->drain ? table->drain(p->transport, p->stream->native, NULL, err) : CPA_OK;
}

/* Seconds on this rank of one of n exchanges of p->bytes, behind one of `warm_up` bytes. */
static cpa_status time_exchanges(const exchange_probe *p, int32_t to, int32_t from, int64_t warm_up, int n,
                                 double *seconds, cpa_error *err) {
    CPA_TRY(exchange(p, to, from, warm_up, err));
    CPA_TRY(drain(p, err));
    const double start = cpa_clock_now();
    for (int i = 0; i < n; i++) CPA_TRY(exchange(p, to, from, p->bytes, err));
    CPA_TRY(drain(p, err));
    *seconds = (cpa_clock_now() - start) / n;
    return CPA_OK;
}

/* Every rank exchanges with its peer of the first round; p->bytes becomes what takes long enough. */
static cpa_status measure_all(exchange_probe *p, double *bandwidth, cpa_error *err) {
    const int32_t to = cpa_round_send_peer(p->control->size, p->control->rank, 1);
    const int32_t from = cpa_round_recv_peer(p->control->size, p->control->rank, 1);
    double seconds;
    p->bytes = LEAST_BYTES / GROWTH;
    do {
        p->bytes *= GROWTH;
        CPA_TRY(time_exchanges(p, to, from, p->bytes, EXCHANGES, &seconds, err)); /* in use by others yet */
        CPA_TRY(cpa_control_max(p->control, &seconds, 1, err));
    } while (seconds < LONG_EXCHANGE_S && p->bytes < MOST_BYTES);
    *bandwidth = (double)p->bytes / seconds;
    return CPA_OK;
}

/* Notes the rates of a round, of whose pairs the slower rank counts, from the seconds of all ranks; returns the longest of
 * these. */
static double note_round(const exchange_probe *p, int32_t round, const double *seconds, cpa_link *links) {
    const int32_t size = p->control->size;
    double longest = 0;
    for (int32_t rank = 0; rank < size; rank++) {
        const int32_t other = cpa_pair_partner(size, rank, round);
        if (other == rank) continue;
        const double slower = fmax(seconds[rank], seconds[other]);
        links[rank * size + other].bandwidth = (double)p->bytes / slower;
        longest = fmax(longest, slower);
    }
    return longest;
}

/* Seconds on this rank of an exchange with its partner. Those that are slow are timed once, behind a short one. */
static cpa_status time_pair(const exchange_probe *p, int32_t partner, int is_slow, double *seconds, cpa_error *err) {
    if (is_slow) return time_exchanges(p, partner, partner, ALIGNED_BYTES, 1, seconds, err);
    *seconds = INFINITY;
    for (int i = 0; i < TIMES; i++) {
        double once;
        CPA_TRY(time_exchanges(p, partner, partner, p->bytes, EXCHANGES, &once, err));
        *seconds = fmin(*seconds, once);
    }
    return CPA_OK;
}

/* The pairs of a round exchange at once, of as many bytes as the slowest so far have time for. */
static cpa_status measure_pairs(exchange_probe *p, double bandwidth, cpa_link *links, cpa_error *err) {
    const int32_t size = p->control->size, rounds = cpa_pair_rounds(size);
    const double most = (double)p->bytes, round_s = PAIRS_S / rounds, began = cpa_clock_now();
    double slowest = bandwidth, spent_s = 0;
    for (int32_t round = 1; round <= rounds && spent_s < PAIRS_LIMIT_S; round++) {
        double own = 0, all[CPA_COMM_MAX_RANKS];
        const int32_t partner = cpa_pair_partner(size, p->control->rank, round);
        p->bytes = (int64_t)fmin(most, fmax(slowest * round_s, LEAST_PAIR_BYTES)) / ALIGNED_BYTES * ALIGNED_BYTES;
        const int is_slow = (double)p->bytes / slowest * TIMES * (1 + EXCHANGES) > round_s;
        CPA_TRY(time_pair(p, partner, is_slow, &own, err));
        CPA_TRY(cpa_control_all_gather(p->control, &own, sizeof own, all, err));
        slowest = fmin(slowest, (double)p->bytes / note_round(p, round, all, links));
        spent_s = cpa_clock_now() - began;
        CPA_TRY(cpa_control_max(p->control, &spent_s, 1, err));
    }
    return CPA_OK;
}

cpa_status cpa_calibrate_exchange(cpa_control *control, cpa_device *device, const cpa_transport_table *table,
                                  double *bandwidth, cpa_link *links, cpa_error *err) {
    exchange_probe p = {.control = control};
    void *buffers = NULL;
    cpa_status status = device->table->alloc(device, 2 * (int64_t)MOST_BYTES, &buffers, err);
    p.buffers = buffers;
    if (status == CPA_OK) status = device->table->stream_create(device, &p.stream, err);
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), done);
    CPA_TRY_GOTO(table->open(control, &p.transport, err), done);
    CPA_TRY_GOTO(measure_all(&p, bandwidth, err), done);
    CPA_TRY_GOTO(measure_pairs(&p, *bandwidth, links, err), done);
done:
    if (p.transport) p.transport->table->close(p.transport);
    if (p.stream) device->table->stream_destroy(p.stream);
    device->table->free(device, buffers);
    return status;
}
