/* What the files of context attention share: the context, the planned step, and the buffers of one layer.
 *
 *   context.c       create, destroy, one layer from start to end
 *   context_plan.c  a step: chunks, block tables, the rows of this rank against its own shard
 *   pass_kv.h       keys and values to the queries, in three files
 *   pass_q.c        queries out, partial states home
 *
 * Functions that can fail write the message to context->error. */
#ifndef CPA_CONTEXT_INTERNAL_H
#define CPA_CONTEXT_INTERNAL_H

#include <cpattn/context.h>

#include "comm/comm.h"
#include "kernels/graph.h"
#include "kernels/operators.h"
#include "src/trace/spans.h"

/* Device memory that grows from plan to plan. */
typedef struct cpa_context_buffer {
    void *memory;
    int64_t bytes;
} cpa_context_buffer;

/* An exchange in flight, and its span. */
typedef struct cpa_context_exchange {
    cpa_exchange *handle;
    int64_t span;
    int32_t round;
} cpa_context_exchange;

/* A chunk of the planned step: tokens [start, end) of a sequence. */
typedef struct cpa_planned_chunk {
    int64_t start, end;
    cpa_placement placement;
    cpa_algorithm algorithm; /* CPA_AUTO: nothing travels, as it lies on one rank */
    int64_t table;           /* index into block_tables of this rank's first entry */
    int64_t row;             /* first of its rows on this rank */
} cpa_planned_chunk;

/* What one rank has of a chunk: the queries are its local indices [first, keys), the keys are [0, keys). */
typedef struct cpa_chunk_share {
    cpa_token_set tokens;
    int64_t first, rows, keys;
} cpa_chunk_share;

/* A piece of a shard of one chunk in one segment. */
typedef struct cpa_kv_piece {
    int64_t segment;
    int64_t chunk;
    int64_t first, count; /* local tokens */
    int64_t block;        /* first staging block */
} cpa_kv_piece;

typedef struct cpa_kv_pieces {
    cpa_kv_piece *data;
    int64_t count, capacity;
} cpa_kv_pieces;

/* What a transfer sends to and receives from one peer, in blocks of staging. */
typedef struct cpa_kv_route {
    int32_t peer;
    int32_t region; /* where it receives */
    int64_t send_blocks, recv_blocks;
} cpa_kv_route;

/* One exchange of keys and values, and what this rank attends of it. */
typedef struct cpa_kv_transfer {
    cpa_attend_plan *plan;
    int32_t round;         /* peer by peer; 0: all peers at once */
    int64_t span, n_spans; /* of what is packed */
    int64_t route;
    int32_t n_routes;
    int32_t send_buffer;              /* which half of the send staging */
    int packs;                        /* 0: nothing is sent, or it lies there already */
    int begins, ends;                 /* peer by peer: whether it is the first, the last that the peer sends */
    int64_t send_blocks, recv_blocks; /* in use */
    int64_t rows;                     /* own rows that it is attended for */
    int64_t first_row;                /* all peers at once: the first of them */
} cpa_kv_transfer;

/* A range of rows. */
typedef struct cpa_row_run {
    int64_t row, rows;
} cpa_row_run;

/* The transfers of layers with one mask. */
typedef struct cpa_kv_schedule {
    cpa_mask mask;
    int64_t begin, end; /* indices of transfers */
    /* All peers at once: the rows of pass-KV before this one take the keys of the own shard from the transfers, in one
     * pass with those of the peers; the others begin with the own shard, while the first transfer is on its way. */
    int64_t joined_rows;
    cpa_attend_plan *own; /* of the others; NULL: there are none */
} cpa_kv_schedule;

