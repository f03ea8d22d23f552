/* pass-Q: queries go to the ranks that hold keys of their sequence, and partial states come back.
 *
 * A message of queries holds rows [q_heads * k_dim] in the order of the chunks. A message of states holds a row for
 * each of them: O [q_heads * v_dim], then LSE [q_heads], fp32, padded to four floats; attend writes such rows in place.
 *
 * In decode, where the transport has peer-mapped buffers, attend stores the states of a peer's rows in the memory of
 * that peer, whose merge reads them there, and in graphs waits for them itself. The peer's queries are the credit to
 * store there: it sends them when it has merged the layer before. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "comm/rounds.h"
#include "kernels/graph.h"
#include "src/context/pass_q.h"

enum { NOT_PACKED = -1 };

/* ---- life ---- */

cpa_status cpa_pass_q_create(cpa_pass_q *q, cpa_context_ops *ops, const cpa_planned_step *step) {
    const size_t size = (size_t)ops->map.cp_size;
    q->ops = ops;
    q->step = step;
    q->peers = calloc(size, sizeof *q->peers);
    q->merged_states = calloc(size, sizeof *q->merged_states);
    q->merged_maps = calloc(size, sizeof(const int32_t *));
    if (!q->peers || !q->merged_states || !q->merged_maps)
        return cpa_fail(&ops->error, CPA_NO_MEMORY, "context: no memory for %zu ranks", size);
    return ops->device->operators->plan_create(ops->device, &q->plan, &ops->error);
}

void cpa_pass_q_destroy(cpa_pass_q *q) {
    if (!q->ops) return;
    cpa_step_maps_free(&q->maps, q->ops);
    cpa_context_free(q->ops, &q->packed_memory);
    cpa_context_free(q->ops, &q->received_memory);
    cpa_context_free(q->ops, &q->remote_states_memory);
    cpa_context_free(q->ops, &q->returned_memory);
    if (q->plan) q->ops->device->operators->plan_destroy(q->plan);
    free(q->state_shifts);
    free(q->merged_maps);
    free(q->merged_states);
    free(q->peers);
}

/* ---- rows ---- */

static int64_t query_bytes(const cpa_pass_q *q) {
    return cpa_shape_q_bytes(&q->ops->options.shape);
}

/* Floats of a row of a message of states. */
static int64_t state_floats(const cpa_pass_q *q) {
    int64_t floats = (int64_t)q->ops->options.shape.q_heads * (q->ops->options.shape.v_dim + 1);
    return (floats + 3) / 4 * 4;
}

static cpa_partial state_rows(const cpa_pass_q *q, void *memory, int64_t row) {
    int64_t stride = state_floats(q);
    float *o = (float *)memory + row * stride;
    const cpa_context_options *options = &q->ops->options;
    return (cpa_partial){.o = o,
                         .o_row_stride = stride,
                         .lse = o + (int64_t)options->shape.q_heads * options->shape.v_dim,
                         .lse_row_stride = stride};
}

/* The states that are attended for a peer. */
static cpa_partial remote_states(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    return q->direct ? state_rows(q, peer->their_buffer, 0)
                     : state_rows(q, q->remote_states_memory.memory, peer->received_at);
}

/* The own states that a peer attends. */
static cpa_partial returned_states(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    return q->direct ? state_rows(q, peer->own_buffer, 0) : state_rows(q, q->returned_memory.memory, peer->returned_at);
}

/* How many rows of a chunk `asker` sends to `keeper`: all of its own if the keeper has a key. */
static int64_t rows_sent(const cpa_pass_q *q, const cpa_planned_chunk *chunk, int32_t asker, int32_t keeper) {
    if (chunk->algorithm != CPA_PASS_Q || cpa_planned_share(q->step, chunk, keeper).keys == 0) return 0;
    return cpa_planned_share(q->step, chunk, asker).rows;
}

