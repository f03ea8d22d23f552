/* Planning pass-Q: which rows go where, what is attended for whom, and the row maps of the last merge. */
#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "comm/rounds.h"
#include "src/context/pass_q_plan.h"
#include "src/context/pass_q_rows.h"

/* The states of long chunks go back in parts, from so many rows a rank on. */
enum { PARTS_LEAST_ROWS = 256 };

/* How many parts, where those of several forms are in flight together, and a transfer of pass-KV. */
enum { PARTS_OF_FORMS = 2 };
_Static_assert(CPA_MOST_ROW_FORMS *PARTS_OF_FORMS + 1 <= CPA_TRANSPORT_MAX_IN_FLIGHT, "all may be in flight");

static int is_ours(const cpa_pass_q *q, const cpa_planned_chunk *chunk) {
    return chunk->algorithm == CPA_PASS_Q && chunk->form == q->form->index;
}

/* How many rows of a chunk `asker` sends to `keeper`: all of its own if the keeper has a key. */
static int64_t rows_sent(const cpa_pass_q *q, const cpa_planned_chunk *chunk, int32_t asker, int32_t keeper) {
    if (!is_ours(q, chunk) || cpa_planned_share(q->step, chunk, keeper).keys == 0) return 0;
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
            .packed_at = CPA_PASS_Q_NOT_PACKED,
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
        if (!is_ours(q, &q->step->chunks[i])) continue;
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
        if (peer->sent == cpa_pass_q_own_rows(q)) {
            peer->packed_at = CPA_PASS_Q_NOT_PACKED;
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

/* Whether states go direct, the same on all ranks: no message of the step may be longer than a peer-mapped buffer, and
 * attend writes what travels, at once rather than pass by pass. */
static void choose_direct(cpa_pass_q *q) {
    const cpa_transport_table *table = q->ops->transport->table;
    int64_t most_rows = q->step->padded_rows, buffer_bytes = 0;
    q->direct = 0;
    if (q->ops->ring || q->ops->precise.tokens > 0 || !cpa_step_joins_own(q->step) || q->form->has_matrix ||
        cpa_states_are_narrow(q->ops) || !table->peer_buffer)
        return;
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
    q->direct = most_rows * cpa_pass_q_state_floats(q) * (int64_t)sizeof(float) <= buffer_bytes;
}

/* Fills the own rows that are packed for a peer (NULL: none are), and the row map of the state that comes back from it.
 */
static void map_peer(const cpa_pass_q *q, const cpa_pass_q_peer *peer, int32_t *packed, int32_t *returned) {
    int32_t at = 0;
    for (int64_t i = 0; i < q->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &q->step->chunks[i];
        if (chunk->form != q->form->index) continue;
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
    for (int64_t row = 0; row < cpa_pass_q_own_rows(q); row++) returned[row] = -1;
    for (int64_t i = 0; i < q->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &q->step->chunks[i];
        if (cpa_planned_share(q->step, chunk, peer->rank).keys == 0) continue;
        int64_t end = chunk->row + cpa_planned_share(q->step, chunk, q->ops->rank).rows;
        for (int64_t row = chunk->row; row < end; row++) returned[row] = (int32_t)row;
    }
}

/* The row maps, and the states that the last merge of a layer joins. */
static cpa_status plan_maps(cpa_pass_q *q) {
    int64_t peers = q->ops->map.cp_size - 1, entries = q->packed_rows + peers * cpa_pass_q_own_rows(q);
    CPA_TRY(cpa_step_maps_renew(&q->maps, q->ops, entries));
    const int32_t *device_maps = q->maps.device.memory;
    for (int64_t i = 0; i < peers; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        if (peer->sent == 0) continue;
        int64_t returned = q->packed_rows + i * cpa_pass_q_own_rows(q);
        if (q->step->padded_rows) {
            map_padded_peer(q, peer, q->maps.host + returned);
        } else {
            map_peer(q, peer, peer->packed_at == CPA_PASS_Q_NOT_PACKED ? NULL : q->maps.host + peer->packed_at,
                     q->maps.host + returned);
        }
        q->merged_states[q->n_merged] = cpa_pass_q_returned_states(q, peer);
        q->merged_maps[q->n_merged++] = device_maps + returned;
    }
    return CPA_OK;
}

int64_t cpa_pass_q_attended_rows(const cpa_pass_q *q) {
    return q->active ? q->received_rows + (cpa_step_joins_own(q->step) ? cpa_pass_q_own_rows(q) : 0) : 0;
}

void cpa_pass_q_map_attended(const cpa_pass_q *q, int32_t *map) {
    const cpa_planned_step *step = q->step;
    for (int32_t p = 0; p < q->ops->map.cp_size - 1; p++) {
        const cpa_pass_q_peer *peer = &q->peers[p];
        int64_t row = peer->received_at, first = 0;
        for (int64_t i = 0; i < step->n_chunks; i++) {
            const cpa_planned_chunk *chunk = &step->chunks[i];
            const int64_t sent = rows_sent(q, chunk, peer->rank, q->ops->rank);
            if (sent > 0) cpa_planned_map_rows(step, chunk, peer->rank, first, map + row);
            row += step->padded_rows ? cpa_planned_share(step, chunk, peer->rank).rows : sent;
            first += chunk->end - chunk->start;
        }
    }
    if (cpa_step_joins_own(q->step)) cpa_planned_map_own(step, q->form->index, map + q->received_rows);
}

/* How much further on the states of a peer's rows lie than their rows in remote_states_memory; 0 unless they go direct.
 */
static int64_t state_shift(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    const cpa_partial there = cpa_pass_q_remote_states(q, peer),
                      here = cpa_pass_q_state_rows(q, q->remote_states_memory.memory, peer->received_at);
    return ((intptr_t)there.o - (intptr_t)here.o) / (intptr_t)sizeof(float);
}

static cpa_status ensure_shifts(cpa_pass_q *q) {
    const int64_t n = q->step->n_chunks * q->ops->map.cp_size;
    CPA_TRY(cpa_context_ensure_array(q->ops, &q->state_shifts, &q->shifts_capacity, n, sizeof *q->state_shifts));
    memset(q->state_shifts, 0, (size_t)n * sizeof *q->state_shifts); /* own rows stay here */
    return CPA_OK;
}

/* Items of the rows [begin, end) of what a peer sends, from item n on; returns where they end. */
static int64_t add_items(cpa_pass_q *q, const cpa_pass_q_peer *peer, int64_t begin, int64_t end, int64_t n) {
    const int64_t shift = state_shift(q, peer);
    for (int64_t i = 0, at = 0, next; i < q->step->n_chunks; i++, at = next) {
        const cpa_planned_chunk *chunk = &q->step->chunks[i];
        const cpa_chunk_share own = cpa_planned_share(q->step, chunk, q->ops->rank);
        const cpa_chunk_share theirs = cpa_planned_share(q->step, chunk, peer->rank);
        const int64_t rows = rows_sent(q, chunk, peer->rank, q->ops->rank);
        const int64_t first = cpa_max64(begin - at, 0), count = cpa_min64(end - at, rows) - first;
        next = at + (q->step->padded_rows ? theirs.rows : rows); /* in a padded step all are sent */
        if (count <= 0) continue;
        q->state_shifts[n] = shift;
        q->ops->items[n++] = (cpa_attend_item){
            .q_row = peer->received_at + at + first,
            .q_count = count,
            .q_first = theirs.first + first,
            .k_first = 0,
            .k_count = own.keys,
            .table = chunk->table,
            .q_set = theirs.tokens,
            .k_set = own.tokens,
        };
    }
    return n;
}

/* The rows of the peers over the own shard, and the own rows if they are attended with them. */
static cpa_status plan_remote(cpa_pass_q *q) {
    int64_t n = 0;
    CPA_TRY(ensure_shifts(q));
    for (int32_t p = 0; p < q->ops->map.cp_size - 1; p++) n = add_items(q, &q->peers[p], 0, q->peers[p].received, n);
    cpa_attend_fusion fusion = {
        .padded_items = q->step->padded_rows * (q->ops->map.cp_size - 1),
        .state_shifts = q->state_shifts,
        .ready_row = q->received_rows,
    };
    if (cpa_step_joins_own(q->step)) {
        const int64_t served = n;
        n = cpa_planned_own_items(q->step, q->form->index, q->ops->items, n, q->received_rows);
        fusion.padded_items += q->step->padded_rows;
        if (cpa_pass_q_exchanges_queries(q)) {
            fusion.ready_items = n - served;
            fusion.ready_rows = cpa_pass_q_own_rows(q);
        }
    }
    return cpa_table_plans_set(&q->plans, q->ops, q->form, q->step, n, fusion);
}

/* Into how many parts the rows of the peers fall, the same number on all ranks; 0: they stay together. */
static int32_t choose_parts(const cpa_pass_q *q) {
    int64_t tokens = 0;
    if (cpa_step_joins_own(q->step) || q->step->padded_rows) return 0;
    for (int64_t i = 0; i < q->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &q->step->chunks[i];
        if (is_ours(q, chunk)) tokens += chunk->end - chunk->start;
    }
    if (tokens < (int64_t)PARTS_LEAST_ROWS * q->ops->map.cp_size) return 0;
    const int32_t peers = q->ops->map.cp_size - 1;
    const int32_t most = q->ops->forms.count == 1 ? CPA_PASS_Q_PARTS : PARTS_OF_FORMS;
    return peers == 1 ? 2 : peers < most ? peers : most;
}

/* A part is the peers of some rounds, or of the only peer a piece of its rows. */
static cpa_status plan_part(cpa_pass_q *q, int32_t index) {
    const int32_t peers = q->ops->map.cp_size - 1;
    cpa_pass_q_part *part = &q->parts[index];
    part->cuts = peers == 1 ? q->n_parts : 1;
    part->cut = peers == 1 ? index : 0;
    part->first_round = peers == 1 ? 0 : peers * index / q->n_parts;
    part->end_round = peers == 1 ? 1 : peers * (index + 1) / q->n_parts;
    part->rows = 0;
    int64_t n = 0;
    for (int32_t p = part->first_round; p < part->end_round; p++) {
        const int64_t begin = cpa_pass_q_cut(q->peers[p].received, part->cut, part->cuts);
        const int64_t end = cpa_pass_q_cut(q->peers[p].received, part->cut + 1, part->cuts);
        n = add_items(q, &q->peers[p], begin, end, n);
        part->rows += end - begin;
    }
    return cpa_table_plans_set(&part->plans, q->ops, q->form, q->step, n, (cpa_attend_fusion){0});
}

static cpa_status plan_parts(cpa_pass_q *q) {
    CPA_TRY(ensure_shifts(q));
    for (int32_t i = 0; i < q->n_parts; i++) CPA_TRY(plan_part(q, i));
    return CPA_OK;
}

/* Room for the rows that are packed, for those that are attended here, and for the states of both ways. */
static cpa_status ensure_rows(cpa_pass_q *q) {
    const int64_t state_bytes = cpa_pass_q_state_floats(q) * (int64_t)sizeof(float);
    const int64_t attended = cpa_pass_q_attended_rows(q);
    CPA_TRY(cpa_context_ensure(q->ops, &q->packed_memory, q->packed_rows * cpa_pass_q_query_bytes(q)));
    CPA_TRY(cpa_context_ensure(q->ops, &q->received_memory, attended * cpa_pass_q_query_bytes(q)));
    CPA_TRY(cpa_context_ensure(q->ops, &q->remote_states_memory, attended * state_bytes));
    if (q->form->has_matrix)
        CPA_TRY(cpa_context_ensure_state(q->ops, &q->attended_memory, attended, q->form->shape.v_dim, &q->attended));
    if (q->direct) return CPA_OK;
    CPA_TRY(cpa_context_ensure(q->ops, &q->returned_memory, q->returned_rows * state_bytes));
    if (!cpa_states_are_narrow(q->ops)) return CPA_OK;
    const int64_t sent_bytes = cpa_pass_q_sent_bytes(q);
    CPA_TRY(cpa_context_ensure(q->ops, &q->narrow_memory, q->received_rows * sent_bytes));
    return cpa_context_ensure(q->ops, &q->narrow_returned_memory, q->returned_rows * sent_bytes);
}

cpa_status cpa_pass_q_plan(cpa_pass_q *q) {
    q->n_merged = 1;
    q->active = 0;
    q->received_rows = 0;
    if (!cpa_step_exchanges(q->step)) return CPA_OK;
    (cpa_planned_padding(q->step, q->form->index) ? plan_padded_peers : plan_peers)(q);
    if (!q->active) return CPA_OK;
    choose_direct(q);
    CPA_TRY(ensure_rows(q));
    CPA_TRY(plan_maps(q));
    q->n_parts = choose_parts(q);
    return q->n_parts > 0 ? plan_parts(q) : plan_remote(q);
}

/* Rows of every rank belong to the same sequences. The row maps are those that updates write, of a rank each, and behind
 * them which row of the step each is that is attended. */
cpa_status cpa_pass_q_reserve(cpa_pass_q *q, cpa_attend_reservation reservation) {
    const int64_t rows = q->step->padded_rows;
    const int32_t size = q->ops->map.cp_size;
    const int64_t map_bytes = 2 * size * rows * (int64_t)sizeof *q->maps.host;
    cpa_attend_place places[CPA_MERGE_MAX_STATES] = {{0, 0}};
    plan_padded_peers(q);
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
        q->merged_states[1 + i] = cpa_pass_q_returned_states(q, peer);
        q->merged_maps[1 + i] = maps + peer->rank * rows;
    }
    reservation.places = places;
    reservation.row_maps = maps;
    reservation.step_rows = maps + size * rows;
    reservation.ready_row = q->received_rows;
    reservation.ready_rows = rows;
    return q->ops->device->operators->plan_reserve(q->plans.list[0]->attend, &reservation, &q->ops->error);
}