typedef struct cpa_pass_kv {
    int gather;         /* all peers at once, else peer by peer */
    int32_t regions;    /* to receive in, of each of two buffers */
    int32_t *region_of; /* [cp_size] of each peer */
    int64_t split;      /* where a shard may be cut, in tokens; all peers at once: least tokens of a segment */
    int64_t capacity;   /* blocks of a segment */
    int64_t segments;   /* that staging has */
    int64_t k_bytes, block_bytes; /* of one staging block: of its keys, of both */
    char *staging;                /* two segments to send, then two to receive for each region */
    int32_t *table;               /* the block table of a transfer in staging; peer by peer the identity */
    int64_t table_capacity;
    int64_t staging_in_use; /* bytes */

    cpa_kv_schedule *schedules; /* of the masks that the step has met; layers may alternate between them */
    int64_t n_schedules, schedules_capacity;
    cpa_kv_schedule now; /* that of the layer at hand */
    cpa_kv_transfer *transfers;
    int64_t n_transfers, transfers_capacity;
    cpa_attend_plan **plans; /* of the transfers and schedules of a step; kept when there are fewer */
    int64_t n_plans, plans_capacity, plans_in_use;
    cpa_kv_span *spans;
    int64_t n_spans, spans_capacity;
    cpa_kv_route *routes;
    int64_t n_routes, routes_capacity;
    cpa_kv_pieces sent, received; /* scratch of one round; all peers at once: of the step, in `received` */
    cpa_row_run *runs;            /* the rows of pass-KV chunks */
    int64_t n_runs, runs_capacity;

    cpa_context_buffer shard_memory, empty_memory;
    cpa_partial shard;             /* of all own rows over one peer's shard */
    const float *empty;            /* an LSE of -inf for each own row and head */
    cpa_context_exchange exchange; /* the transfer in flight */
} cpa_pass_kv;

/* The rows of pass-Q chunks that this rank and one peer attend for each other; indices are rows of the buffers below.
 */
typedef struct cpa_pass_q_peer {
    int32_t rank;
    int64_t sent, packed_at, home_at; /* own rows that the peer attends; packed_at -1: sent from where they lie */
    int64_t got, got_at;              /* the peer's rows that this rank attends */
    void *their_room, *own_room;      /* direct: where states of `got` are stored, and those of `sent` come */
} cpa_pass_q_peer;

typedef struct cpa_pass_q {
    int active;             /* whether the step has a pass-Q chunk */
    int joined;             /* own rows are attended together with those of the peers */
    int direct;             /* attend stores states in the rooms of the transport, and they are merged there */
    cpa_pass_q_peer *peers; /* [cp_size - 1], in the order in which pass-KV receives from them */
    cpa_attend_plan *plan;  /* the rows of the peers over the own shard; joined: and the own rows behind them, whose
                             * queries are ready before those come */
    int64_t *state_shifts;  /* of the plan's items */
    int64_t shifts_capacity;
    int64_t packed_rows, got_rows, home_rows;
    int32_t *map_sets[2]; /* host, page-locked, in turn: one may be on its way to the device as the next is filled */
    int64_t map_capacities[2];
    int maps_turn;
    int32_t *maps; /* of the plan: [packed_rows] own rows, then a row map of [rows] for each state that comes home */
    int64_t maps_entries;
    const cpa_stream *maps_uploaded; /* the stream that copied them to the device; NULL: none has yet */
    cpa_context_buffer maps_memory, packed_memory, got_memory, away_memory, home_memory;
    cpa_context_exchange queries, states;
    cpa_store_batch awaited; /* the states that the last merge of the layer waits for; no parts: it need not */
} cpa_pass_q;

struct cpa_context {
    cpa_context_options options;
    cpa_owner_map map;
    cpa_device *device;
    cpa_stream *upload; /* for copies outside any layer */
    cpa_control control;
    cpa_transport *transport;
    cpa_message *messages; /* [cp_size], scratch */
    cpa_error error;
    int broken; /* a layer failed half-way: the ranks no longer agree on what is in flight */
    cpa_context_stats stats;
    cpa_spans spans;
    int sampled_step;                           /* the planned step is a decode step of which not all are measured */
    double sampled_attend_s, sampled_exposed_s; /* of the last decode step that was measured; see cpa_context_mute */

    /* Of cpa_context_plan: marks 0 and 1 behind the layers of the last two steps, in turn; -1: the engine plans. */
    cpa_events *steps;
    int turn;

    int planned;
    int shared;              /* some chunk is sharded over several ranks */
    int64_t steady_rows;     /* rows that every rank plans for, see cpa_context_plan_ahead; 0: each its own */
    int32_t layers_attended; /* of the planned step */
    cpa_planned_chunk *chunks;
    int64_t n_chunks, chunks_capacity;
    int32_t *block_tables;
    int64_t n_table_entries, tables_capacity;
    int32_t max_block; /* the largest block id in use; -1: none */
    int64_t rows;
    cpa_attend_item *items; /* scratch */
    int64_t items_capacity;
    cpa_attend_plan *own; /* own rows over the own shard, but those that pass-KV takes */