/* A padded step: every rank sends all its rows to every other, whether they hold keys or not. */
static void plan_padded_peers(cpa_pass_q *q) {
    const int64_t rows = q->step->padded_rows;
    q->active = 1;
    q->packed_rows = 0;
    q->received_rows = q->returned_rows = rows * (q->ops->map.cp_size - 1);
    for (int32_t round = 1; round < q->ops->map.cp_size; round++) {
        q->peers[round - 1] = (cpa_pass_q_peer){
            .rank = cpa_round_recv_peer(q->ops->map.cp_size, q->ops->rank, round),
            .sent = rows,
            .packed_at = NOT_PACKED,
            .returned_at = rows * (round - 1),
            .received = rows,
            .received_at = rows * (round - 1),
        };
    }
}

/* Counts the rows of each peer and places them in the buffers. A peer that gets every row is sent the caller's queries
 * as they lie; peers that get every pass-Q row share one packed copy. */
static void plan_peers(cpa_pass_q *q) {
    int64_t all = 0, all_at = -1;
    q->active = 0;
    for (int64_t i = 0; i < q->step->n_chunks; i++) {
        if (q->step->chunks[i].algorithm != CPA_PASS_Q) continue;
        q->active = 1;
        all += cpa_planned_share(q->step, &q->step->chunks[i], q->ops->rank).rows;
    }
    q->packed_rows = q->received_rows = q->returned_rows = 0;
    for (int32_t round = 1; round < q->ops->map.cp_size; round++) {
        cpa_pass_q_peer *peer = &q->peers[round - 1];
        *peer = (cpa_pass_q_peer){.rank = cpa_round_recv_peer(q->ops->map.cp_size, q->ops->rank, round)};
        for (int64_t i = 0; i < q->step->n_chunks; i++) {
            peer->sent += rows_sent(q, &q->step->chunks[i], q->ops->rank, peer->rank);
            peer->received += rows_sent(q, &q->step->chunks[i], peer->rank, q->ops->rank);
        }
        peer->returned_at = q->returned_rows;
        peer->received_at = q->received_rows;
        q->returned_rows += peer->sent;
        q->received_rows += peer->received;
        if (peer->sent == q->step->rows) {
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

/* Whether states go direct, the same on all ranks: no message of the step may be longer than a peer-mapped buffer. */
static void choose_direct(cpa_pass_q *q) {
    const cpa_transport_table *table = q->ops->transport->table;
    int64_t most_rows = q->step->padded_rows, buffer_bytes = 0;
    q->direct = 0;
    if (!q->attends_own || !table->peer_buffer) return;
    for (int32_t rank = 0; rank < q->ops->map.cp_size && !q->step->padded_rows; rank++) {
        int64_t rows = 0;
        for (int64_t i = 0; i < q->step->n_chunks; i++)
            rows += cpa_planned_share(q->step, &q->step->chunks[i], rank).rows;
        if (rows > most_rows) most_rows = rows;
    }
    for (int32_t i = 0; i < q->ops->map.cp_size - 1; i++) {
        cpa_pass_q_peer *peer = &q->peers[i];
        table->peer_buffer(q->ops->transport, peer->rank, &peer->their_buffer, &peer->own_buffer, &buffer_bytes);
    }
    q->direct = most_rows * state_floats(q) * (int64_t)sizeof(float) <= buffer_bytes;
}

/* Fills the own rows that are packed for a peer (NULL: none are), and the row map of the state that comes back from it.
 */
static void map_peer(const cpa_pass_q *q, const cpa_pass_q_peer *peer, int32_t *packed, int32_t *returned) {
    int32_t at = 0;
    for (int64_t i = 0; i < q->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &q->step->chunks[i];
        int64_t own = cpa_planned_share(q->step, chunk, q->ops->rank).rows;
        int64_t sent = rows_sent(q, chunk, q->ops->rank, peer->rank);
        for (int64_t row = 0; row < own; row++) {
            returned[chunk->row + row] = sent ? at : -1;
            if (sent && packed) packed[at] = (int32_t)(chunk->row + row);
            at += sent != 0;
        }
    }
}

/* The row map of a padded step. */
static void map_padded_peer(const cpa_pass_q *q, const cpa_pass_q_peer *peer, int32_t *returned) {
    for (int64_t row = 0; row < q->step->rows; row++) returned[row] = -1;
    for (int64_t i = 0; i < q->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &q->step->chunks[i];
        if (cpa_planned_share(q->step, chunk, peer->rank).keys == 0) continue;
        int64_t end = chunk->row + cpa_planned_share(q->step, chunk, q->ops->rank).rows;
        for (int64_t row = chunk->row; row < end; row++) returned[row] = (int32_t)row;
    }
}

/* The row maps, and the states that the last merge of a layer joins. */
static cpa_status plan_maps(cpa_pass_q *q) {
    int64_t peers = q->ops->map.cp_size - 1, entries = q->packed_rows + peers * q->step->rows;
    CPA_TRY(cpa_step_maps_renew(&q->maps, q->ops, entries));
    const int32_t *device_maps = q->maps.device.memory;
    for (int64_t i = 0; i < peers; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        if (peer->sent == 0) continue;
        int64_t returned = q->packed_rows + i * q->step->rows;
        if (q->step->padded_rows) {
            map_padded_peer(q, peer, q->maps.host + returned);
        } else {
            map_peer(q, peer, peer->packed_at == NOT_PACKED ? NULL : q->maps.host + peer->packed_at,
                     q->maps.host + returned);
        }
        q->merged_states[q->n_merged] = returned_states(q, peer);
        q->merged_maps[q->n_merged++] = device_maps + returned;
    }
    return CPA_OK;
}

/* How much further on the states of a peer's rows lie than their rows in remote_states_memory; 0 unless they go direct.
 */
static int64_t state_shift(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    const cpa_partial there = remote_states(q, peer),
                      here = state_rows(q, q->remote_states_memory.memory, peer->received_at);
    return ((intptr_t)there.o - (intptr_t)here.o) / (intptr_t)sizeof(float);
}

static cpa_status ensure_shifts(cpa_pass_q *q) {
    const int64_t n = q->step->n_chunks * q->ops->map.cp_size;
    CPA_TRY(cpa_context_ensure_array(q->ops, &q->state_shifts, &q->shifts_capacity, n, sizeof *q->state_shifts));
    memset(q->state_shifts, 0, (size_t)n * sizeof *q->state_shifts); /* own rows stay here */
    return CPA_OK;
}

/* Whether queries go or come. If none do, all that is attended are own rows, from where they lie. */
static int exchanges_queries(const cpa_pass_q *q) {
    int64_t rows = 0;
    for (int32_t p = 0; p < q->ops->map.cp_size - 1; p++) rows += q->peers[p].sent + q->peers[p].received;
    return rows > 0;
}

/* The rows of the peers over the own shard, and the own rows if they are attended with them. */
static cpa_status plan_remote(cpa_pass_q *q) {
    int64_t n = 0;
    CPA_TRY(ensure_shifts(q));
    for (int32_t p = 0; p < q->ops->map.cp_size - 1; p++) {
        const cpa_pass_q_peer *peer = &q->peers[p];
        const int64_t shift = state_shift(q, peer);
        int64_t row = peer->received_at;
        for (int64_t i = 0; i < q->step->n_chunks; i++) {
            const cpa_planned_chunk *chunk = &q->step->chunks[i];
            int64_t rows = rows_sent(q, chunk, peer->rank, q->ops->rank);
            if (rows == 0) {
                if (q->step->padded_rows)
                    row += cpa_planned_share(q->step, chunk, peer->rank).rows; /* sent all the same */
                continue;
            }
            cpa_chunk_share own = cpa_planned_share(q->step, chunk, q->ops->rank);
            cpa_chunk_share theirs = cpa_planned_share(q->step, chunk, peer->rank);
            q->state_shifts[n] = shift;
            q->ops->items[n++] = (cpa_attend_item){
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
        .padded_items = q->step->padded_rows * (q->ops->map.cp_size - 1),
        .state_shifts = q->state_shifts,
        .ready_row = q->received_rows,
    };
    if (q->attends_own) {
        const int64_t served = n;
        n = cpa_planned_own_items(q->step, q->ops->items, n, q->received_rows);
        fusion.padded_items += q->step->padded_rows;
        if (exchanges_queries(q)) {
            fusion.ready_items = n - served;
            fusion.ready_rows = q->step->rows;
        }
    }
    return cpa_context_set_plan(q->ops, q->plan, n, q->step->block_tables, q->step->n_table_entries, fusion);
}

/* In decode: two attends of few rows take longer than one, by more than what the first hides of the exchange. */
int cpa_pass_q_takes_own(const cpa_planned_step *step) {
    if (!step->exchanges) return 0;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        if (step->chunks[i].end - step->chunks[i].start > 1 || step->chunks[i].algorithm == CPA_PASS_KV) return 0;
    }
    return 1;
}

/* Room for the rows that are packed, for those that are attended here, and for the states of both ways. */
static cpa_status ensure_rows(cpa_pass_q *q) {
    const int64_t state_bytes = state_floats(q) * (int64_t)sizeof(float);
    const int64_t attended = q->received_rows + (q->attends_own ? q->step->rows : 0);
    CPA_TRY(cpa_context_ensure(q->ops, &q->packed_memory, q->packed_rows * query_bytes(q)));
    CPA_TRY(cpa_context_ensure(q->ops, &q->received_memory, attended * query_bytes(q)));
    CPA_TRY(cpa_context_ensure(q->ops, &q->remote_states_memory, attended * state_bytes));
    return q->direct ? CPA_OK : cpa_context_ensure(q->ops, &q->returned_memory, q->returned_rows * state_bytes);
}

cpa_status cpa_pass_q_plan(cpa_pass_q *q) {
    q->n_merged = 1;
    q->active = 0;
    q->attends_own = cpa_pass_q_takes_own(q->step);
    if (!q->step->exchanges) return CPA_OK;
    (q->step->padded_rows ? plan_padded_peers : plan_peers)(q);
    if (!q->active) return CPA_OK;
    choose_direct(q);
    CPA_TRY(ensure_rows(q));
    CPA_TRY(plan_maps(q));
    return plan_remote(q);
}

/* Row s of every rank belongs to sequence s. The row maps are those that updates write, of a rank each. */
cpa_status cpa_pass_q_reserve(cpa_pass_q *q, cpa_attend_reservation reservation) {
    const int64_t rows = q->step->padded_rows;
    const int32_t size = q->ops->map.cp_size;
    const int64_t map_bytes = size * rows * (int64_t)sizeof *q->maps.host;
    cpa_attend_place places[CPA_MERGE_MAX_STATES] = {{0, 0}};
    plan_padded_peers(q);
    q->attends_own = 1;
    choose_direct(q);
    CPA_TRY(cpa_context_ensure(q->ops, &q->maps.device, map_bytes));
    CPA_TRY(ensure_rows(q));
    int32_t *maps = q->maps.device.memory;
    places[q->ops->rank].first_row = q->received_rows;
    q->merged_maps[0] = maps + q->ops->rank * rows;
    q->n_merged = size;
    for (int32_t i = 0; i < size - 1; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        places[peer->rank] = (cpa_attend_place){peer->received_at, state_shift(q, peer)};
        q->merged_states[1 + i] = returned_states(q, peer);
        q->merged_maps[1 + i] = maps + peer->rank * rows;
    }
    reservation.places = places;
    reservation.row_maps = maps;
    reservation.ready_row = q->received_rows;
    reservation.ready_rows = rows;
    return q->ops->device->operators->plan_reserve(q->plan, &reservation, &q->ops->error);
}

cpa_status cpa_pass_q_upload(cpa_pass_q *q, cpa_stream *stream) {
    if (!q->active) return CPA_OK;
    CPA_TRY(cpa_context_check(q->ops, q->ops->device->operators->plan_upload(q->plan, stream), stream));
    return cpa_step_maps_upload(&q->maps, q->ops, stream);
}

uint64_t cpa_pass_q_shape(const cpa_pass_q *q) {
    if (!q->active) return 0;
    uint64_t shape[] = {(uintptr_t)q->maps.device.memory,     (uintptr_t)q->packed_memory.memory,
                        (uintptr_t)q->received_memory.memory, (uintptr_t)q->remote_states_memory.memory,
                        (uintptr_t)q->returned_memory.memory, q->ops->device->graphs->plan_shape(q->plan)};
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}

/* ---- one layer ---- */

cpa_partial cpa_pass_q_own_state(const cpa_pass_q *q) {
    return state_rows(q, q->remote_states_memory.memory, q->received_rows);
}

cpa_status cpa_pass_q_start(cpa_pass_q *q, const cpa_context_args *args, cpa_stream *stream) {
    if (!q->active) return CPA_OK;
    const int64_t bytes = query_bytes(q);
    CPA_TRY(cpa_step_maps_upload(&q->maps, q->ops, stream));
    if (q->packed_rows > 0) {
        int64_t span = cpa_spans_begin(&q->ops->spans, CPA_SPAN_QUERIES, 0, stream);
        cpa_status status = q->ops->device->operators->gather_rows(
            q->packed_memory.memory, args->q, q->maps.device.memory, q->packed_rows, bytes, stream);
        cpa_spans_end(&q->ops->spans, span, stream);
        CPA_TRY(cpa_context_check(q->ops, status, stream));
    }
    const char *packed = q->packed_memory.memory;
    char *got = q->received_memory.memory;
    for (int32_t i = 0; i < q->ops->map.cp_size - 1; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        q->ops->messages[i] = (cpa_message){
            .peer = peer->rank,
            .send = peer->packed_at == NOT_PACKED ? args->q : packed + peer->packed_at * bytes,
            .send_bytes = peer->sent * bytes,
            .recv = got + peer->received_at * bytes,
            .recv_bytes = peer->received * bytes,
        };
    }
    return cpa_context_start(q->ops, q->ops->map.cp_size - 1, CPA_SPAN_EXCHANGE_QUERIES, 0, stream, &q->queries);
}

static cpa_status send_states(cpa_pass_q *q, cpa_stream *stream) {
    const int64_t bytes = state_floats(q) * (int64_t)sizeof(float);
    for (int32_t i = 0; i < q->ops->map.cp_size - 1; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        q->ops->messages[i] = (cpa_message){
            .peer = peer->rank,
            .send = remote_states(q, peer).o,
            .send_bytes = peer->received * bytes,
            .recv = returned_states(q, peer).o,
            .recv_bytes = peer->sent * bytes,
        };
    }
    /* Telling of stored states is in no span but the exchange's, as pushing is. */
    return cpa_context_start(q->ops, q->ops->map.cp_size - 1, CPA_SPAN_EXCHANGE_STATES, 0, stream, &q->states);
}

cpa_status cpa_pass_q_attend_remote(cpa_pass_q *q, const cpa_context_args *args, cpa_stream *stream) {
    if (!q->active) return CPA_OK;
    CPA_TRY(cpa_context_finish(q->ops, stream, &q->queries));
    cpa_attend_args attend = {
        .size = sizeof attend,
        .q = q->attends_own && !exchanges_queries(q) ? args->q : q->received_memory.memory,
        .q_dtype = q->ops->options.shape.dtype,
        .q_row_stride = (int64_t)q->ops->options.shape.q_heads * q->ops->options.shape.k_dim,
        .kv = args->kv,
        .mask = args->mask,
        .scale = args->scale,
        .state = state_rows(q, q->remote_states_memory.memory, 0),
    };
    CPA_TRY(cpa_context_run_attend(q->ops, q->plan, &attend, args->q, CPA_SPAN_ATTEND_RECEIVED, 0, stream));
    return send_states(q, stream);
}

/* Whether the last merge waits for the states by itself, which it does in graphs. */
static int leave_to_merge(cpa_pass_q *q) {
    if (!q->direct) return 0;
    if (!q->ops->transport->table->defer_wait(q->ops->transport, q->states.handle, &q->awaited)) return 0;
    q->states.handle = NULL;
    return 1;
}

cpa_status cpa_pass_q_finish(cpa_pass_q *q, int64_t rows, cpa_stream *stream) {
    q->awaited.n_parts = 0;
    if (!q->active) return CPA_OK;
    if (rows > 0 && leave_to_merge(q)) return CPA_OK;
    return cpa_context_finish(q->ops, stream, &q->states);
}

cpa_status cpa_pass_q_merge(cpa_pass_q *q, cpa_partial own, cpa_merge_args *merge, cpa_stream *stream) {
    q->merged_states[0] = own;
    merge->states = q->merged_states;
    merge->row_maps = q->merged_maps;
    merge->n_states = q->n_merged;
    return cpa_context_run_merge(q->ops, merge, &q->awaited, stream);
}
