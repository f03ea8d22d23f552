/* A context, as the files of this folder see it. Others call src/context/context.h.
 *
 *   row_plan.h      what attends of rows of a form are planned by
 *   expanded_keys.h  keys that are expanded from latents before they are attended
 *   absorbed_rows.h  rows of expanded forms that attend latents as they lie; latent_work.h counts what is less
 *   narrow_states.h  states that travel in 16 bits
 *   forms.h         forms of rows, and the layer at hand as rows of each see it
 *   form_lane.h     what is kept of the rows of one form
 *   context.c       create, destroy, statistics, exchanges between layers
 *   context_layer.c  one layer from start to end
 *   context_plan.c  a step: its chunks, and the rows of this rank against its own shard
 *   context_reserve.c  a step whose lengths and tables lie on the device
 *   pass_kv.h       keys and values to the queries
 *   pass_q.h        queries out, partial states back
 *   scatter_heads.h  in the place of both, where every rank has all rows
 *   score_rows.h    which rows of a selection or a bias are those of an attend
 *   tensor_slices.c  what products that are sliced over the ranks exchange
 *   row_exchange.c  rows that a network has other ranks compute
 *   index_choice.h  the keys that an indexer chooses; context_select.c is the call
 *   compress_halo.h  halos of a compressor, through these
 *   planned_step.h  what they read of a step
 *   table_plans.h   what they attend by the block tables of the layer at hand
 *   context_ops.h   what they act through */
#ifndef CPA_CONTEXT_INTERNAL_H
#define CPA_CONTEXT_INTERNAL_H

#include "src/context/form_lane.h"
#include "src/context/index_choice.h"
#include "src/context/pass_kv.h"
#include "src/context/plan_agreement.h"
#include "src/context/score_rows.h"

struct cpa_context {
    cpa_context_ops ops;
    cpa_control control;
    cpa_planned_step step;
    cpa_block_tables *tables; /* a row for each chunk, in steps whose chunks bring their block tables */
    cpa_pass_kv kv;
    cpa_form_lane lanes[CPA_MOST_ROW_FORMS]; /* per form of the rows of `step` */
    cpa_score_rows score_rows;
    cpa_index_choice choice;
    cpa_context_buffer slices_memory; /* parts that other ranks send in cpa_context_slices */
    cpa_row_placement rows;           /* placement of the rows of the steps that are planned next */
    /* Of cpa_context_reserve: a step of the same few rows of each sequence and no chunks, beside the planned step. */
    cpa_planned_step reserved_step;
    cpa_form_lane reserved;
    const cpa_planned_step *attended; /* the step whose layers are attended: `step` or `reserved_step` */
    int broken;                       /* a layer failed half-way: the ranks no longer agree on what is in flight */
    double replayed_s;                /* see cpa_context_replayed_seconds */
    double estimate_s;                /* see cpa_context_estimate_seconds */

    cpa_events *steps; /* events 0 and 1 of cpa_context_plan, after the layers of the last two steps, in turn */
    int turn;          /* index of the event of the step at hand */
    int is_ahead; /* the step is of cpa_context_plan_ahead: its caller looks after what steps are under way, and all
                          ranks have the same plan */

    cpa_plan_agreement agreement; /* agreement of the ranks in cpa_context_plan */
    int64_t calls;                /* calls of cpa_context_attend, refused ones too; the same number on every rank */
    int64_t layers_exchanged;     /* layers begun in which ranks exchange */
    cpa_calls exchanging;         /* calls that began such layers, since the ranks last agreed on how many there are */
    /* Drains the stream of the step of cpa_context_plan, where its messages may be under way. */
    cpa_progress_hook awaiting;

    int planned;             /* not 0: layers may attend */
    int32_t layers_attended; /* layers of the planned step that have been attended */
};

/* Fails if a layer has failed half-way. */
cpa_status cpa_context_check_whole(cpa_context *c);
/* Starts and ends an exchange of the messages in c->ops.messages between two layers. */
cpa_status cpa_context_exchange_between(cpa_context *c, int32_t n_messages, cpa_span_kind kind, cpa_stream *stream);

/* Whether all ranks have planned the same, before the first layer. */
cpa_status cpa_context_agree_on_plan(cpa_context *c);
/* A call begins in which ranks exchange, and ends with a status. Between them the stream moves the messages along. */
void cpa_context_begin_exchanging(cpa_context *c, int64_t call, cpa_stream *stream, cpa_progress_hook *messages);
void cpa_context_end_exchanging(cpa_context *c, cpa_status status, cpa_progress_hook *messages);

/* Counts the planned chunks, and their keys, for so many layers. */
void cpa_context_count_chunks(cpa_context *c, int32_t layers);

/* No call has begun a layer in which ranks exchange. */
static inline cpa_calls cpa_context_no_calls(void) {
    return (cpa_calls){.channel = -1};
}

/* Whether layers attend the reserved step. */
static inline int cpa_context_is_reserved(const cpa_context *c) {
    return c->attended == &c->reserved_step;
}

/* The plan of the reserved step. */
static inline cpa_attend_plan *cpa_context_reserved_plan(const cpa_context *c) {
    return c->reserved.q.plans.list[0]->attend;
}

#endif
