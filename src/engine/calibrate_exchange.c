#include "src/engine/calibrate_exchange.h"

#include <math.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/rounds.h"

/* An exchange grows until it takes long enough that starting it does not count. */
enum {
    LEAST_BYTES = 4 << 20,
    MOST_BYTES = 64 << 20,
    GROWTH = 4,
    EXCHANGES = 4, /* that are timed, behind one that is not */
    ALIGNED_BYTES = 4096
};
static const double LONG_EXCHANGE_S = 5e-4;
/* Pairs are many, and some may be slow: as long as all rounds of them together should take, and may take. */
static const double PAIRS_S = 0.25, PAIRS_LIMIT_S = 1;
static const double LEAST_PAIR_BYTES = 256 << 10;

typedef struct exchange_probe {
    cpa_control *control;
    cpa_transport *transport;
    cpa_stream *stream;
    char *buffers; /* what is sent, and behind it what is received */
    int64_t bytes; /* of each */
} exchange_probe;

/* Seconds on this rank of an exchange with the ranks `to` and `from`; with itself: takes part without a message. */
static cpa_status time_exchanges(const exchange_probe *p, int32_t to, int32_t from, double *seconds, cpa_error *err) {
    const cpa_transport_table *table = p->transport->table;
    char *send = p->buffers, *recv = send + p->bytes;
    cpa_message messages[2] = {{to, send, p->bytes, NULL, 0}, {from, NULL, 0, recv, p->bytes}};
    if (to == from) messages[0] = (cpa_message){to, send, p->bytes, recv, p->bytes};
    const int32_t n_messages = to == p->control->rank ? 0 : to == from ? 1 : 2;
    double start = 0, waited;
    for (int i = -1; i < EXCHANGES; i++) {
        cpa_exchange *exchange;
        if (i == 0) start = cpa_clock_now();
        CPA_TRY(table->start(p->transport, messages, n_messages, p->stream->native, &exchange, err));
        CPA_TRY(table->finish(p->transport, exchange, p->stream->native, &waited, err));
        if (table->drain && (i == -1 || i + 1 == EXCHANGES))
            CPA_TRY(table->drain(p->transport, p->stream->native, NULL, err));
    }
    *seconds = (cpa_clock_now() - start) / EXCHANGES;
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
        CPA_TRY(time_exchanges(p, to, from, &seconds, err)); /* in use by others yet */
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

/* The pairs of a round exchange at once, of as many bytes as the slowest so far have time for. */
static cpa_status measure_pairs(exchange_probe *p, double bandwidth, cpa_link *links, cpa_error *err) {
    const int32_t size = p->control->size, rounds = cpa_pair_rounds(size);
    const double most = (double)p->bytes, each_s = PAIRS_S / rounds / (1 + EXCHANGES);
    double slowest = bandwidth, spent = 0;
    for (int32_t round = 1; round <= rounds && spent < PAIRS_LIMIT_S; round++) {
        double own = 0, all[CPA_COMM_MAX_RANKS];
        const int32_t partner = cpa_pair_partner(size, p->control->rank, round);
        p->bytes = (int64_t)fmin(most, fmax(slowest * each_s, LEAST_PAIR_BYTES)) / ALIGNED_BYTES * ALIGNED_BYTES;
        CPA_TRY(time_exchanges(p, partner, partner, &own, err));
        CPA_TRY(cpa_control_all_gather(p->control, &own, sizeof own, all, err));
        const double longest = note_round(p, round, all, links);
        slowest = fmin(slowest, (double)p->bytes / longest);
        spent += (1 + EXCHANGES) * longest;
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
