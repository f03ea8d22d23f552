/* pass-KV: in each round a rank sends its keys and values to one peer, receives another's, and attends them.
 *
 * A shard travels in segments of a fixed capacity. A segment holds pieces of several sequences, packed into blocks: its
 * K blocks, then its V blocks, in one message, which the receiver reads through an identity block table. Only what some
 * query of the receiver can see is sent. Both sides derive the same segments from the chunks. The rounds' segments form
 * one sequence of transfers, the same number on every rank; the exchange of a transfer runs under the attention over
 * the one before, that of the first under the attention over the own shard.
 *
 * Where attend promises bits, a peer's shard is attended from the empty state, resumed from segment to segment, and then
 * merged: the same arithmetic as pass-Q, so both give the same bits (shards are cut only where it allows). Elsewhere the
 * state of the own shard is resumed over every segment, which saves the merge. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/fault.h"
#include "comm/rounds.h"
#include "src/context_internal.h"

/* Segments in staging: two to send and two to receive, so that one is packed and one arrives while one is attended. */
#define SEGMENTS 4
/* The share of a shard that may be sent unseen. */
#define UNSEEN_PART 64
/* By default. A device attends a segment in a few hundred microseconds; it takes long ones to fill it evenly. */
#define HOST_STAGING_BYTES ((int64_t)64 << 20)
#define DEVICE_STAGING_BYTES ((int64_t)512 << 20)

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* ---- life ---- */

cpa_status cpa_pass_kv_create(cpa_context *c) {
    const cpa_context_options *o = &c->options;
    cpa_pass_kv *kv = &c->kv;
    kv->k_bytes = cpa_kv_block_bytes(o->kv_dtype, o->k_scale, o->block_size, o->kv_heads, o->k_dim);
    kv->v_bytes = cpa_kv_block_bytes(o->kv_dtype, o->v_scale, o->block_size, o->kv_heads, o->v_dim);
    int64_t block = kv->k_bytes + kv->v_bytes;

    int64_t step = c->kernels->split_tokens(c->device);
    kv->in_place = step == 1;
    kv->split = step;
    while (kv->split % o->block_size != 0) kv->split += step;
    int64_t least_bytes = SEGMENTS * (kv->split / o->block_size) * block;
    int64_t usual = c->kernels->free_memory(0) < 0 ? HOST_STAGING_BYTES : DEVICE_STAGING_BYTES;
    int64_t bytes = o->staging_bytes ? o->staging_bytes : larger(usual, least_bytes);
    if (bytes < least_bytes) {
        return cpa_fail(&c->error, CPA_INVALID,
                        "context: staging of %" PRId64 " bytes, expected at least %" PRId64 ": %d segments of %" PRId64
                        " tokens",
                        bytes, least_bytes, SEGMENTS, kv->split);
    }
    c->stats.staging_bound = bytes;
    kv->capacity = smaller(bytes / SEGMENTS / block, INT32_MAX);
    if (c->map.cp_size == 1) return CPA_OK;

    kv->identity = malloc((size_t)kv->capacity * sizeof *kv->identity);
    if (!kv->identity)
        return cpa_fail(&c->error, CPA_NO_MEMORY, "context: no memory for %" PRId64 " blocks", kv->capacity);
    for (int64_t i = 0; i < kv->capacity; i++) kv->identity[i] = (int32_t)i;
    void *staging;
    CPA_TRY(c->kernels->alloc(c->device, SEGMENTS * kv->capacity * block, &staging, &c->error));
    kv->staging = staging;
    return CPA_OK;
}

void cpa_pass_kv_destroy(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    if (c->kernels) {
        for (int64_t i = 0; i < kv->n_plans; i++) c->kernels->plan_destroy(kv->plans[i]);
        c->kernels->free(c->device, kv->staging);
        c->kernels->free(c->device, kv->shard_memory.memory);
        c->kernels->free(c->device, kv->empty_memory.memory);
    }
    free(kv->plans);
    free(kv->runs);
    free(kv->received.data);
    free(kv->sent.data);
    free(kv->spans);
    free(kv->transfers);
    free(kv->schedules);
    free(kv->identity);
}

/* ---- what a sender owes a receiver ---- */

typedef struct token_range {
    int64_t begin, end;
} token_range;

