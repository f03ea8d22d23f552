/* pass-Q: queries go to the ranks that hold keys of their sequence, and partial states come back.
 *
 * A message of queries holds rows [q_heads * k_dim] of one form in the order of the chunks. A message of states holds a
 * row for each of them: O [q_heads * out_dim], then LSE [q_heads], fp32, padded to four floats; attend, or what
 * multiplies states by the matrix of the form, writes such rows in place. Where states travel in 16 bits, those rows are
 * rounded to others (narrow_states.h), and widened where they come in.
 *
 * In decode, where the transport has peer-mapped buffers, attend stores the states of a peer's rows in the memory of
 * that peer, whose merge reads them there, and in graphs waits for them itself. The peer's queries are the credit to
 * store there: it sends them when it has merged the layer before.
 *
 * In prefill the rows of the peers are attended in parts, and the states of a part travel while the next is
 * attended. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "comm/rounds.h"
#include "kernels/graph.h"
#include "src/context/pass_q_plan.h"
#include "src/context/pass_q_rows.h"

/* ---- life ---- */

cpa_status cpa_pass_q_create(cpa_pass_q *q, cpa_context_ops *ops, const cpa_form *form, const cpa_planned_step *step) {
    const size_t size = (size_t)ops->map.cp_size;
    q->ops = ops;
    q->form = form;
    q->step = step;
    q->n_merged = 1;
    q->peers = calloc(size, sizeof *q->peers);
    q->merged_states = calloc(size, sizeof *q->merged_states);
    q->merged_maps = calloc(size, sizeof(const int32_t *));
    if (!q->peers || !q->merged_states || !q->merged_maps)
        return cpa_fail(&ops->error, CPA_NO_MEMORY, "context: no memory for %zu ranks", size);
    return cpa_table_plans_create(&q->plans, ops);
}

void cpa_pass_q_destroy(cpa_pass_q *q) {
    if (!q->ops) return;
    cpa_step_maps_free(&q->maps, q->ops);
    cpa_context_free(q->ops, &q->packed_memory);
    cpa_context_free(q->ops, &q->received_memory);
    cpa_context_free(q->ops, &q->remote_states_memory);
    cpa_context_free(q->ops, &q->returned_memory);
    cpa_context_free(q->ops, &q->narrow_memory);
    cpa_context_free(q->ops, &q->narrow_returned_memory);
    cpa_context_free(q->ops, &q->attended_memory);
    cpa_table_plans_destroy(&q->plans, q->ops);
    for (int i = 0; i < CPA_PASS_Q_PARTS; i++) cpa_table_plans_destroy(&q->parts[i].plans, q->ops);
    free(q->state_shifts);
    free(q->merged_maps);
    free(q->merged_states);
    free(q->peers);
}

/* ---- one setting ---- */

cpa_status cpa_pass_q_upload(cpa_pass_q *q, cpa_stream *stream) {
    if (!q->active) return CPA_OK;
    if (q->n_parts == 0) CPA_TRY(cpa_table_plans_upload(&q->plans, q->ops, stream));
    for (int32_t i = 0; i < q->n_parts; i++) CPA_TRY(cpa_table_plans_upload(&q->parts[i].plans, q->ops, stream));
    return cpa_step_maps_upload(&q->maps, q->ops, stream);
}

uint64_t cpa_pass_q_shape(const cpa_pass_q *q) {
    if (!q->active) return 0;
    uint64_t shape[] = {(uintptr_t)q->maps.device.memory,        (uintptr_t)q->packed_memory.memory,
                        (uintptr_t)q->received_memory.memory,    (uintptr_t)q->remote_states_memory.memory,
                        (uintptr_t)q->returned_memory.memory,    (uintptr_t)q->attended_memory.memory,
                        (uintptr_t)q->narrow_memory.memory,      (uintptr_t)q->narrow_returned_memory.memory,
                        cpa_table_plans_shape(&q->plans, q->ops)};
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}

/* ---- one layer ---- */

