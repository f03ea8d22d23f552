/* Planning pass-KV with all peers at once: a segment is a stretch of the sequences, which every rank sends its part of
 * to all the others. What arrives lies in a region for each peer; a block table in the order of positions makes it the
 * keys of all shards but the own one, so that a tile of rows takes one pass over it, whatever the number of ranks. Put
 * among them, the blocks that were packed to be sent make it the keys of all shards: rows that join them in one pass
 * need no pass over the own shard before. As many rows as it takes to hide the first segment go over the own shard
 * while it travels, and over those of the peers later.
 *
 * Every rank derives the same segments from the chunks. A piece has the same range of local tokens on every rank and
 * the same place in every region; a shard that ends earlier leaves the rest of its place unused. */
#include "base/check.h"
#include "base/fault.h"
#include "base/min_max.h"
#include "comm/rounds.h"
#include "src/context/pass_kv.h"

/* FLOP that a device does while a byte arrives, about (an H100 or H200 over NVLink: 590e12 FLOP/s over 350e9 B/s). When
 * attention over the own shard is too short to hide all other shards, they come in as many segments. */
#define FLOPS_A_BYTE 1700

/* The rows over the own shard take so many times the time of the first segment, since ranks do not begin as one. */
#define TIMES_TO_HIDE 2

/* Tokens of a shard among the local tokens [first, first + count), of a sequence of `len` tokens. */
static int64_t tokens_in(const cpa_context *c, int32_t shard, int64_t len, int64_t first, int64_t count) {
    return cpa_max64(0, cpa_min64(cpa_shard_len(c->map, shard, len) - first, count));
}

/* ---- segments ---- */

/* Local tokens that some query of the chunk sees on some rank: those under the sinks when they lie apart, and the
 * others. Shard 0 has the most tokens of any prefix, the last shard the fewest. Both begin at multiples of the
 * interleave, and the sinks end at one: keys of one rank come before those of the next, so none of a block that is in
 * use may be missing, seen or not. */
static void visible_tokens(const cpa_context *c, const cpa_planned_chunk *chunk, int64_t ends[2], int64_t *body) {
    const cpa_mask mask = c->kv.now.mask;
    const int64_t run = c->map.interleave, oldest = chunk->start - mask.window + 1;
    ends[0] = *body = 0;
    ends[1] = cpa_shard_len(c->map, 0, chunk->end);
    if (mask.window == 0 || oldest <= 0) return;
    *body = cpa_shard_len(c->map, c->map.cp_size - 1, oldest) / run * run;
    ends[0] = cpa_min64((cpa_shard_len(c->map, 0, mask.sinks) + run - 1) / run * run, ends[1]);
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
    const int64_t others = c->map.cp_size - 1, group = c->options.shape.q_heads / c->options.shape.kv_heads;
    int64_t rows = 0, tokens = 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        if (c->chunks[i].algorithm != CPA_PASS_KV) continue;
        int64_t ends[2], body;
        visible_tokens(c, &c->chunks[i], ends, &body);
        rows += c->chunks[i].end - c->chunks[i].start;
        tokens += ends[0] + ends[1] - body;
    }
    const int64_t flops = 2 * group * rows / c->map.cp_size;
    if (flops >= FLOPS_A_BYTE * others * cpa_dtype_bytes(c->options.shape.kv_dtype)) return c->kv.capacity;
    const int64_t part = (tokens / others + c->map.interleave) / c->map.interleave * c->map.interleave;
    return cpa_min64(c->kv.capacity, cpa_pass_kv_blocks(c, part));
}

/* A segment holds at most one piece of a chunk, since attend takes a row once a call: so the sinks of all chunks
 * come first. */
static cpa_status cut_segments(cpa_context *c) {
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
    return CPA_OK;
}

/* ---- the transfers of a step ---- */

/* Blocks of its region that a sender fills of pieces [begin, end), all of one segment. */
static int64_t sent_blocks(const cpa_context *c, int32_t sender, int64_t begin, int64_t end) {
    int64_t blocks = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &c->kv.received.data[i];
        const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
        int32_t shard = cpa_tokens_on(c->map, chunk->placement, sender).shard;
        int64_t count = tokens_in(c, shard, chunk->end, piece->first, piece->count);
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
        int32_t shard = cpa_tokens_on(c->map, chunk->placement, c->control.rank).shard;
        int64_t count = tokens_in(c, shard, chunk->end, piece->first, piece->count);
        cpa_kv_span span = {.table = chunk->table, .first = piece->first, .count = count, .dst_block = piece->block};
        if (count > 0) CPA_TRY(cpa_pass_kv_add_span(c, span));
    }
    return CPA_OK;
}