/* The local tokens of the sender's shard of a chunk that some query of the receiver sees: those under the sinks when
 * they lie apart, and the others, from a multiple of `split` on, as attend resumes there. */
static void visible_tokens(const cpa_context *c, const cpa_planned_chunk *chunk, int32_t sender, int32_t receiver,
                           token_range *sinks, token_range *body) {
    *sinks = *body = (token_range){0, 0};
    cpa_chunk_share from = cpa_context_share(c, chunk, sender), to = cpa_context_share(c, chunk, receiver);
    if (to.rows == 0 || from.keys == 0) return;

    const cpa_mask mask = c->kv.now.mask;
    const int64_t split = c->kv.split;
    int64_t first_query = cpa_shard_pos(c->map, to.slot, to.first);
    int64_t last_query = cpa_shard_pos(c->map, to.slot, to.keys - 1);
    int64_t end = mask.causal ? cpa_shard_len(c->map, from.slot, last_query + 1) : from.keys;
    int64_t begin = 0, sink_end = 0;
    /* Unseen keys at the end cost little when they are few, and one packed copy then serves every receiver. */
    if (from.keys - end <= from.keys / UNSEEN_PART) end = from.keys;
    if (mask.window > 0) {
        int64_t oldest = first_query - mask.window + 1;
        begin = smaller(cpa_shard_len(c->map, from.slot, oldest > 0 ? oldest : 0), end);
        sink_end = smaller(cpa_shard_len(c->map, from.slot, mask.sinks), end);
    }
    if (begin < end) {
        body->begin = begin / split * split;
        body->end = end;
    }
    sinks->end = sink_end;
    if (body->begin < body->end && body->begin <= sinks->end) {
        body->begin = 0;
        sinks->end = 0;
    }
}

static cpa_status add_piece(cpa_context *c, cpa_kv_pieces *pieces, cpa_kv_piece piece) {
    cpa_kv_piece *data = cpa_context_grow(c, pieces->data, &pieces->capacity, pieces->count + 1, sizeof *data);
    if (!data) return CPA_NO_MEMORY;
    pieces->data = data;
    data[pieces->count++] = piece;
    return CPA_OK;
}

/* Where the next piece goes. */
typedef struct segment_cursor {
    int64_t segment, used; /* used: blocks */
} segment_cursor;

static void close_segment(segment_cursor *at) {
    if (at->used > 0) *at = (segment_cursor){at->segment + 1, 0};
}

/* Cuts a range into pieces from the cursor on. */
static cpa_status cut_range(cpa_context *c, int64_t chunk, token_range range, segment_cursor *at,
                            cpa_kv_pieces *pieces) {
    const int64_t block = c->options.block_size, split = c->kv.split;
    while (range.begin < range.end) {
        int64_t room = c->kv.capacity - at->used, count = range.end - range.begin;
        if ((count + block - 1) / block > room) count = room * block / split * split;
        if (count > 0) {
            cpa_kv_piece piece = {at->segment, chunk, range.begin, count, at->used};
            if (pieces) CPA_TRY(add_piece(c, pieces, piece));
            at->used += (count + block - 1) / block;
            range.begin += count;
        }
        if (range.begin < range.end) close_segment(at);
    }
    return CPA_OK;
}

/* The segments of one round from sender to receiver, and their pieces unless `pieces` is NULL. A segment holds at most
 * one piece of a chunk, since attend takes a row once a call: the sinks of all chunks come first. */
static cpa_status cut_segments(cpa_context *c, int32_t sender, int32_t receiver, cpa_kv_pieces *pieces,
                               int64_t *n_segments) {
    segment_cursor at = {0, 0};
    if (pieces) pieces->count = 0;
    for (int pass = 0; pass < 2; pass++) {
        close_segment(&at);
        for (int64_t i = 0; i < c->n_chunks; i++) {
            if (c->chunks[i].algorithm != CPA_PASS_KV) continue;
            token_range ranges[2];
            visible_tokens(c, &c->chunks[i], sender, receiver, &ranges[0], &ranges[1]);
            CPA_TRY(cut_range(c, i, ranges[pass], &at, pieces));
        }
    }
    close_segment(&at);
    *n_segments = at.segment;
    return CPA_OK;
}

/* ---- the transfers of a step ---- */

