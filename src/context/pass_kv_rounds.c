/* Planning pass-KV peer by peer, in rounds: in each a rank sends its keys and values to one peer and receives
 * another's, whose state is merged when it is complete. The order of the peers is that of pass-Q, and so is the
 * arithmetic.
 *
 * Only what some query of the receiver can see is sent. A segment holds pieces of several sequences. Both sides derive
 * the same segments from the chunks, and a round has the same number of transfers on every rank. */
#include "src/context/pass_kv_rounds.h"
#include "base/check.h"
#include "base/min_max.h"
#include "comm/rounds.h"

/* The share of a shard that may be sent unseen. */
#define UNSEEN_PART 64

/* ---- what a sender owes a receiver ---- */

typedef struct token_range {
    int64_t begin, end;
} token_range;

/* The local tokens of the sender's shard of a chunk that some query of the receiver sees: those under the sinks when
 * they lie apart, and the others, from a multiple of `split` on, as attend resumes there. */
static void visible_tokens(const cpa_pass_kv *kv, const cpa_planned_chunk *chunk, int32_t sender, int32_t receiver,
                           token_range *sinks, token_range *body) {
    *sinks = *body = (token_range){0, 0};
    cpa_chunk_share from = cpa_planned_share(kv->step, chunk, sender),
                    to = cpa_planned_share(kv->step, chunk, receiver);
    if (to.rows == 0 || from.keys == 0) return;

    const cpa_mask mask = kv->now.masks[chunk->form];
    const int64_t split = kv->ops->split;
    int64_t first_query = cpa_token_position(kv->ops->map, to.tokens, to.first);
    int64_t last_query = cpa_token_position(kv->ops->map, to.tokens, to.keys - 1);
    int64_t end = mask.causal ? cpa_tokens_before(kv->ops->map, from.tokens, last_query + 1) : from.keys;
    int64_t begin = 0, sink_end = 0;
    /* Unseen keys at the end cost little when they are few, and one packed copy then serves every receiver. */
    if (from.keys - end <= from.keys / UNSEEN_PART) end = from.keys;
    if (mask.window > 0) {
        int64_t oldest = first_query - mask.window + 1;
        begin = cpa_min64(cpa_tokens_before(kv->ops->map, from.tokens, oldest > 0 ? oldest : 0), end);
        sink_end = cpa_min64(cpa_tokens_before(kv->ops->map, from.tokens, mask.sinks), end);
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
static cpa_status cut_range(cpa_pass_kv *kv, int64_t chunk, token_range range, cpa_kv_cursor *at,
                            cpa_kv_pieces *pieces) {
    const int64_t split = kv->ops->split;
    while (range.begin < range.end) {
        int64_t room = kv->transfers.staging.capacity - at->used, count = range.end - range.begin;
        if (cpa_kv_blocks(kv->ops, count) > room) count = room * kv->ops->options.block_size / split * split;
        if (count > 0) {
            cpa_kv_piece piece = {at->segment, chunk, range.begin, count, at->used};
            if (pieces) CPA_TRY(cpa_kv_pieces_add(pieces, kv->ops, piece));
            at->used += cpa_kv_blocks(kv->ops, count);
            range.begin += count;
        }
        if (range.begin < range.end) cpa_kv_cursor_close_segment(at);
    }
    return CPA_OK;
}

/* The segments of one round from sender to receiver, and their pieces unless `pieces` is NULL. A segment holds at most
 * one piece of a chunk, since attend takes a row once a call: the sinks of all chunks come first. */
static cpa_status cut_segments(cpa_pass_kv *kv, int32_t sender, int32_t receiver, cpa_kv_pieces *pieces,
                               int64_t *n_segments) {
    cpa_kv_cursor at = {0, 0};
    if (pieces) pieces->count = 0;
    for (int pass = 0; pass < 2; pass++) {
        cpa_kv_cursor_close_segment(&at);
        for (int64_t i = 0; i < kv->step->n_chunks; i++) {
            if (kv->step->chunks[i].algorithm != CPA_PASS_KV) continue;
            token_range ranges[2];
            visible_tokens(kv, &kv->step->chunks[i], sender, receiver, &ranges[0], &ranges[1]);
            CPA_TRY(cut_range(kv, i, ranges[pass], &at, pieces));
        }
    }
    cpa_kv_cursor_close_segment(&at);
    *n_segments = at.segment;
    return CPA_OK;
}

/* ---- the transfers of a round ---- */

/* Where a piece ends in its segment. */
static int64_t end_of(const cpa_pass_kv *kv, const cpa_kv_piece *piece) {
    return piece->block + cpa_kv_blocks(kv->ops, piece->count);
}

static cpa_status add_stretch(cpa_pass_kv *kv, int32_t rank, const cpa_kv_piece *piece, cpa_kv_transfer *transfer) {
    const cpa_kv_stretch stretch = {rank, piece->chunk, piece->first, piece->count, piece->block};
    return cpa_kv_transfers_add_stretch(&kv->transfers, transfer, stretch);
}

/* What this rank packs for a segment: the pieces from *next on that belong to it. */
static cpa_status plan_send(cpa_pass_kv *kv, int64_t segment, int64_t *next, cpa_kv_transfer *transfer,
                            cpa_kv_route *route) {
    for (; *next < kv->sent.count && kv->sent.data[*next].segment == segment; ++*next) {
        const cpa_kv_piece *piece = &kv->sent.data[*next];
        cpa_kv_range range = {.table = kv->step->chunks[piece->chunk].table,
                              .first = piece->first,
                              .count = piece->count,
                              .dst_block = piece->block};
        CPA_TRY(cpa_kv_transfers_add_range(&kv->transfers, transfer, range));
        CPA_TRY(add_stretch(kv, kv->ops->rank, piece, transfer));
        route->send_blocks = end_of(kv, piece);
    }
    return CPA_OK;
}

/* What the rows of a form attend of a segment: the pieces [begin, end) that arrive, in staging from block `at` on. */
static cpa_status plan_attended(cpa_pass_kv *kv, const cpa_form *form, int64_t begin, int64_t end, int64_t at,
                                int32_t peer, cpa_kv_attended *attended) {
    const cpa_kv_staging *staging = &kv->transfers.staging;
    int64_t n = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &kv->received.data[i];
        const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
        if (chunk->form != form->index) continue;
        cpa_chunk_share own = cpa_planned_share(kv->step, chunk, kv->ops->rank);
        kv->ops->items[n++] = (cpa_attend_item){
            .q_row = chunk->row,
            .q_count = own.rows,
            .q_first = own.first,
            .k_first = piece->first,
            .k_count = piece->count,
            .table = at + piece->block,
            .q_set = own.tokens,
            .k_set = cpa_tokens_on(kv->ops->map, chunk->placement, peer),
        };
        attended->rows += own.rows;
    }
    if (n == 0) return CPA_OK;
    CPA_TRY(cpa_kv_transfers_take_plan(&kv->transfers, &attended->plan));
    return cpa_row_plan_set(attended->plan, kv->ops, form, n, kv->table, staging->segments * staging->capacity,
                            (cpa_attend_fusion){0});
}

/* What this rank attends of a segment: its rows of the chunks over the pieces that arrive, from *next on. */
static cpa_status plan_receive(cpa_pass_kv *kv, int64_t segment, int64_t *next, cpa_kv_transfer *transfer,
                               cpa_kv_route *route) {
    const int64_t begin = *next, at = cpa_kv_transfers_recv_block(&kv->transfers, transfer, route->region);
    for (; *next < kv->received.count && kv->received.data[*next].segment == segment; ++*next) {
        CPA_TRY(add_stretch(kv, route->peer, &kv->received.data[*next], transfer));
        route->recv_blocks = end_of(kv, &kv->received.data[*next]);
    }
    transfer->begins = begin == 0 && *next > begin;
    transfer->ends = *next == kv->received.count && *next > begin;
    for (int32_t f = 0; f < kv->ops->forms.count; f++)
        CPA_TRY(plan_attended(kv, &kv->ops->forms.list[f], begin, *next, at, route->peer, &transfer->attended[f]));
    return CPA_OK;
}

static cpa_status plan_round(cpa_pass_kv *kv, int32_t round) {
    const int32_t size = kv->ops->map.cp_size, rank = kv->ops->rank;
    int64_t most = 0, segments;
    for (int32_t sender = 0; sender < size; sender++) {
        CPA_TRY(cut_segments(kv, sender, cpa_round_send_peer(size, sender, round), NULL, &segments));
        if (segments > most) most = segments;
    }
    int32_t send_peer = cpa_round_send_peer(size, rank, round), recv_peer = cpa_round_recv_peer(size, rank, round);
    CPA_TRY(cut_segments(kv, rank, send_peer, &kv->sent, &segments));
    CPA_TRY(cut_segments(kv, recv_peer, rank, &kv->received, &segments));
    int64_t next_sent = 0, next_received = 0;
    for (int64_t segment = 0; segment < most; segment++) {
        cpa_kv_transfer transfer = cpa_kv_transfers_open(&kv->transfers, round);
        cpa_kv_route out = {.peer = send_peer}, in = {.peer = recv_peer};
        CPA_TRY(plan_send(kv, segment, &next_sent, &transfer, &out));
        CPA_TRY(plan_receive(kv, segment, &next_received, &transfer, &in));
        if (send_peer == recv_peer) {
            out.recv_blocks = in.recv_blocks;
        } else {
            CPA_TRY(cpa_kv_transfers_add_route(&kv->transfers, &transfer, in));
        }
        CPA_TRY(cpa_kv_transfers_add_route(&kv->transfers, &transfer, out));
        cpa_kv_transfers_place(&kv->transfers, &transfer, kv->now.begin, 0);
        CPA_TRY(cpa_kv_transfers_add(&kv->transfers, &transfer));
    }
    return CPA_OK;
}

cpa_status cpa_pass_kv_plan_rounds(cpa_pass_kv *kv) {
    for (int32_t round = 1; round < kv->ops->map.cp_size; round++) CPA_TRY(plan_round(kv, round));
    return CPA_OK;
}