/* Where the part of a rank lies in the open transfer's staging: what arrives, or what is sent. */
static int64_t part_of(const cpa_context *c, int32_t rank) {
    const int64_t transfer = c->kv.n_transfers - 1;
    return rank == c->control.rank ? cpa_pass_kv_send_block(&c->kv, transfer)
                                   : cpa_pass_kv_recv_block(&c->kv, transfer, c->kv.region_of[rank]);
}

/* The blocks of a piece from all ranks, or all but this one, in the order of positions. */
static cpa_status add_table(cpa_context *c, const cpa_kv_piece *piece, const cpa_planned_chunk *chunk, int joined,
                            int64_t *entries) {
    cpa_pass_kv *kv = &c->kv;
    const int32_t size = c->map.cp_size, run = c->map.interleave;
    int32_t *table =
        cpa_context_grow(c, kv->table, &kv->table_capacity,
                         *entries + (int64_t)size * cpa_pass_kv_blocks(c, piece->count + run), sizeof *table);
    if (!table) return CPA_NO_MEMORY;
    kv->table = table;
    for (int64_t at = 0; at < piece->count; at += run) {
        for (int32_t shard = 0; shard < size; shard++) {
            int32_t rank = (shard + chunk->placement.rank) % size;
            if (rank == c->control.rank && !joined) continue;
            int64_t tokens = tokens_in(c, shard, chunk->end, piece->first + at, cpa_min64(run, piece->count - at));
            int64_t block = part_of(c, rank) + piece->block + at / c->options.block_size;
            for (int64_t i = 0; i < cpa_pass_kv_blocks(c, tokens); i++) table[(*entries)++] = (int32_t)(block + i);
        }
    }
    return CPA_OK;
}

/* The own rows [first, end) of a chunk, local indices, over a piece: over the keys of all shards if they join them,
 * else over those of the peers. */
static cpa_status add_item(cpa_context *c, const cpa_kv_piece *piece, int64_t first, int64_t end, int joined,
                           int64_t *n, int64_t *entries) {
    const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
    const cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
    if (first >= end) return CPA_OK;
    int64_t keys = 0, first_entry = *entries;
    for (int32_t shard = 0; shard < c->map.cp_size; shard++) {
        if (shard != own.tokens.shard || joined) keys += tokens_in(c, shard, chunk->end, piece->first, piece->count);
    }
    CPA_TRY(add_table(c, piece, chunk, joined, entries));
    c->items[(*n)++] = (cpa_attend_item){
        .q_row = chunk->row + first - own.first,
        .q_count = end - first,
        .q_first = first,
        .k_first = piece->first * (c->map.cp_size - !joined),
        .k_count = keys,
        .table = first_entry,
        .q_set = own.tokens,
        .k_set = {joined ? CPA_TOKENS_ALL : CPA_TOKENS_OTHERS, joined ? 0 : own.tokens.shard},
    };
    return CPA_OK;
}

/* The first own row of a chunk, a local index, that begins with the own shard; those before it join. */
static int64_t first_behind_own(const cpa_context *c, const cpa_planned_chunk *chunk, cpa_chunk_share own) {
    return own.first + cpa_max64(0, cpa_min64(c->kv.now.joined_rows - chunk->row, own.rows));
}

/* What this rank attends of a segment: the rows that see any of it. */
static cpa_status plan_receive(cpa_context *c, int64_t begin, int64_t end, cpa_kv_transfer *transfer) {
    int64_t n = 0, entries = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &c->kv.received.data[i];
        const cpa_planned_chunk *chunk = &c->chunks[piece->chunk];
        const cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
        const int64_t position = c->kv.now.mask.causal ? piece->first * c->map.cp_size : 0;
        const int64_t first = cpa_max64(own.first, cpa_tokens_before(c->map, own.tokens, position));
        const int64_t behind_own = first_behind_own(c, chunk, own);
        if (first >= own.keys) continue;
        CPA_TRY(add_item(c, piece, first, behind_own, 1, &n, &entries));
        CPA_TRY(add_item(c, piece, cpa_max64(behind_own, first), own.keys, 0, &n, &entries));
        if (transfer->rows == 0) transfer->first_row = chunk->row + first - own.first;
        transfer->rows += own.keys - first;
    }
    return n ? cpa_context_set_plan(c, transfer->plan, n, c->kv.table, entries, (cpa_attend_fusion){0}) : CPA_OK;
}