static int64_t blocks_of(const cpa_context *c, const cpa_kv_piece *piece) {
    return piece->block + (piece->count + c->options.block_size - 1) / c->options.block_size;
}

/* Whether two transfers send the same tokens. */
static int same_spans(const cpa_pass_kv *kv, const cpa_kv_transfer *a, const cpa_kv_transfer *b) {
    if (a->n_spans != b->n_spans) return 0;
    for (int64_t i = 0; i < a->n_spans; i++) {
        const cpa_kv_span *x = &kv->spans[a->span + i], *y = &kv->spans[b->span + i];
        if (x->table != y->table || x->first != y->first || x->count != y->count || x->dst_block != y->dst_block)
            return 0;
    }
    return 1;
}

/* Which half of the send staging a transfer uses: one where an earlier transfer left the same tokens, else the one that
 * the transfer before does not use. */
static void choose_send_buffer(cpa_pass_kv *kv, cpa_kv_transfer *transfer) {
    transfer->packs = transfer->n_spans > 0;
    transfer->send_buffer = 0;
    int seen[2] = {0, 0};
    for (const cpa_kv_transfer *earlier = transfer;
         earlier-- > kv->transfers + kv->now.begin && !(seen[0] && seen[1]);) {
        if (earlier == transfer - 1) transfer->send_buffer = 1 - earlier->send_buffer;
        if (earlier->n_spans == 0 || seen[earlier->send_buffer]++) continue;
        if (!same_spans(kv, transfer, earlier)) continue;
        transfer->send_buffer = earlier->send_buffer;
        transfer->packs = 0;
        return;
    }
}

/* What this rank packs for a segment: the pieces from *next on that belong to it. */
static cpa_status plan_send(cpa_context *c, int64_t segment, int64_t *next, cpa_kv_transfer *transfer) {
    cpa_pass_kv *kv = &c->kv;
    transfer->span = kv->n_spans;
    for (; *next < kv->sent.count && kv->sent.data[*next].segment == segment; ++*next) {
        const cpa_kv_piece *piece = &kv->sent.data[*next];
        cpa_kv_span *spans = cpa_context_grow(c, kv->spans, &kv->spans_capacity, kv->n_spans + 1, sizeof *spans);
        if (!spans) return CPA_NO_MEMORY;
        kv->spans = spans;
        spans[kv->n_spans++] = (cpa_kv_span){c->chunks[piece->chunk].table, piece->first, piece->count, piece->block};
        transfer->send_blocks = blocks_of(c, piece);
    }
    transfer->n_spans = kv->n_spans - transfer->span;
    choose_send_buffer(kv, transfer);
    return CPA_OK;
}

/* What this rank attends of a segment: its rows of the chunks over the pieces that arrive. */
static cpa_status plan_receive(cpa_context *c, int64_t segment, int64_t *next, cpa_kv_transfer *transfer,
                               cpa_attend_plan *plan) {
    cpa_pass_kv *kv = &c->kv;
    transfer->begins = *next == 0;
    int64_t n = 0;
    for (; *next < kv->received.count && kv->received.data[*next].segment == segment; ++*next) {
        const cpa_kv_piece *piece = &kv->received.data[*next];
        const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
        cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
        c->items[n++] = (cpa_attend_item){
            .q_row = chunk->row,
            .q_count = own.rows,
            .q_first = own.first,
            .k_first = piece->first,
            .k_count = piece->count,
            .table = piece->block,
            .q_slot = own.slot,
            .k_slot = cpa_owner_slot(c->map, transfer->recv_peer, chunk->phase),
        };
        transfer->recv_blocks = blocks_of(c, piece);
    }
    transfer->ends = *next == kv->received.count;
    return n ? cpa_context_set_plan(c, plan, n, kv->identity, kv->capacity) : CPA_OK;
}

static cpa_status add_transfer(cpa_context *c, cpa_kv_transfer **transfer, cpa_attend_plan **plan) {
    cpa_pass_kv *kv = &c->kv;
    cpa_kv_transfer *transfers =
        cpa_context_grow(c, kv->transfers, &kv->transfers_capacity, kv->n_transfers + 1, sizeof *transfers);
    if (!transfers) return CPA_NO_MEMORY;
    kv->transfers = transfers;
    if (kv->n_transfers == kv->n_plans) {
        cpa_attend_plan **plans =
            cpa_context_grow(c, kv->plans, &kv->plans_capacity, kv->n_plans + 1, sizeof(cpa_attend_plan *));
        if (!plans) return CPA_NO_MEMORY;
        kv->plans = plans;
        CPA_TRY(c->kernels->plan_create(c->device, &plans[kv->n_plans], &c->error));
        kv->n_plans++;
    }
    *plan = kv->plans[kv->n_transfers];
    *transfer = &transfers[kv->n_transfers++];
    return CPA_OK;
}

