/* pass-Q: queries go to the ranks that hold keys of their sequence, and partial states come home.
 *
 * A message of queries holds rows [q_heads * k_dim] in the order of the chunks. A message of states holds a row for
 * each of them: O [q_heads * v_dim], then LSE [q_heads], fp32, padded to four floats; attend writes such rows in place.
 *
 * In decode, where the transport has rooms, attend stores the states of a peer's rows in the memory of that peer, whose
 * merge reads them there, and in graphs waits for them itself. The peer's queries stand for its leave: it sends them
 * when it has merged the layer before. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/fault.h"
#include "comm/rounds.h"
#include "src/context/context_internal.h"

enum { NOT_PACKED = -1 };

/* ---- life ---- */

cpa_status cpa_pass_q_create(cpa_context *c) {
    if (c->map.cp_size == 1) return CPA_OK;
    c->q.peers = calloc((size_t)c->map.cp_size - 1, sizeof *c->q.peers);
    if (!c->q.peers) return cpa_fail(&c->error, CPA_NO_MEMORY, "context: no memory for %d peers", c->map.cp_size - 1);
    return c->device->operators->plan_create(c->device, &c->q.plan, &c->error);
}

void cpa_pass_q_destroy(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    if (c->device) {
        c->device->table->free(c->device, q->maps_memory.memory);
        c->device->table->free(c->device, q->packed_memory.memory);
        c->device->table->free(c->device, q->got_memory.memory);
        c->device->table->free(c->device, q->away_memory.memory);
        c->device->table->free(c->device, q->home_memory.memory);
        if (q->plan) c->device->operators->plan_destroy(q->plan);
        c->device->table->free_host(c->device, q->map_sets[0]);
        c->device->table->free_host(c->device, q->map_sets[1]);
    }
    free(q->state_shifts);
    free(q->peers);
}

/* ---- rows ---- */

static int64_t query_bytes(const cpa_context *c) {
    return cpa_shape_q_bytes(&c->options.shape);
}

/* Floats of a row of a message of states. */
static int64_t state_floats(const cpa_context *c) {
    int64_t floats = (int64_t)c->options.shape.q_heads * (c->options.shape.v_dim + 1);
    return (floats + 3) / 4 * 4;
}

static cpa_partial state_rows(const cpa_context *c, void *memory, int64_t row) {
    int64_t stride = state_floats(c);
    float *o = (float *)memory + row * stride;
    return (cpa_partial){.o = o,
                         .o_row_stride = stride,
                         .lse = o + (int64_t)c->options.shape.q_heads * c->options.shape.v_dim,
                         .lse_row_stride = stride};
}

/* The states that are attended for a peer. */
static cpa_partial served_states(const cpa_context *c, const cpa_pass_q_peer *peer) {
    return c->q.direct ? state_rows(c, peer->their_room, 0) : state_rows(c, c->q.away_memory.memory, peer->got_at);
}

/* The own states that a peer attends. */
static cpa_partial home_states(const cpa_context *c, const cpa_pass_q_peer *peer) {
    return c->q.direct ? state_rows(c, peer->own_room, 0) : state_rows(c, c->q.home_memory.memory, peer->home_at);
}

/* How many rows of a chunk `asker` sends to `keeper`: all of its own if the keeper has a key. */
static int64_t rows_sent(const cpa_context *c, const cpa_planned_chunk *chunk, int32_t asker, int32_t keeper) {
    if (chunk->algorithm != CPA_PASS_Q || cpa_context_share(c, chunk, keeper).keys == 0) return 0;
    return cpa_context_share(c, chunk, asker).rows;
}

/* A steady step: every rank sends all its rows to every other, whether they hold keys or not. */
static void plan_steady_peers(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    const int64_t rows = c->steady_rows;
    q->active = 1;
    q->packed_rows = 0;
    q->got_rows = q->home_rows = rows * (c->map.cp_size - 1);
    for (int32_t round = 1; round < c->map.cp_size; round++) {
        q->peers[round - 1] = (cpa_pass_q_peer){
            .rank = cpa_round_recv_peer(c->map.cp_size, c->control.rank, round),
            .sent = rows,
            .packed_at = NOT_PACKED,
            .home_at = rows * (round - 1),
            .got = rows,
            .got_at = rows * (round - 1),
        };
    }
}

/* Counts the rows of each peer and places them in the buffers. A peer that gets every row is sent the caller's queries
 * as they lie; peers that get every pass-Q row share one packed copy. */