    cpa_context_buffer acc_memory;
    cpa_partial *states; /* [cp_size]: what the last merge of a layer joins; the first is that of the own shard */
    const int32_t **row_maps;
    int32_t n_states;

    cpa_pass_kv kv;
    cpa_pass_q q;
};

static inline cpa_chunk_share cpa_context_share(const cpa_context *c, const cpa_planned_chunk *chunk, int32_t rank) {
    cpa_chunk_share share = {.tokens = cpa_tokens_on(c->map, chunk->placement, rank)};
    share.first = cpa_tokens_before(c->map, share.tokens, chunk->start);
    share.keys = cpa_tokens_before(c->map, share.tokens, chunk->end);
    share.rows = share.keys - share.first;
    return share;
}

/* cpa_context_create over a transport that the caller has chosen; NULL: the one for the device. */
cpa_status cpa_context_create_over(cpa_comm *comm, cpa_device *device, const cpa_transport_table *transport,
                                   const cpa_context_options *options, cpa_context **out, cpa_error *err);
/* The same as cpa_context_plan, except that it waits for nothing and does not touch the spans of the step before, which
 * may still run; the one before that is done. Call cpa_context_begin before the layers. steady_rows > 0: the chunks are
 * of one token and go by pass-Q, or lie on one rank, and the step is planned with so many rows on every rank, of which
 * those past its own are attended to no use: messages hold so many rows for each pair of ranks, and layers enqueue the
 * same for any such chunks. q and out of its layers have room for them. */
cpa_status cpa_context_plan_ahead(cpa_context *c, const cpa_context_chunk *chunks, int64_t n_chunks,
                                  int64_t steady_rows);
/* Enqueues what brings the plan of the step to the device, as far as it is made before the first layer. */
cpa_status cpa_context_upload_plan(cpa_context *c, cpa_stream *stream);
/* The planned step begins. The stream of the one before is idle: its spans are counted if they were not yet. */
void cpa_context_begin(cpa_context *c);
/* A number that two steady plans share only if their layers enqueue the same on this rank. */
uint64_t cpa_context_shape(const cpa_context *c);
/* Whether the decode step that is planned is measured. A mark between two kernels costs microseconds of the device, as
 * much as a kernel of a small batch: it is enough to measure some such steps, and the others count as the last one that
 * was. Holds until the next cpa_context_begin. */
void cpa_context_mute(cpa_context *c, int muted);
/* Counts the planned chunks for so many layers. */
void cpa_context_count_chunks(cpa_context *c, int32_t layers);
/* Waits until the stream is idle; an exchange that stands still, or fails, is given up and named. */
cpa_status cpa_context_sync(cpa_context *c, cpa_stream *stream);

/* context_plan.c: puts the own rows over the own shard, but those of pass-KV where it takes them, behind n items, as
 * rows from first_row on. Returns how many items there are then. */
int64_t cpa_context_own_items(cpa_context *c, int64_t n, int64_t first_row);
/* The own rows of a chunk over the own shard, from a local index on. */
cpa_attend_item cpa_context_own_item(const cpa_context *c, const cpa_planned_chunk *chunk, int64_t first);

/* context.c: memory, messages and operations on behalf of a context. */

/* Room for `bytes` in a buffer; what was there is lost when it grows. */
cpa_status cpa_context_ensure(cpa_context *c, cpa_context_buffer *buffer, int64_t bytes);
/* The array, with room for n elements; NULL without memory, and the array stays. */
void *cpa_context_grow(cpa_context *c, void *array, int64_t *capacity, int64_t n, size_t element);
/* Copies host memory to the device, outside any layer. */
cpa_status cpa_context_upload(cpa_context *c, void *dst, const void *src, int64_t bytes);
/* States of `rows` rows: O, then LSE. */
cpa_status cpa_context_ensure_state(cpa_context *c, cpa_context_buffer *buffer, int64_t rows, cpa_partial *out);
cpa_partial cpa_context_state_at(cpa_partial state, int64_t row);
/* Sets a plan of n items (context->items). */
cpa_status cpa_context_set_plan(cpa_context *c, cpa_attend_plan *plan, int64_t n_items, const int32_t *block_tables,
                                int64_t n_table_entries, cpa_attend_fusion fusion);

