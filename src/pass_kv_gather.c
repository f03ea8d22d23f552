/* Planning pass-KV with all peers at once: a segment is a stretch of the sequences, which every rank sends its part of
 * to all the others. What arrives lies in a region for each peer; a block table in the order of positions makes it the
 * keys of all shards but the own one, so that a tile of rows takes one pass over it, whatever the number of ranks.
 *
 * Every rank derives the same segments from the chunks. A piece has the same range of local tokens on every rank and
 * the same place in every region; a shard that ends earlier leaves the rest of its place unused. */
#include "base/check.h"
#include "base/min_max.h"
#include "comm/rounds.h"
#include "src/pass_kv.h"

/* FLOP that a device does while a byte arrives, about (an H100 or H200 over NVLink: 590e12 FLOP/s over 350e9 B/s). When
 * attention over the own shard is too short to hide all other shards, they come in as many segments. */
#define FLOPS_A_BYTE 1700

/* Tokens of the shard at `slot` among the local tokens [first, first + count), of a sequence of `len` tokens. */
static int64_t tokens_in(const cpa_context *c, int32_t slot, int64_t len, int64_t first, int64_t count) {
    return cpa_max64(0, cpa_min64(cpa_shard_len(c->map, slot, len) - first, count));
}

/* ---- segments ---- */

/* Local tokens that some query of the chunk sees on some rank: those under the sinks when they lie apart, and the
 * others. Slot 0 has the most tokens of any prefix, the last slot the fewest. Both begin at multiples of the
 * interleave. */
static void visible_tokens(const cpa_context *c, const cpa_planned_chunk *chunk, int64_t ends[2], int64_t *body) {
    const cpa_mask mask = c->kv.now.mask;
    const int64_t run = c->map.interleave, oldest = chunk->start - mask.window + 1;
    ends[0] = *body = 0;
    ends[1] = cpa_shard_len(c->map, 0, chunk->end);
    if (mask.window == 0 || oldest <= 0) return;
    *body = cpa_shard_len(c->map, c->map.cp_size - 1, oldest) / run * run;
    ends[0] = cpa_min64(cpa_shard_len(c->map, 0, mask.sinks), ends[1]);
    if (*body <= ends[0]) ends[0] = *body = 0;
}

/* Cuts the local tokens [begin, end) of a chunk into pieces of segments of `capacity` blocks. */
static cpa_status cut_range(cpa_context *c, int64_t chunk, int64_t begin, int64_t end, int64_t capacity,
                            cpa_kv_cursor *at) {
    const int64_t block = c->options.block_size, run = c->map.interleave;
    while (begin < end) {
        int64_t count = cpa_min64(end - begin, (capacity - at->used) * block / run * run);
        if (count == 0) {
            cpa_pass_kv_close_segment(at);
            continue;
        }
        cpa_kv_piece piece = {at->segment, chunk, begin, count, at->used};
        CPA_TRY(cpa_pass_kv_add_piece(c, &c->kv.received, piece));
        at->used += cpa_pass_kv_blocks(c, (count + run - 1) / run * run);
        begin += count;
        if (begin < end) cpa_pass_kv_close_segment(at);
    }
    return CPA_OK;
}

/* Blocks of a segment: what staging holds, or less when that is too much to hide. */
static int64_t segment_blocks(const cpa_context *c) {
    const int64_t others = c->map.cp_size - 1, group = c->options.q_heads / c->options.kv_heads;
    int64_t rows = 0, tokens = 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        if (c->chunks[i].algorithm != CPA_PASS_KV) continue;
        int64_t ends[2], body;
        visible_tokens(c, &c->chunks[i], ends, &body);
        rows += c->chunks[i].end - c->chunks[i].start;
        tokens += ends[0] + ends[1] - body;
    }
    const int64_t flops = 2 * group * rows / c->map.cp_size;
    if (flops >= FLOPS_A_BYTE * others * cpa_dtype_bytes(c->options.kv_dtype)) return c->kv.capacity;
    const int64_t part = (tokens / others + c->map.interleave) / c->map.interleave * c->map.interleave;
    return cpa_min64(c->kv.capacity, cpa_pass_kv_blocks(c, part));
}

/* A segment holds at most one piece of a chunk, since attend takes a row once a call: so the sinks of all chunks
 * come first. */
static cpa_status cut_segments(cpa_context *c, int64_t *n_segments) {
    const int64_t capacity = segment_blocks(c);
    cpa_kv_cursor at = {0, 0};
    c->kv.received.count = 0;
    for (int pass = 0; pass < 2; pass++) {
        cpa_pass_kv_close_segment(&at);
        for (int64_t i = 0; i < c->n_chunks; i++) {
            if (c->chunks[i].algorithm != CPA_PASS_KV) continue;
            int64_t ends[2], body;
            visible_tokens(c, &c->chunks[i], ends, &body);
            CPA_TRY(cut_range(c, i, pass ? body : 0, ends[pass], capacity, &at));
        }
    }
    cpa_pass_kv_close_segment(&at);
    *n_segments = at.segment;
    return CPA_OK;
}

/* ---- the transfers of a step ---- */