static cpa_status plan_round(cpa_context *c, int32_t round) {
    cpa_pass_kv *kv = &c->kv;
    const int32_t size = c->map.cp_size, rank = c->control.rank;
    int64_t most = 0, segments;
    for (int32_t sender = 0; sender < size; sender++) {
        CPA_TRY(cut_segments(c, sender, cpa_round_send_peer(size, sender, round), NULL, &segments));
        if (segments > most) most = segments;
    }
    int32_t send_peer = cpa_round_send_peer(size, rank, round), recv_peer = cpa_round_recv_peer(size, rank, round);
    CPA_TRY(cut_segments(c, rank, send_peer, &kv->sent, &segments));
    CPA_TRY(cut_segments(c, recv_peer, rank, &kv->received, &segments));
    int64_t next_sent = 0, next_received = 0;
    for (int64_t segment = 0; segment < most; segment++) {
        cpa_kv_transfer *transfer;
        cpa_attend_plan *plan;
        CPA_TRY(add_transfer(c, &transfer, &plan));
        *transfer = (cpa_kv_transfer){.send_peer = send_peer, .recv_peer = recv_peer};
        CPA_TRY(plan_send(c, segment, &next_sent, transfer));
        CPA_TRY(plan_receive(c, segment, &next_received, transfer, plan));
    }
    return CPA_OK;
}

/* The rows of pass-KV chunks, neighbours joined. */
static cpa_status plan_runs(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    kv->n_runs = 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        int64_t rows = cpa_context_share(c, &c->chunks[i], c->control.rank).rows;
        if (c->chunks[i].algorithm != CPA_PASS_KV || rows == 0) continue;
        cpa_row_run *last = kv->n_runs ? &kv->runs[kv->n_runs - 1] : NULL;
        if (last && last->row + last->rows == c->chunks[i].row) {
            last->rows += rows;
            continue;
        }
        cpa_row_run *runs = cpa_context_grow(c, kv->runs, &kv->runs_capacity, kv->n_runs + 1, sizeof *runs);
        if (!runs) return CPA_NO_MEMORY;
        kv->runs = runs;
        runs[kv->n_runs++] = (cpa_row_run){c->chunks[i].row, rows};
    }
    return CPA_OK;
}

/* The state of one peer's shard, and what empties it. */
static cpa_status ensure_shard(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    CPA_TRY(cpa_context_ensure_state(c, &kv->shard_memory, c->rows, &kv->shard));
    int64_t heads = c->rows * c->options.q_heads;
    if (heads * (int64_t)sizeof(float) <= kv->empty_memory.bytes) return CPA_OK;
    CPA_TRY(cpa_context_ensure(c, &kv->empty_memory, heads * (int64_t)sizeof(float)));
    int64_t n = kv->empty_memory.bytes / (int64_t)sizeof(float);
    float *empty = malloc((size_t)n * sizeof *empty);
    if (!empty) return cpa_fail(&c->error, CPA_NO_MEMORY, "no memory for the states of %" PRId64 " rows", c->rows);
    for (int64_t i = 0; i < n; i++) empty[i] = -INFINITY;
    cpa_status status = cpa_context_upload(c, kv->empty_memory.memory, empty, n * (int64_t)sizeof *empty);
    free(empty);
    kv->empty = kv->empty_memory.memory;
    return status;
}

cpa_status cpa_pass_kv_plan(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    kv->n_schedules = kv->n_transfers = kv->n_spans = 0;
    if (c->map.cp_size == 1) return CPA_OK;
    CPA_TRY(plan_runs(c));
    return kv->n_runs > 0 && !kv->in_place ? ensure_shard(c) : CPA_OK;
}

static int same_mask(cpa_mask a, cpa_mask b) {
    return a.causal == b.causal && a.sinks == b.sinks && a.window == b.window;
}