/* The message of a failed operation of the stream becomes that of the context. */
cpa_status cpa_context_check(cpa_context *c, cpa_status status, const cpa_stream *stream);
/* `kind` says whose rows or keys they are, `round` in which they came. */
cpa_status cpa_context_run_attend(cpa_context *c, const cpa_attend_plan *plan, const cpa_attend_args *args,
                                  const void *ready_q, cpa_span_kind kind, int32_t round, cpa_stream *stream);
/* The rows of a plan against the own shard, from the empty state. */
cpa_status cpa_context_attend_own(cpa_context *c, const cpa_attend_plan *plan, const cpa_context_args *args,
                                  cpa_partial state, void *out, cpa_stream *stream);
/* `awaited` as in the kernel table. */
cpa_status cpa_context_run_merge(cpa_context *c, const cpa_merge_args *args, const cpa_store_batch *awaited,
                                 cpa_stream *stream);
/* An exchange of c->messages after the work enqueued on the stream so far, and its end before the work to come. */
cpa_status cpa_context_start(cpa_context *c, int32_t n_messages, cpa_span_kind kind, int32_t round, cpa_stream *stream,
                             cpa_context_exchange *out);
cpa_status cpa_context_finish(cpa_context *c, cpa_stream *stream, cpa_context_exchange *exchange);
/* CPA_FAULT_BASE2_LSE: the LSE of `rows` rows of a state goes to base 2. CPA_FAULT_DROPPED_SHARD: it becomes -inf. */
cpa_status cpa_context_spoil_lse(cpa_context *c, cpa_partial state, int64_t rows, cpa_stream *stream);

/* pass_kv.c */
cpa_status cpa_pass_kv_create(cpa_context *c);
void cpa_pass_kv_destroy(cpa_context *c);
/* Forgets the last step and prepares for the planned chunks. */
cpa_status cpa_pass_kv_plan(cpa_context *c);
/* Takes the transfers of the planned chunks under a mask, planning them when the mask is new to the step. */
cpa_status cpa_pass_kv_select(cpa_context *c, cpa_mask mask);
/* Whether pass-KV attends the rows of a planned chunk over the own shard too. */
int cpa_pass_kv_takes_own(const cpa_context *c, const cpa_planned_chunk *chunk);
/* Sends the first segment on its way. */
cpa_status cpa_pass_kv_start(cpa_context *c, const cpa_context_args *args, cpa_stream *stream);
/* Own rows against the own shard, as far as they do not take it from the transfers. */
cpa_status cpa_pass_kv_attend_own(cpa_context *c, const cpa_context_args *args, cpa_stream *stream);
/* How many of the first rows of a layer are states after cpa_pass_kv_run: where the last transfer completes all that
 * come behind, its attend rounds those. */
int64_t cpa_pass_kv_open_rows(const cpa_context *c, const cpa_context_args *args);
/* The shards of the peers, joined with states[0]; or the results. */
cpa_status cpa_pass_kv_run(cpa_context *c, const cpa_context_args *args, cpa_stream *stream);

/* pass_q.c */
cpa_status cpa_pass_q_create(cpa_context *c);
void cpa_pass_q_destroy(cpa_context *c);
/* Also fills states[1 ..] and row_maps. */
cpa_status cpa_pass_q_plan(cpa_context *c);
/* Copies the row maps to the device; another stream copies the same again. */
cpa_status cpa_pass_q_upload(cpa_context *c, cpa_stream *stream);
cpa_status cpa_pass_q_start(cpa_context *c, const cpa_context_args *args, cpa_stream *stream);
/* Attends the rows of the peers, and the own ones if they join them, and sends the states of the former home. */
cpa_status cpa_pass_q_serve(cpa_context *c, const cpa_context_args *args, cpa_stream *stream);
/* Waits for the own states to come home, or leaves that to the last merge, of `rows` rows. */
cpa_status cpa_pass_q_finish(cpa_context *c, int64_t rows, cpa_stream *stream);

#endif