static void plan_peers(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    int64_t all = 0, all_at = -1;
    q->active = 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        if (c->chunks[i].algorithm != CPA_PASS_Q) continue;
        q->active = 1;
        all += cpa_context_share(c, &c->chunks[i], c->control.rank).rows;
    }
    q->packed_rows = q->got_rows = q->home_rows = 0;
    for (int32_t round = 1; round < c->map.cp_size; round++) {
        cpa_pass_q_peer *peer = &q->peers[round - 1];
        *peer = (cpa_pass_q_peer){.rank = cpa_round_recv_peer(c->map.cp_size, c->control.rank, round)};
        for (int64_t i = 0; i < c->n_chunks; i++) {
            peer->sent += rows_sent(c, &c->chunks[i], c->control.rank, peer->rank);
            peer->got += rows_sent(c, &c->chunks[i], peer->rank, c->control.rank);
        }
        peer->home_at = q->home_rows;
        peer->got_at = q->got_rows;
        q->home_rows += peer->sent;
        q->got_rows += peer->got;
        if (peer->sent == c->rows) {
            peer->packed_at = NOT_PACKED;
            continue;
        }
        if (peer->sent == all && all_at >= 0) {
            peer->packed_at = all_at;
            continue;
        }
        peer->packed_at = q->packed_rows;
        if (peer->sent == all) all_at = q->packed_rows;
        q->packed_rows += peer->sent;
    }
}

/* Whether states go direct, the same on all ranks: no message of the step may be longer than a room. */
static void choose_direct(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    const cpa_transport_table *table = c->transport->table;
    int64_t most_rows = c->steady_rows, room = 0;
    q->direct = 0;
    if (!q->joined || !table->room) return;
    for (int32_t rank = 0; rank < c->map.cp_size && !c->steady_rows; rank++) {
        int64_t rows = 0;
        for (int64_t i = 0; i < c->n_chunks; i++) rows += cpa_context_share(c, &c->chunks[i], rank).rows;
        if (rows > most_rows) most_rows = rows;
    }
    for (int32_t i = 0; i < c->map.cp_size - 1; i++) {
        cpa_pass_q_peer *peer = &q->peers[i];
        table->room(c->transport, peer->rank, &peer->their_room, &peer->own_room, &room);
    }
    q->direct = most_rows * state_floats(c) * (int64_t)sizeof(float) <= room;
}

/* Fills the own rows that are packed for a peer (NULL: none are), and the row map of the state that comes home from it.
 */
static void map_peer(const cpa_context *c, const cpa_pass_q_peer *peer, int32_t *packed, int32_t *home) {
    int32_t at = 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &c->chunks[i];
        int64_t own = cpa_context_share(c, chunk, c->control.rank).rows;
        int64_t sent = rows_sent(c, chunk, c->control.rank, peer->rank);
        for (int64_t row = 0; row < own; row++) {
            home[chunk->row + row] = sent ? at : -1;
            if (sent && packed) packed[at] = (int32_t)(chunk->row + row);
            at += sent != 0;
        }
    }
}

/* The row map of a steady step. */
static void map_steady_peer(const cpa_context *c, const cpa_pass_q_peer *peer, int32_t *home) {
    for (int64_t row = 0; row < c->rows; row++) home[row] = -1;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &c->chunks[i];
        if (cpa_context_share(c, chunk, peer->rank).keys == 0) continue;
        int64_t end = chunk->row + cpa_context_share(c, chunk, c->control.rank).rows;
        for (int64_t row = chunk->row; row < end; row++) home[row] = (int32_t)row;
    }
}

/* Room for the row maps; what was there is lost. */
static cpa_status ensure_maps(cpa_context *c, int64_t entries) {
    cpa_pass_q *q = &c->q;
    const int turn = q->maps_turn ^= 1;
    if (entries > q->map_capacities[turn]) {
        int64_t grown = entries < 2 * q->map_capacities[turn] ? 2 * q->map_capacities[turn] : entries;
        void *maps;
        CPA_TRY(c->device->table->alloc_host(c->device, grown * (int64_t)sizeof *q->maps, &maps, &c->error));
        c->device->table->free_host(c->device, q->map_sets[turn]);
        q->map_sets[turn] = maps;
        q->map_capacities[turn] = grown;
    }
    q->maps = q->map_sets[turn];
    q->maps_entries = entries;
    q->maps_uploaded = NULL;
    return cpa_context_ensure(c, &q->maps_memory, entries * (int64_t)sizeof *q->maps);
}

/* The row maps, and the states that the last merge of a layer joins. */
static cpa_status plan_maps(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    int64_t peers = c->map.cp_size - 1, entries = q->packed_rows + peers * c->rows;
    CPA_TRY(ensure_maps(c, entries));
    const int32_t *device_maps = q->maps_memory.memory;
    for (int64_t i = 0; i < peers; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        if (peer->sent == 0) continue;
        int64_t home = q->packed_rows + i * c->rows;
        if (c->steady_rows) {
            map_steady_peer(c, peer, q->maps + home);
        } else {
            map_peer(c, peer, peer->packed_at == NOT_PACKED ? NULL : q->maps + peer->packed_at, q->maps + home);
        }
        c->states[c->n_states] = home_states(c, peer);
        c->row_maps[c->n_states++] = device_maps + home;
    }
    return CPA_OK;
}