cpa_status cpa_pass_kv_select(cpa_context *c, cpa_mask mask) {
    cpa_pass_kv *kv = &c->kv;
    if (c->map.cp_size == 1) return CPA_OK;
    for (int64_t i = 0; i < kv->n_schedules; i++) {
        kv->now = kv->schedules[i];
        if (same_mask(kv->now.mask, mask)) return CPA_OK;
    }
    cpa_kv_schedule *schedules =
        cpa_context_grow(c, kv->schedules, &kv->schedules_capacity, kv->n_schedules + 1, sizeof *schedules);
    if (!schedules) return CPA_NO_MEMORY;
    kv->schedules = schedules;
    kv->now = (cpa_kv_schedule){mask, kv->n_transfers, 0};
    for (int32_t round = 1; round < c->map.cp_size; round++) CPA_TRY(plan_round(c, round));
    kv->now.end = kv->n_transfers;
    schedules[kv->n_schedules++] = kv->now;
    return CPA_OK;
}

/* ---- one layer ---- */

/* The halves of staging have two segments each, for sending and for receiving. */
static char *send_buffer(const cpa_pass_kv *kv, int64_t transfer) {
    return kv->staging + kv->transfers[transfer].send_buffer * kv->capacity * (kv->k_bytes + kv->v_bytes);
}

static char *recv_buffer(const cpa_pass_kv *kv, int64_t transfer) {
    return kv->staging + (2 + transfer % 2) * kv->capacity * (kv->k_bytes + kv->v_bytes);
}

static int64_t segment_bytes(const cpa_pass_kv *kv, int64_t blocks) {
    return blocks * (kv->k_bytes + kv->v_bytes);
}

static void use_staging(cpa_context *c, int64_t bytes) {
    c->kv.staging_in_use += bytes;
    if (c->kv.staging_in_use > c->stats.staging_bytes) c->stats.staging_bytes = c->kv.staging_in_use;
}

/* A segment as a cache: `blocks` K blocks, then as many V blocks. */
static cpa_kv_view segment_view(const cpa_context *c, char *segment, int64_t blocks) {
    const cpa_context_options *o = &c->options;
    return cpa_kv_view_resolve((cpa_kv_view){
        .k = segment,
        .v = segment + blocks * c->kv.k_bytes,
        .dtype = o->kv_dtype,
        .block_size = o->block_size,
        .num_blocks = blocks,
        .kv_heads = o->kv_heads,
        .k_dim = o->k_dim,
        .v_dim = o->v_dim,
        .k_scale = o->k_scale,
        .v_scale = o->v_scale,
    });
}

static cpa_status pack(cpa_context *c, int64_t index, const cpa_context_args *args, cpa_stream *stream) {
    const cpa_kv_transfer *transfer = &c->kv.transfers[index];
    if (transfer->send_blocks == 0) return CPA_OK;
    use_staging(c, segment_bytes(&c->kv, transfer->send_blocks));
    if (!transfer->packs) return CPA_OK;
    cpa_kv_pack_args packing = {
        .size = sizeof packing,
        .src = args->kv,
        .dst = segment_view(c, send_buffer(&c->kv, index), transfer->send_blocks),
        .block_tables = c->block_tables,
        .spans = c->kv.spans + transfer->span,
        .n_spans = transfer->n_spans,
    };
    return cpa_context_check(c, c->kernels->kv_pack(&packing, stream), stream);
}

static cpa_status start_transfer(cpa_context *c, int64_t index, cpa_stream *stream) {
    cpa_pass_kv *kv = &c->kv;
    const cpa_kv_transfer *transfer = &kv->transfers[index];
    cpa_message out = {
        .peer = transfer->send_peer,
        .send = send_buffer(kv, index),
        .send_bytes = segment_bytes(kv, transfer->send_blocks),
    };
    cpa_message in = {
        .peer = transfer->recv_peer,
        .recv = recv_buffer(kv, index),
        .recv_bytes = segment_bytes(kv, transfer->recv_blocks),
    };
    use_staging(c, in.recv_bytes);
    int32_t n = 1;
    if (in.peer == out.peer) {
        out.recv = in.recv;
        out.recv_bytes = in.recv_bytes;
    } else {
        c->messages[n++] = in;
    }
    c->messages[0] = out;
    return cpa_context_start(c, n, stream, &kv->exchange);
}