/* Blocks of its region that a sender fills of pieces [begin, end), all of one segment. */
static int64_t sent_blocks(const cpa_context *c, int32_t sender, int64_t begin, int64_t end) {
    int64_t blocks = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &c->kv.received.data[i];
        const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
        int32_t slot = cpa_owner_slot(c->map, sender, chunk->phase);
        int64_t count = tokens_in(c, slot, chunk->end, piece->first, piece->count);
        if (count > 0) blocks = piece->block + cpa_pass_kv_blocks(c, count);
    }
    return blocks;
}

/* Whether a rank has rows of one of the chunks of the pieces. */
static int has_rows(const cpa_context *c, int32_t rank, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        if (cpa_context_share(c, &c->chunks[c->kv.received.data[i].chunk], rank).rows > 0) return 1;
    }
    return 0;
}

static cpa_status plan_send(cpa_context *c, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &c->kv.received.data[i];
        const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
        int32_t slot = cpa_owner_slot(c->map, c->control.rank, chunk->phase);
        int64_t count = tokens_in(c, slot, chunk->end, piece->first, piece->count);
        cpa_kv_span span = {chunk->table, piece->first, count, piece->block};
        if (count > 0) CPA_TRY(cpa_pass_kv_add_span(c, span));
    }
    return CPA_OK;
}

/* The blocks of a piece from all regions, in the order of positions; the peer of round r has region r - 1. */
static cpa_status add_table(cpa_context *c, const cpa_kv_piece *piece, const cpa_planned_chunk *chunk,
                            int64_t *entries) {
    cpa_pass_kv *kv = &c->kv;
    const int32_t size = c->map.cp_size, run = c->map.interleave;
    int32_t *table =
        cpa_context_grow(c, kv->table, &kv->table_capacity,
                         *entries + (int64_t)size * cpa_pass_kv_blocks(c, piece->count + run), sizeof *table);
    if (!table) return CPA_NO_MEMORY;
    kv->table = table;
    for (int64_t at = 0; at < piece->count; at += run) {
        for (int32_t slot = 0; slot < size; slot++) {
            int32_t peer = (slot + chunk->phase) % size;
            if (peer == c->control.rank) continue;
            int64_t tokens = tokens_in(c, slot, chunk->end, piece->first + at, cpa_min64(run, piece->count - at));
            int64_t block = kv->region_of[peer] * kv->capacity + piece->block + at / c->options.block_size;
            for (int64_t i = 0; i < cpa_pass_kv_blocks(c, tokens); i++) table[(*entries)++] = (int32_t)(block + i);
        }
    }
    return CPA_OK;
}

static cpa_status plan_receive(cpa_context *c, int64_t begin, int64_t end, cpa_kv_transfer *transfer) {
    int64_t n = 0, entries = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &c->kv.received.data[i];
        const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
        cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
        if (own.rows == 0) continue;
        int64_t keys = 0, first_entry = entries;
        for (int32_t slot = 0; slot < c->map.cp_size; slot++) {
            if (slot != own.slot) keys += tokens_in(c, slot, chunk->end, piece->first, piece->count);
        }
        CPA_TRY(add_table(c, piece, chunk, &entries));
        transfer->rows += own.rows;
        c->items[n++] = (cpa_attend_item){
            .q_row = chunk->row,
            .q_count = own.rows,
            .q_first = own.first,
            .k_first = piece->first * (c->map.cp_size - 1),
            .k_count = keys,
            .table = first_entry,
            .q_slot = own.slot,
            .k_slot = own.slot,
            .k_others = 1,
        };
    }
    return cpa_context_set_plan(c, transfer->plan, n, c->kv.table, entries);
}

static cpa_status plan_segment(cpa_context *c, int64_t begin, int64_t end) {
    cpa_kv_transfer *transfer;
    CPA_TRY(cpa_pass_kv_add_transfer(c, &transfer));
    const int32_t rank = c->control.rank;
    const int64_t own_blocks = sent_blocks(c, rank, begin, end);
    const int receives = has_rows(c, rank, begin, end);
    for (int32_t round = 1; round < c->map.cp_size; round++) {
        int32_t peer = cpa_round_recv_peer(c->map.cp_size, rank, round);
        cpa_kv_route route = {.peer = peer, .region = c->kv.region_of[peer]};
        if (has_rows(c, peer, begin, end)) route.send_blocks = own_blocks;
        if (receives) route.recv_blocks = sent_blocks(c, peer, begin, end);
        CPA_TRY(cpa_pass_kv_add_route(c, route));
    }
    CPA_TRY(plan_send(c, begin, end));
    cpa_pass_kv_close_transfer(c);
    return receives ? plan_receive(c, begin, end, transfer) : CPA_OK;
}

cpa_status cpa_pass_kv_plan_gather(cpa_context *c) {
    int64_t segments, begin = 0;
    CPA_TRY(cut_segments(c, &segments));
    for (int64_t segment = 0; segment < segments; segment++) {
        int64_t end = begin;
        while (end < c->kv.received.count && c->kv.received.data[end].segment == segment) end++;
        CPA_TRY(plan_segment(c, begin, end));
        begin = end;
    }
    return CPA_OK;
}