cpa_status cpa_pass_q_upload(cpa_context *c, cpa_stream *stream) {
    cpa_pass_q *q = &c->q;
    if (q->maps_uploaded == stream) return CPA_OK;
    cpa_status status =
        c->device->table->copy(q->maps_memory.memory, q->maps, q->maps_entries * (int64_t)sizeof *q->maps, stream);
    q->maps_uploaded = stream;
    return cpa_context_check(c, status, stream);
}

/* How much further on the states of a peer's rows lie than their rows in away_memory; 0 unless they go direct. */
static int64_t state_shift(const cpa_context *c, const cpa_pass_q_peer *peer) {
    const cpa_partial there = served_states(c, peer), here = state_rows(c, c->q.away_memory.memory, peer->got_at);
    return ((intptr_t)there.o - (intptr_t)here.o) / (intptr_t)sizeof(float);
}

static cpa_status ensure_shifts(cpa_context *c) {
    const int64_t n = c->n_chunks * c->map.cp_size;
    int64_t *shifts = cpa_context_grow(c, c->q.state_shifts, &c->q.shifts_capacity, n, sizeof *shifts);
    if (!shifts) return CPA_NO_MEMORY;
    memset(shifts, 0, (size_t)n * sizeof *shifts); /* own rows stay here */
    c->q.state_shifts = shifts;
    return CPA_OK;
}

/* Whether queries go or come. If none do, all that is attended are own rows, from where they lie. */
static int exchanges_queries(const cpa_context *c) {
    int64_t rows = 0;
    for (int32_t p = 0; p < c->map.cp_size - 1; p++) rows += c->q.peers[p].sent + c->q.peers[p].got;
    return rows > 0;
}

/* The rows of the peers over the own shard, and the own rows if they join them. */
static cpa_status plan_served(cpa_context *c) {
    int64_t n = 0;
    CPA_TRY(ensure_shifts(c));
    for (int32_t p = 0; p < c->map.cp_size - 1; p++) {
        const cpa_pass_q_peer *peer = &c->q.peers[p];
        const int64_t shift = state_shift(c, peer);
        int64_t row = peer->got_at;
        for (int64_t i = 0; i < c->n_chunks; i++) {
            const cpa_planned_chunk *chunk = &c->chunks[i];
            int64_t rows = rows_sent(c, chunk, peer->rank, c->control.rank);
            if (rows == 0) {
                if (c->steady_rows) row += cpa_context_share(c, chunk, peer->rank).rows; /* sent all the same */
                continue;
            }
            cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
            cpa_chunk_share theirs = cpa_context_share(c, chunk, peer->rank);
            c->q.state_shifts[n] = shift;
            c->items[n++] = (cpa_attend_item){
                .q_row = row,
                .q_count = rows,
                .q_first = theirs.first,
                .k_first = 0,
                .k_count = own.keys,
                .table = chunk->table,
                .q_set = theirs.tokens,
                .k_set = own.tokens,
            };
            row += rows;
        }
    }
    cpa_attend_fusion fusion = {
        .steady_items = c->steady_rows * (c->map.cp_size - 1),
        .state_shifts = c->q.state_shifts,
        .ready_row = c->q.got_rows,
    };
    if (c->q.joined) {
        const int64_t served = n;
        n = cpa_context_own_items(c, n, c->q.got_rows);
        fusion.steady_items += c->steady_rows;
        if (exchanges_queries(c)) {
            fusion.ready_items = n - served;
            fusion.ready_rows = c->rows;
        }
    }
    return cpa_context_set_plan(c, c->q.plan, n, c->block_tables, c->n_table_entries, fusion);
}

cpa_status cpa_pass_q_plan(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    c->row_maps[0] = NULL;
    c->n_states = 1;
    q->active = 0;
    if (!c->shared) return CPA_OK;
    (c->steady_rows ? plan_steady_peers : plan_peers)(c);
    if (!q->active) return CPA_OK;
    choose_direct(c);
    int64_t state_bytes = state_floats(c) * (int64_t)sizeof(float);
    const int64_t served = q->got_rows + (q->joined ? c->rows : 0);
    CPA_TRY(cpa_context_ensure(c, &q->packed_memory, q->packed_rows * query_bytes(c)));
    CPA_TRY(cpa_context_ensure(c, &q->got_memory, served * query_bytes(c)));
    CPA_TRY(cpa_context_ensure(c, &q->away_memory, served * state_bytes));
    if (!q->direct) CPA_TRY(cpa_context_ensure(c, &q->home_memory, q->home_rows * state_bytes));
    if (q->joined) c->states[0] = state_rows(c, q->away_memory.memory, q->got_rows);
    CPA_TRY(plan_maps(c));
    return plan_served(c);
}

