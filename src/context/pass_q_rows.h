/* Where the rows of pass-Q and their states lie: what its planning and its layers share. */
#ifndef CPA_PASS_Q_ROWS_H
#define CPA_PASS_Q_ROWS_H

#include "src/context/narrow_states.h"
#include "src/context/pass_q.h"

enum { CPA_PASS_Q_NOT_PACKED = -1 };

enum { CPA_PASS_Q_CUT_ROWS = 32 };

/* The rows of this rank. */
static inline int64_t cpa_pass_q_own_rows(const cpa_pass_q *q) {
    return q->step->rows[q->form->index];
}

static inline int64_t cpa_pass_q_query_bytes(const cpa_pass_q *q) {
    return cpa_shape_q_bytes(&q->form->shape);
}

/* Floats of a row of a message of states. */
static inline int64_t cpa_pass_q_state_floats(const cpa_pass_q *q) {
    int64_t floats = (int64_t)q->form->shape.q_heads * (q->form->out_dim + 1);
    return (floats + 3) / 4 * 4;
}

static inline cpa_partial cpa_pass_q_state_rows(const cpa_pass_q *q, void *memory, int64_t row) {
    int64_t stride = cpa_pass_q_state_floats(q);
    float *o = (float *)memory + row * stride;
    return (cpa_partial){.o = o,
                         .o_row_stride = stride,
                         .lse = o + (int64_t)q->form->shape.q_heads * q->form->out_dim,
                         .lse_row_stride = stride};
}

/* The states that are attended for a peer. */
static inline cpa_partial cpa_pass_q_remote_states(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    return q->direct ? cpa_pass_q_state_rows(q, peer->their_buffer, 0)
                     : cpa_pass_q_state_rows(q, q->remote_states_memory.memory, peer->received_at);
}

/* The own states that a peer attends. */
static inline cpa_partial cpa_pass_q_returned_states(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    return q->direct ? cpa_pass_q_state_rows(q, peer->own_buffer, 0)
                     : cpa_pass_q_state_rows(q, q->returned_memory.memory, peer->returned_at);
}

/* Bytes of a row of a message of states; and where the rows of a peer are sent from, and the own ones come in. */
static inline int64_t cpa_pass_q_sent_bytes(const cpa_pass_q *q) {
    return cpa_states_are_narrow(q->ops) ? cpa_narrow_row_bytes(q->ops, q->form)
                                         : cpa_pass_q_state_floats(q) * (int64_t)sizeof(float);
}
static inline char *cpa_pass_q_sent_rows(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    return cpa_states_are_narrow(q->ops)
               ? (char *)q->narrow_memory.memory + peer->received_at * cpa_pass_q_sent_bytes(q)
               : (char *)cpa_pass_q_remote_states(q, peer).o;
}
static inline char *cpa_pass_q_coming_rows(const cpa_pass_q *q, const cpa_pass_q_peer *peer) {
    return cpa_states_are_narrow(q->ops)
               ? (char *)q->narrow_returned_memory.memory + peer->returned_at * cpa_pass_q_sent_bytes(q)
               : (char *)cpa_pass_q_returned_states(q, peer).o;
}

/* Where a piece of a message of so many rows begins; sender and receiver cut alike. */
static inline int64_t cpa_pass_q_cut(int64_t rows, int32_t cut, int32_t cuts) {
    return cut == cuts ? rows : rows * cut / cuts / CPA_PASS_Q_CUT_ROWS * CPA_PASS_Q_CUT_ROWS;
}

/* The first row that is attended for a part. */
static inline int64_t cpa_pass_q_part_row(const cpa_pass_q *q, const cpa_pass_q_part *part) {
    const cpa_pass_q_peer *first = &q->peers[part->first_round];
    return first->received_at + cpa_pass_q_cut(first->received, part->cut, part->cuts);
}

/* Whether queries go or come. If none do, all that is attended are own rows, from where they lie. */
static inline int cpa_pass_q_exchanges_queries(const cpa_pass_q *q) {
    int64_t rows = 0;
    for (int32_t p = 0; p < q->ops->map.cp_size - 1; p++) rows += q->peers[p].sent + q->peers[p].received;
    return rows > 0;
}

#endif
