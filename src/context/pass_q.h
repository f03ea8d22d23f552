/* pass-Q: queries travel to the keys, and partial states come back. See pass_q.c, and pass_q_plan.h for
 * the plan of a step. */
#ifndef CPA_PASS_Q_H
#define CPA_PASS_Q_H

#include "src/context/context_ops.h"
#include "src/context/planned_step.h"
#include "src/context/step_maps.h"
#include "src/context/table_plans.h"

/* The rows of pass-Q chunks of one form that this rank and one peer attend for each other; indices are rows of the buffers below.
 */
typedef struct cpa_pass_q_peer {
    int32_t rank;
    int64_t sent, packed_at, returned_at; /* own rows that the peer attends; packed_at -1: sent from where they lie */
    int64_t received, received_at;        /* the peer's rows that this rank attends */
    void *their_buffer, *own_buffer;      /* direct: where states of `received` are stored, and those of `sent` come */
} cpa_pass_q_peer;

/* What is attended for the peers of the rounds [first_round, end_round), and sent to them while the next part is
 * attended: of each of their messages the rows of one of `cuts` equal pieces. */
typedef struct cpa_pass_q_part {
    int32_t first_round, end_round;
    int32_t cut, cuts;
    int64_t rows;
    cpa_table_plans plans;
    cpa_context_exchange states;
} cpa_pass_q_part;
enum { CPA_PASS_Q_PARTS = 4 }; /* at most; pass-KV has exchanges in flight as well */

/* pass-Q of the rows of one form. */
typedef struct cpa_pass_q {
    cpa_context_ops *ops;
    const cpa_planned_step *step;
    const cpa_form *form;
    int active; /* whether the step has a pass-Q chunk of the form */
    int direct; /* attend stores states in the peer-mapped buffers of the transport, and they are merged there */
    cpa_pass_q_peer *peers; /* [cp_size - 1], in the order in which pass-KV receives from them */
    cpa_table_plans plans;  /* the rows of the peers over the own shard; where they join, the own rows after them, whose
                             * queries are ready before those come */
    cpa_pass_q_part parts[CPA_PASS_Q_PARTS];
    int32_t n_parts;       /* 0: the rows of the peers are attended, and their states sent, at once, by `plans` */
    int64_t *state_shifts; /* shifts of the states of the plan's items */
    int64_t shifts_capacity;
    int64_t packed_rows, received_rows, returned_rows;
    cpa_step_maps maps; /* [packed_rows] own rows, then a row map of [rows] for each state that comes back */
    cpa_context_buffer packed_memory, received_memory, remote_states_memory, returned_memory;
    cpa_context_buffer narrow_memory, narrow_returned_memory; /* messages of states, where they travel in 16 bits */
    cpa_context_buffer attended_memory;                       /* memory of `attended`, where the form has a matrix */
    cpa_partial attended; /* states of remote_states_memory, before they are multiplied by the form's matrix */
    cpa_context_exchange queries, states;
    cpa_store_batch awaited; /* messages with the states that the last merge of the layer waits for; no parts: none */
    /* [cp_size]: states that the last merge of a layer joins; the first is that of the own rows. */
    cpa_partial *merged_states;
    const int32_t **merged_maps;
    int32_t n_merged;
} cpa_pass_q;

cpa_status cpa_pass_q_create(cpa_pass_q *q, cpa_context_ops *ops, const cpa_form *form, const cpa_planned_step *step);
void cpa_pass_q_destroy(cpa_pass_q *q);

/* Enqueues what brings the plan to the device; another stream brings the same again. */
cpa_status cpa_pass_q_upload(cpa_pass_q *q, cpa_stream *stream);
/* A number that two settings share only if layers enqueue the same of pass-Q. */
uint64_t cpa_pass_q_shape(const cpa_pass_q *q);

/* ---- one layer ---- */

/* Where the states of own rows are that pass-Q attends. */
cpa_partial cpa_pass_q_own_state(const cpa_pass_q *q);
cpa_status cpa_pass_q_start(cpa_pass_q *q, const cpa_form_layer *layer, cpa_stream *stream);
/* Attends the rows of the peers, and the own ones if it takes them, and sends the states of the former back. */
cpa_status cpa_pass_q_attend_remote(cpa_pass_q *q, const cpa_form_layer *layer, cpa_stream *stream);
/* Waits for the own states to come back, or leaves that to the last merge, of `rows` rows. */
cpa_status cpa_pass_q_finish(cpa_pass_q *q, int64_t rows, cpa_stream *stream);
/* The last merge: the states that came back join `merge`, whose first state is `own`. */
cpa_status cpa_pass_q_merge(cpa_pass_q *q, cpa_partial own, cpa_merge_args *merge, cpa_stream *stream);

#endif