/* ---- one layer ---- */

cpa_status cpa_pass_q_start(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_pass_q *q = &c->q;
    if (!q->active) return CPA_OK;
    const int64_t bytes = query_bytes(c);
    CPA_TRY(cpa_pass_q_upload(c, stream));
    if (q->packed_rows > 0) {
        int64_t span = cpa_spans_begin(&c->spans, CPA_SPAN_QUERIES, 0, stream);
        cpa_status status = c->device->operators->gather_rows(q->packed_memory.memory, args->q, q->maps_memory.memory,
                                                              q->packed_rows, bytes, stream);
        cpa_spans_end(&c->spans, span, stream);
        CPA_TRY(cpa_context_check(c, status, stream));
    }
    const char *packed = q->packed_memory.memory;
    char *got = q->got_memory.memory;
    for (int32_t i = 0; i < c->map.cp_size - 1; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        c->messages[i] = (cpa_message){
            .peer = peer->rank,
            .send = peer->packed_at == NOT_PACKED ? args->q : packed + peer->packed_at * bytes,
            .send_bytes = peer->sent * bytes,
            .recv = got + peer->got_at * bytes,
            .recv_bytes = peer->got * bytes,
        };
    }
    return cpa_context_start(c, c->map.cp_size - 1, CPA_SPAN_EXCHANGE_QUERIES, 0, stream, &q->queries);
}

static cpa_status send_states(cpa_context *c, cpa_stream *stream) {
    cpa_pass_q *q = &c->q;
    const int64_t bytes = state_floats(c) * (int64_t)sizeof(float);
    for (int32_t i = 0; i < c->map.cp_size - 1; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        c->messages[i] = (cpa_message){
            .peer = peer->rank,
            .send = served_states(c, peer).o,
            .send_bytes = peer->got * bytes,
            .recv = home_states(c, peer).o,
            .recv_bytes = peer->sent * bytes,
        };
    }
    /* Telling of stored states is in no span but the exchange's, as pushing is. */
    return cpa_context_start(c, c->map.cp_size - 1, CPA_SPAN_EXCHANGE_STATES, 0, stream, &q->states);
}

cpa_status cpa_pass_q_serve(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_pass_q *q = &c->q;
    if (!q->active) return CPA_OK;
    CPA_TRY(cpa_context_finish(c, stream, &q->queries));
    cpa_attend_args attend = {
        .size = sizeof attend,
        .q = q->joined && !exchanges_queries(c) ? args->q : q->got_memory.memory,
        .q_dtype = c->options.shape.dtype,
        .q_row_stride = (int64_t)c->options.shape.q_heads * c->options.shape.k_dim,
        .kv = args->kv,
        .mask = args->mask,
        .scale = args->scale,
        .state = state_rows(c, q->away_memory.memory, 0),
    };
    CPA_TRY(cpa_context_run_attend(c, q->plan, &attend, args->q, CPA_SPAN_ATTEND_RECEIVED, 0, stream));
    return send_states(c, stream);
}

/* CPA_FAULT_BASE2_LSE: the states that come home have LSEs in base 2. CPA_FAULT_DROPPED_SHARD: the first is empty. */
static cpa_status spoil_states(cpa_context *c, cpa_stream *stream) {
    for (int32_t i = 0; i < c->map.cp_size - 1; i++) {
        const cpa_pass_q_peer *peer = &c->q.peers[i];
        if (peer->sent == 0) continue;
        CPA_TRY(cpa_context_spoil_lse(c, home_states(c, peer), peer->sent, stream));
        if (cpa_fault_is(CPA_FAULT_DROPPED_SHARD)) break;
    }
    return CPA_OK;
}

/* Whether the last merge waits for the states by itself. Where waiting is measured it does not. */
static int leave_to_merge(cpa_context *c) {
    cpa_pass_q *q = &c->q;
    if (!q->direct || !c->spans.muted) return 0;
    if (!c->transport->table->hand_over(c->transport, q->states.handle, &q->awaited)) return 0;
    q->states.handle = NULL;
    return 1;
}

cpa_status cpa_pass_q_finish(cpa_context *c, int64_t rows, cpa_stream *stream) {
    cpa_pass_q *q = &c->q;
    q->awaited.n_parts = 0;
    if (!q->active) return CPA_OK;
    const int spoils = cpa_fault_is(CPA_FAULT_BASE2_LSE) || cpa_fault_is(CPA_FAULT_DROPPED_SHARD);
    if (rows > 0 && !spoils && leave_to_merge(c)) return CPA_OK;
    CPA_TRY(cpa_context_finish(c, stream, &q->states));
    return spoils ? spoil_states(c, stream) : CPA_OK;
}
