/* Planning pass-KV peer by peer, in rounds: in each a rank sends its keys and values to one peer and receives
 * another's, whose state is merged when it is complete. The order of the peers is that of pass-Q, and so is the
 * arithmetic.
 *
 * Only what some query of the receiver can see is sent. A segment holds pieces of several sequences. Both sides derive
 * the same segments from the chunks, and a round has the same number of transfers on every rank. */
#include "base/check.h"
#include "base/min_max.h"
#include "comm/rounds.h"
#include "src/context/pass_kv.h"

/* The share of a shard that may be sent unseen. */
#define UNSEEN_PART 64

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
    int64_t first_query = cpa_token_position(c->map, to.tokens, to.first);
    int64_t last_query = cpa_token_position(c->map, to.tokens, to.keys - 1);
    int64_t end = mask.causal ? cpa_tokens_before(c->map, from.tokens, last_query + 1) : from.keys;
    int64_t begin = 0, sink_end = 0;
    /* Unseen keys at the end cost little when they are few, and one packed copy then serves every receiver. */
    if (from.keys - end <= from.keys / UNSEEN_PART) end = from.keys;
    if (mask.window > 0) {
        int64_t oldest = first_query - mask.window + 1;
        begin = cpa_min64(cpa_tokens_before(c->map, from.tokens, oldest > 0 ? oldest : 0), end);
        sink_end = cpa_min64(cpa_tokens_before(c->map, from.tokens, mask.sinks), end);
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

/* Cuts a range into pieces from the cursor on. */
static cpa_status cut_range(cpa_context *c, int64_t chunk, token_range range, cpa_kv_cursor *at,
                            cpa_kv_pieces *pieces) {
    const int64_t split = c->kv.split;
    while (range.begin < range.end) {
        int64_t room = c->kv.capacity - at->used, count = range.end - range.begin;
        if (cpa_pass_kv_blocks(c, count) > room) count = room * c->options.block_size / split * split;
        if (count > 0) {
            cpa_kv_piece piece = {at->segment, chunk, range.begin, count, at->used};
            if (pieces) CPA_TRY(cpa_pass_kv_add_piece(c, pieces, piece));
            at->used += cpa_pass_kv_blocks(c, count);
            range.begin += count;
        }
        if (range.begin < range.end) cpa_pass_kv_close_segment(at);
    }
    return CPA_OK;
}

/* The segments of one round from sender to receiver, and their pieces unless `pieces` is NULL. A segment holds at most
 * one piece of a chunk, since attend takes a row once a call: the sinks of all chunks come first. */
static cpa_status cut_segments(cpa_context *c, int32_t sender, int32_t receiver, cpa_kv_pieces *pieces,
                               int64_t *n_segments) {
    cpa_kv_cursor at = {0, 0};
    if (pieces) pieces->count = 0;
    for (int pass = 0; pass < 2; pass++) {
        cpa_pass_kv_close_segment(&at);
        for (int64_t i = 0; i < c->n_chunks; i++) {
            if (c->chunks[i].algorithm != CPA_PASS_KV) continue;
            token_range ranges[2];
            visible_tokens(c, &c->chunks[i], sender, receiver, &ranges[0], &ranges[1]);
            CPA_TRY(cut_range(c, i, ranges[pass], &at, pieces));
        }
    }
    cpa_pass_kv_close_segment(&at);
    *n_segments = at.segment;
    return CPA_OK;
}

/* ---- the transfers of a round ---- */

/* Where a piece ends in its segment. */
static int64_t end_of(const cpa_context *c, const cpa_kv_piece *piece) {
    return piece->block + cpa_pass_kv_blocks(c, piece->count);
}

/* What this rank packs for a segment: the pieces from *next on that belong to it. */
static cpa_status plan_send(cpa_context *c, int64_t segment, int64_t *next, cpa_kv_route *route) {
    for (; *next < c->kv.sent.count && c->kv.sent.data[*next].segment == segment; ++*next) {
        const cpa_kv_piece *piece = &c->kv.sent.data[*next];
        cpa_kv_span span = {.table = c->chunks[piece->chunk].table,
                            .first = piece->first,
                            .count = piece->count,
                            .dst_block = piece->block};
        CPA_TRY(cpa_pass_kv_add_span(c, span));
        route->send_blocks = end_of(c, piece);
    }
    return CPA_OK;
}

/* What this rank attends of a segment: its rows of the chunks over the pieces that arrive. */
static cpa_status plan_receive(cpa_context *c, int64_t segment, int64_t *next, int32_t peer, cpa_kv_transfer *transfer,
                               cpa_kv_route *route) {
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
            .table = cpa_pass_kv_recv_block(kv, kv->n_transfers - 1, 0) + piece->block,
            .q_set = own.tokens,
            .k_set = cpa_tokens_on(c->map, chunk->placement, peer),
        };
        transfer->rows += own.rows;
        route->recv_blocks = end_of(c, piece);
    }
    transfer->ends = *next == kv->received.count;
    return n ? cpa_context_set_plan(c, transfer->plan, n, kv->table, kv->segments * kv->capacity,
                                    (cpa_attend_fusion){0})
             : CPA_OK;
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
        cpa_kv_route out = {.peer = send_peer}, in = {.peer = recv_peer};
        CPA_TRY(cpa_pass_kv_add_transfer(c, &transfer));
        transfer->round = round;
        CPA_TRY(plan_send(c, segment, &next_sent, &out));
        CPA_TRY(plan_receive(c, segment, &next_received, recv_peer, transfer, &in));
        if (send_peer == recv_peer) {
            out.recv_blocks = in.recv_blocks;
        } else {
            CPA_TRY(cpa_pass_kv_add_route(c, in));
        }
        CPA_TRY(cpa_pass_kv_add_route(c, out));
        cpa_pass_kv_close_transfer(c);
    }
    return CPA_OK;
}

cpa_status cpa_pass_kv_plan_rounds(cpa_context *c) {
    for (int32_t round = 1; round < c->map.cp_size; round++) CPA_TRY(plan_round(c, round));
    return CPA_OK;
}