static cpa_status plan_segment(cpa_context *c, int64_t begin, int64_t end) {
    cpa_kv_transfer *transfer;
    CPA_TRY(cpa_pass_kv_add_transfer(c, &transfer));
    const int32_t rank = c->control.rank;
    const int64_t own_blocks = sent_blocks(c, rank, begin, end);
    const int receives = has_rows(c, rank, begin, end);
    if (receives && c->kv.now.joined_rows > 0) transfer->send_blocks = own_blocks;
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

/* ---- the own shard ---- */

/* (query, key) pairs, each for all heads, whose attention takes as long as is to be hidden of the first segment, pieces
 * [0, end). */
static int64_t pairs_to_hide(const cpa_context *c, int64_t end) {
    const cpa_context_options *o = &c->options;
    int64_t blocks = 0;
    for (int32_t rank = 0; rank < c->map.cp_size; rank++) {
        if (rank != c->control.rank) blocks += sent_blocks(c, rank, 0, end);
    }
    const int64_t flops_a_pair = 2 * (int64_t)o->shape.q_heads * (o->shape.k_dim + o->shape.v_dim);
    return TIMES_TO_HIDE * blocks * c->kv.block_bytes * FLOPS_A_BYTE / flops_a_pair;
}

/* Keys of the own shard that the own row at a local index sees, about. */
static int64_t own_keys_seen(const cpa_context *c, int64_t row, int64_t keys) {
    const cpa_mask mask = c->kv.now.mask;
    const int64_t seen = mask.causal ? row + 1 : keys;
    return mask.window > 0 ? cpa_min64(seen, mask.window / c->map.cp_size + 1) : seen;
}

/* How many of the first rows join: the last ones, over the own shard, hide the first segment. */
static int64_t joined_rows(const cpa_context *c, int64_t end) {
    const int64_t run = c->map.interleave, enough = pairs_to_hide(c, end);
    int64_t pairs = 0;
    /* A device widens the blocks of a quantised cache for each item: those of the peers twice if some rows join. */
    if (cpa_dtype_is_quantised(c->options.shape.kv_dtype)) return 0;
    /* These show where states meet. */
    if (cpa_fault_is(CPA_FAULT_DROPPED_SHARD) || cpa_fault_is(CPA_FAULT_BASE2_LSE)) return 0;
    for (int64_t i = c->n_chunks; i-- > 0;) {
        const cpa_chunk_share own = cpa_context_share(c, &c->chunks[i], c->control.rank);
        if (!cpa_pass_kv_takes_own(c, &c->chunks[i])) continue;
        for (int64_t row = own.keys, next; row > own.first; row = next) {
            next = cpa_max64((row - 1) / run * run, own.first);
            pairs += (row - next) * own_keys_seen(c, next, own.keys);
            if (pairs >= enough) return c->chunks[i].row + next - own.first;
        }
    }
    return 0;
}

/* The rows that do not join, over the own shard. */
static cpa_status plan_own(cpa_context *c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &c->chunks[i];
        const cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
        const int64_t first = first_behind_own(c, chunk, own);
        if (cpa_pass_kv_takes_own(c, chunk) && first < own.keys) c->items[n++] = cpa_context_own_item(c, chunk, first);
    }
    if (n == 0) return CPA_OK;
    CPA_TRY(cpa_pass_kv_take_plan(c, &c->kv.now.own));
    return cpa_context_set_plan(c, c->kv.now.own, n, c->block_tables, c->n_table_entries, (cpa_attend_fusion){0});
}

/* ---- all of it ---- */

/* The piece behind those of the segment that begins with piece `begin`. */
static int64_t end_of_segment(const cpa_context *c, int64_t begin) {
    const cpa_kv_pieces *pieces = &c->kv.received;
    int64_t end = begin;
    while (end < pieces->count && pieces->data[end].segment == pieces->data[begin].segment) end++;
    return end;
}

cpa_status cpa_pass_kv_plan_gather(cpa_context *c) {
    CPA_TRY(cut_segments(c));
    c->kv.now.joined_rows = joined_rows(c, end_of_segment(c, 0));
    CPA_TRY(plan_own(c));
    for (int64_t begin = 0, end; begin < c->kv.received.count; begin = end) {
        end = end_of_segment(c, begin);
        CPA_TRY(plan_segment(c, begin, end));
    }
    return CPA_OK;
}