cpa_partial cpa_pass_q_own_state(const cpa_pass_q *q) {
    return cpa_pass_q_state_rows(q, q->remote_states_memory.memory, q->received_rows);
}

cpa_status cpa_pass_q_start(cpa_pass_q *q, const cpa_form_layer *layer, cpa_stream *stream) {
    if (!q->active) return CPA_OK;
    const int64_t bytes = cpa_pass_q_query_bytes(q);
    CPA_TRY(cpa_step_maps_upload(&q->maps, q->ops, stream));
    if (q->packed_rows > 0) {
        int64_t span = cpa_spans_begin(&q->ops->spans, CPA_SPAN_QUERIES, 0, stream);
        cpa_status status = q->ops->device->operators->gather_rows(
            q->packed_memory.memory, layer->rows.q, q->maps.device.memory, q->packed_rows, bytes, stream);
        cpa_spans_end(&q->ops->spans, span, stream);
        CPA_TRY(cpa_context_check(q->ops, status, stream));
    }
    const char *packed = q->packed_memory.memory;
    char *got = q->received_memory.memory;
    for (int32_t i = 0; i < q->ops->map.cp_size - 1; i++) {
        const cpa_pass_q_peer *peer = &q->peers[i];
        q->ops->messages[i] = (cpa_message){
            .peer = peer->rank,
            .send = peer->packed_at == CPA_PASS_Q_NOT_PACKED ? layer->rows.q : packed + peer->packed_at * bytes,
            .send_bytes = peer->sent * bytes,
            .recv = got + peer->received_at * bytes,
            .recv_bytes = peer->received * bytes,
        };
    }
    return cpa_context_start(q->ops, q->ops->map.cp_size - 1, CPA_SPAN_EXCHANGE_QUERIES, 0, stream, &q->queries);
}

/* Adds one direction to the message of its peer, among the n that there are. */
static int32_t add_message(cpa_pass_q *q, int32_t n, cpa_message one) {
    cpa_message *message = q->ops->messages;
    while (message < q->ops->messages + n && message->peer != one.peer) message++;
    if (message == q->ops->messages + n) {
        *message = one;
        return n + 1;
    }
    if (one.send) message->send = one.send, message->send_bytes = one.send_bytes;
    if (one.recv) message->recv = one.recv, message->recv_bytes = one.recv_bytes;
    return n;
}

/* Starts an exchange of the states of a part, or of all. */
static cpa_status send_states(cpa_pass_q *q, const cpa_pass_q_part *part, cpa_stream *stream,
                              cpa_context_exchange *out) {
    const int64_t bytes = cpa_pass_q_sent_bytes(q);
    const int32_t size = q->ops->map.cp_size;
    int32_t n = 0;
    for (int32_t p = part->first_round; p < part->end_round; p++) {
        const cpa_pass_q_peer *to = &q->peers[p], *from = to;
        const int32_t rank = cpa_round_send_peer(size, q->ops->rank, p + 1);
        while (from->rank != rank) from = from == q->peers + size - 2 ? q->peers : from + 1;
        const int64_t begin = cpa_pass_q_cut(to->received, part->cut, part->cuts);
        const int64_t end = cpa_pass_q_cut(to->received, part->cut + 1, part->cuts);
        const int64_t own_begin = cpa_pass_q_cut(from->sent, part->cut, part->cuts);
        const int64_t own_end = cpa_pass_q_cut(from->sent, part->cut + 1, part->cuts);
        const cpa_message send = {
            .peer = to->rank, .send = cpa_pass_q_sent_rows(q, to) + begin * bytes, .send_bytes = (end - begin) * bytes};
        const cpa_message receive = {.peer = from->rank,
                                     .recv = cpa_pass_q_coming_rows(q, from) + own_begin * bytes,
                                     .recv_bytes = (own_end - own_begin) * bytes};
        n = add_message(q, n, send);
        n = add_message(q, n, receive);
    }
    /* Telling of stored states is in no span but the exchange's, as pushing is. */
    return cpa_context_start(q->ops, n, CPA_SPAN_EXCHANGE_STATES, 0, stream, out);
}