static cpa_status empty_shard(cpa_context *c, cpa_stream *stream) {
    const int64_t heads = c->options.q_heads;
    for (int64_t i = 0; i < c->kv.n_runs; i++) {
        cpa_row_run run = c->kv.runs[i];
        cpa_status status = c->kernels->copy(c->kv.shard.lse + run.row * heads, c->kv.empty,
                                             run.rows * heads * (int64_t)sizeof(float), stream);
        CPA_TRY(cpa_context_check(c, status, stream));
    }
    return CPA_OK;
}

static cpa_status merge_shard(cpa_context *c, cpa_stream *stream) {
    for (int64_t i = 0; i < c->kv.n_runs; i++) {
        cpa_row_run run = c->kv.runs[i];
        cpa_partial acc = cpa_context_state_at(c->states[0], run.row);
        cpa_partial shard = cpa_context_state_at(c->kv.shard, run.row);
        if (cpa_fault_is(CPA_FAULT_BASE2_LSE)) cpa_context_break_lse(c, shard, run.rows);
        cpa_merge_args merge = {
            .size = sizeof merge,
            .rows = run.rows,
            .heads = c->options.q_heads,
            .v_dim = c->options.v_dim,
            .states = (cpa_partial[]){acc, shard},
            .n_states = 2,
            .out_dtype = CPA_F32,
            .out = acc.o,
            .out_row_stride = acc.o_row_stride,
            .out_lse = acc.lse,
            .out_lse_row_stride = acc.lse_row_stride,
        };
        CPA_TRY(cpa_context_run_merge(c, &merge, stream));
    }
    return CPA_OK;
}

/* CPA_FAULT_DROPPED_SHARD: whether a transfer is of the first shard that arrives in the step. */
static int is_first_shard(const cpa_pass_kv *kv, int64_t index) {
    int64_t first = kv->now.begin;
    while (kv->transfers[first].recv_blocks == 0) first++;
    return kv->transfers[first].recv_peer == kv->transfers[index].recv_peer;
}

static cpa_status attend_transfer(cpa_context *c, int64_t index, const cpa_context_args *args, cpa_stream *stream) {
    const cpa_kv_transfer *transfer = &c->kv.transfers[index];
    if (transfer->recv_blocks == 0) return CPA_OK;
    if (transfer->begins && !c->kv.in_place) CPA_TRY(empty_shard(c, stream));
    cpa_attend_args attend = {
        .size = sizeof attend,
        .q = args->q,
        .q_dtype = c->options.dtype,
        .q_row_stride = (int64_t)c->options.q_heads * c->options.k_dim,
        .kv = segment_view(c, recv_buffer(&c->kv, index), transfer->recv_blocks),
        .mask = args->mask,
        .scale = args->scale,
        .resume = 1,
        .state = c->kv.in_place ? c->states[0] : c->kv.shard,
    };
    if (!(cpa_fault_is(CPA_FAULT_DROPPED_SHARD) && is_first_shard(&c->kv, index))) {
        CPA_TRY(cpa_context_run_attend(c, c->kv.plans[index], &attend, stream));
    }
    return transfer->ends && !c->kv.in_place ? merge_shard(c, stream) : CPA_OK;
}

cpa_status cpa_pass_kv_start(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    c->kv.staging_in_use = 0;
    int64_t first = c->kv.now.begin;
    if (first == c->kv.now.end) return CPA_OK;
    CPA_TRY(pack(c, first, args, stream));
    return start_transfer(c, first, stream);
}

cpa_status cpa_pass_kv_run(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_pass_kv *kv = &c->kv;
    for (int64_t i = kv->now.begin; i < kv->now.end; i++) {
        int more = i + 1 < kv->now.end;
        if (more) CPA_TRY(pack(c, i + 1, args, stream));
        CPA_TRY(cpa_context_finish(c, stream, &kv->exchange));
        use_staging(c, -segment_bytes(kv, kv->transfers[i].send_blocks));
        if (more) CPA_TRY(start_transfer(c, i + 1, stream));
        CPA_TRY(attend_transfer(c, i, args, stream));
        use_staging(c, -segment_bytes(kv, kv->transfers[i].recv_blocks));
    }
    return CPA_OK;
}