/* Attends the rows of a part, and multiplies their states by the matrix of the form. */
static cpa_status attend_rows(cpa_pass_q *q, cpa_row_plan *plan, const cpa_attend_args *attend,
                              const cpa_form_layer *layer, int64_t first, int64_t rows, int32_t part,
                              cpa_stream *stream) {
    CPA_TRY(cpa_row_plan_attend(plan, q->ops, q->form, layer, attend, layer->rows.q, CPA_SPAN_ATTEND_RECEIVED, part,
                                stream));
    if (!q->form->has_matrix) return CPA_OK;
    return cpa_context_run_project(q->ops, q->form, layer, rows, cpa_context_state_at(q->attended, first),
                                   cpa_pass_q_state_rows(q, q->remote_states_memory.memory, first), stream);
}

/* The states of rows that were attended become those of messages. */
static cpa_status narrow(cpa_pass_q *q, int64_t first, int64_t rows, cpa_stream *stream) {
    if (!cpa_states_are_narrow(q->ops)) return CPA_OK;
    return cpa_narrow_states(q->ops, q->form, cpa_pass_q_state_rows(q, q->remote_states_memory.memory, first), rows,
                             (char *)q->narrow_memory.memory + first * cpa_pass_q_sent_bytes(q), stream);
}

cpa_status cpa_pass_q_attend_remote(cpa_pass_q *q, const cpa_form_layer *layer, cpa_stream *stream) {
    if (!q->active) return CPA_OK;
    CPA_TRY(cpa_context_finish(q->ops, stream, &q->queries));
    cpa_attend_args attend = cpa_context_attend_args(q->ops, q->form, layer, CPA_SCORE_REMOTE);
    if (!cpa_step_joins_own(q->step) || cpa_pass_q_exchanges_queries(q)) attend.q = q->received_memory.memory;
    attend.state = q->form->has_matrix ? q->attended : cpa_pass_q_state_rows(q, q->remote_states_memory.memory, 0);
    if (q->n_parts == 0) {
        const cpa_pass_q_part all = {.end_round = q->ops->map.cp_size - 1, .cuts = 1};
        CPA_TRY(attend_rows(q, cpa_table_plans_now(&q->plans, q->ops), &attend, layer, 0, cpa_pass_q_attended_rows(q),
                            0, stream));
        CPA_TRY(narrow(q, 0, q->received_rows, stream));
        return send_states(q, &all, stream, &q->states);
    }
    for (int32_t i = 0; i < q->n_parts; i++) {
        cpa_pass_q_part *part = &q->parts[i];
        if (part->rows > 0) {
            const int64_t first = cpa_pass_q_part_row(q, part);
            CPA_TRY(attend_rows(q, cpa_table_plans_now(&part->plans, q->ops), &attend, layer, first, part->rows, i,
                                stream));
            CPA_TRY(narrow(q, first, part->rows, stream));
        }
        CPA_TRY(send_states(q, part, stream, &part->states));
    }
    return CPA_OK;
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
    for (int32_t i = 0; i < q->n_parts; i++) CPA_TRY(cpa_context_finish(q->ops, stream, &q->parts[i].states));
    if (q->n_parts == 0 && rows > 0 && leave_to_merge(q)) return CPA_OK;
    if (q->n_parts == 0) CPA_TRY(cpa_context_finish(q->ops, stream, &q->states));
    if (!cpa_states_are_narrow(q->ops)) return CPA_OK;
    return cpa_widen_states(q->ops, q->form, q->narrow_returned_memory.memory, q->returned_rows,
                            cpa_pass_q_state_rows(q, q->returned_memory.memory, 0), stream);
}

cpa_status cpa_pass_q_merge(cpa_pass_q *q, cpa_partial own, cpa_merge_args *merge, cpa_stream *stream) {
    q->merged_states[0] = own;
    merge->states = q->merged_states;
    merge->row_maps = q->merged_maps;
    merge->n_states = q->n_merged;
    return cpa_context_run_merge(q->ops, merge, &q->awaited, stream);
}
