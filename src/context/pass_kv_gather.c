/* Planning pass-KV with all peers at once: a segment is a stretch of the sequences, which every rank sends its part of
 * to all the others. What arrives lies in a region for each peer; a block table in the order of positions makes it the
 * keys of all shards but the own one, so that a tile of rows takes one pass over it, whatever the number of ranks. Put
 * among them, the blocks that were packed to be sent make it the keys of all shards: rows that take them in one pass
 * need no pass over the own shard before. As many rows as it takes to hide the first segment go over the own shard
 * while it travels, and over those of the peers later.
 *
 * Every rank derives the same segments from the chunks. A piece has the same range of local tokens on every rank and
 * the same place in every region; a shard that ends earlier leaves the rest of its place unused. */
#include "src/context/pass_kv_gather.h"
#include "base/check.h"
#include "base/min_max.h"
#include "comm/rounds.h"

/* What an H100 or H200 attends in a second of prefill, and what arrives over NVLink meanwhile, about
 * (docs/PERFORMANCE.md and bench/results). Not what this device does: ranks must cut the same segments, and each cuts
 * those of all others. When attention over the own shard is too short to hide all other shards, they come in as many
 * segments. */
#define ATTEND_FLOPS INT64_C(595000000000000)
#define ARRIVING_BYTES INT64_C(350000000000)
#define FLOPS_A_BYTE (ATTEND_FLOPS / ARRIVING_BYTES)

/* The rows over the own shard take so many times the time of the first segment, since ranks do not begin as one. */
#define TIMES_TO_HIDE 2

/* Tokens of a shard among the local tokens [first, first + count), of a sequence of `len` tokens. */
static int64_t tokens_in(const cpa_pass_kv *kv, int32_t shard, int64_t len, int64_t first, int64_t count) {
    return cpa_max64(0, cpa_min64(cpa_shard_len(kv->ops->map, shard, len) - first, count));
}

/* ---- segments ---- */

/* Local tokens that some query of the chunk sees on some rank: those under the sinks when they lie apart, and the
 * others. Shard 0 has the most tokens of any prefix, the last shard the fewest. Both begin at multiples of the
 * interleave, and the sinks end at one: keys of one rank come before those of the next, so none of a block that is in
 * use may be missing, seen or not. */
static void visible_tokens(const cpa_pass_kv *kv, const cpa_planned_chunk *chunk, int64_t ends[2], int64_t *body) {
    const cpa_mask mask = kv->now.masks[chunk->form];
    const int64_t run = kv->ops->map.interleave, oldest = chunk->start - mask.window + 1;
    ends[0] = *body = 0;
    ends[1] = cpa_shard_len(kv->ops->map, 0, chunk->end);
    if (mask.window == 0 || oldest <= 0) return;
    *body = cpa_shard_len(kv->ops->map, kv->ops->map.cp_size - 1, oldest) / run * run;
    ends[0] = cpa_min64((cpa_shard_len(kv->ops->map, 0, mask.sinks) + run - 1) / run * run, ends[1]);
    if (*body <= ends[0]) ends[0] = *body = 0;
}

/* Cuts the local tokens [begin, end) of a chunk into pieces of segments of `capacity` blocks. */
static cpa_status cut_range(cpa_pass_kv *kv, int64_t chunk, int64_t begin, int64_t end, int64_t capacity,
                            cpa_kv_cursor *at) {
    const int64_t block = kv->ops->options.block_size, run = kv->ops->map.interleave;
    while (begin < end) {
        int64_t count = cpa_min64(end - begin, (capacity - at->used) * block / run * run);
        if (count == 0) {
            cpa_kv_cursor_close_segment(at);
            continue;
        }
        cpa_kv_piece piece = {at->segment, chunk, begin, count, at->used};
        CPA_TRY(cpa_kv_pieces_add(&kv->received, kv->ops, piece));
        at->used += cpa_kv_blocks(kv->ops, (count + run - 1) / run * run);
        begin += count;
        if (begin < end) cpa_kv_cursor_close_segment(at);
    }
    return CPA_OK;
}

/* Columns of a query, and of its state, that a pair with a key takes. */
static int64_t columns_of(const cpa_attention_shape *shape) {
    return (int64_t)shape->k_dim + shape->v_dim;
}

/* As many rows of the shape of the cache as take the time of so many of a form. */
static int64_t rows_of_cache(const cpa_pass_kv *kv, int32_t form, int64_t rows) {
    return rows * columns_of(&kv->ops->forms.list[form].shape) / columns_of(&kv->ops->options.shape);
}

/* Blocks of a segment: what staging holds, or less when that is too much to hide. */
static int64_t segment_blocks(const cpa_pass_kv *kv) {
    const int64_t others = kv->ops->map.cp_size - 1,
                  group = kv->ops->options.shape.q_heads / kv->ops->options.shape.kv_heads;
    int64_t rows = 0, tokens = 0;
    for (int64_t i = 0; i < kv->step->n_chunks; i++) {
        if (kv->step->chunks[i].algorithm != CPA_PASS_KV) continue;
        int64_t ends[2], body;
        visible_tokens(kv, &kv->step->chunks[i], ends, &body);
        rows += rows_of_cache(kv, kv->step->chunks[i].form, kv->step->chunks[i].end - kv->step->chunks[i].start);
        tokens += ends[0] + ends[1] - body;
    }
    const int64_t flops = 2 * group * rows / kv->ops->map.cp_size;
    if (flops >= FLOPS_A_BYTE * others * cpa_dtype_bytes(kv->ops->options.shape.kv_dtype))
        return kv->transfers.staging.capacity;
    const int64_t part =
        (tokens / others + kv->ops->map.interleave) / kv->ops->map.interleave * kv->ops->map.interleave;
    return cpa_min64(kv->transfers.staging.capacity, cpa_kv_blocks(kv->ops, part));
}

/* A segment holds at most one piece of a chunk, since attend takes a row once a call: so the sinks of all chunks
 * come first. */
static cpa_status cut_segments(cpa_pass_kv *kv) {
    const int64_t capacity = segment_blocks(kv);
    cpa_kv_cursor at = {0, 0};
    kv->received.count = 0;
    for (int pass = 0; pass < 2; pass++) {
        cpa_kv_cursor_close_segment(&at);
        for (int64_t i = 0; i < kv->step->n_chunks; i++) {
            if (kv->step->chunks[i].algorithm != CPA_PASS_KV) continue;
            int64_t ends[2], body;
            visible_tokens(kv, &kv->step->chunks[i], ends, &body);
            CPA_TRY(cut_range(kv, i, pass ? body : 0, ends[pass], capacity, &at));
        }
    }
    return CPA_OK;
}

/* ---- the transfers of a step ---- */

/* Blocks of its region that a sender fills of pieces [begin, end), all of one segment. */
static int64_t sent_blocks(const cpa_pass_kv *kv, int32_t sender, int64_t begin, int64_t end) {
    int64_t blocks = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &kv->received.data[i];
        const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
        int32_t shard = cpa_tokens_on(kv->ops->map, chunk->placement, sender).shard;
        int64_t count = tokens_in(kv, shard, chunk->end, piece->first, piece->count);
        if (count > 0) blocks = piece->block + cpa_kv_blocks(kv->ops, count);
    }
    return blocks;
}

/* Whether a rank has rows of one of the chunks of the pieces. */
static int has_rows(const cpa_pass_kv *kv, int32_t rank, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        if (cpa_planned_share(kv->step, &kv->step->chunks[kv->received.data[i].chunk], rank).rows > 0) return 1;
    }
    return 0;
}

static cpa_status plan_send(cpa_pass_kv *kv, int64_t begin, int64_t end, cpa_kv_transfer *transfer) {
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &kv->received.data[i];
        const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
        int32_t shard = cpa_tokens_on(kv->ops->map, chunk->placement, kv->ops->rank).shard;
        int64_t count = tokens_in(kv, shard, chunk->end, piece->first, piece->count);
        cpa_kv_range range = {.table = chunk->table, .first = piece->first, .count = count, .dst_block = piece->block};
        if (count > 0) CPA_TRY(cpa_kv_transfers_add_range(&kv->transfers, transfer, range));
    }
    return CPA_OK;
}

/* Where the keys of a rank lie that the pieces bring. */
static cpa_status add_stretches(cpa_pass_kv *kv, int32_t rank, int64_t begin, int64_t end, cpa_kv_transfer *transfer) {
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &kv->received.data[i];
        const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
        const int32_t shard = cpa_tokens_on(kv->ops->map, chunk->placement, rank).shard;
        const int64_t count = tokens_in(kv, shard, chunk->end, piece->first, piece->count);
        const cpa_kv_stretch stretch = {rank, piece->chunk, piece->first, count, piece->block};
        if (count > 0) CPA_TRY(cpa_kv_transfers_add_stretch(&kv->transfers, transfer, stretch));
    }
    return CPA_OK;
}

/* Where the part of a rank lies in a transfer's staging: what arrives, or what is sent. */
static int64_t part_of(const cpa_pass_kv *kv, const cpa_kv_transfer *transfer, int32_t rank) {
    const cpa_kv_transfers *transfers = &kv->transfers;
    if (rank == kv->ops->rank) return cpa_kv_transfers_send_block(transfers, transfer);
    return cpa_kv_transfers_recv_block(transfers, transfer, transfers->region_of[rank]);
}

/* The blocks of a piece from all ranks (with_own), or all but this one, in the order of positions. */
static cpa_status add_table(cpa_pass_kv *kv, const cpa_kv_transfer *transfer, const cpa_kv_piece *piece, int with_own,
                            int64_t *entries) {
    const int32_t size = kv->ops->map.cp_size, run = kv->ops->map.interleave;
    const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
    const int64_t most = (int64_t)size * cpa_kv_blocks(kv->ops, piece->count + run);
    CPA_TRY(cpa_context_ensure_array(kv->ops, &kv->table, &kv->table_capacity, *entries + most, sizeof *kv->table));
    for (int64_t at = 0; at < piece->count; at += run) {
        for (int32_t shard = 0; shard < size; shard++) {
            int32_t rank = (shard + chunk->placement.rank) % size;
            if (rank == kv->ops->rank && !with_own) continue;
            int64_t tokens = tokens_in(kv, shard, chunk->end, piece->first + at, cpa_min64(run, piece->count - at));
            int64_t block = part_of(kv, transfer, rank) + piece->block + at / kv->ops->options.block_size;
            for (int64_t i = 0; i < cpa_kv_blocks(kv->ops, tokens); i++) kv->table[(*entries)++] = (int32_t)(block + i);
        }
    }
    return CPA_OK;
}

/* The own rows [first, end) of a chunk, local indices, over a piece: over the keys of all shards (with_own),
 * or those of the peers. */
static cpa_status add_item(cpa_pass_kv *kv, const cpa_kv_transfer *transfer, const cpa_kv_piece *piece, int64_t first,
                           int64_t end, int with_own, int64_t *n, int64_t *entries) {
    const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
    const cpa_chunk_share own = cpa_planned_share(kv->step, chunk, kv->ops->rank);
    if (first >= end) return CPA_OK;
    int64_t keys = 0, first_entry = *entries;
    for (int32_t shard = 0; shard < kv->ops->map.cp_size; shard++) {
        if (shard != own.tokens.shard || with_own) keys += tokens_in(kv, shard, chunk->end, piece->first, piece->count);
    }
    CPA_TRY(add_table(kv, transfer, piece, with_own, entries));
    kv->ops->items[(*n)++] = (cpa_attend_item){
        .q_row = chunk->row + first - own.first,
        .q_count = end - first,
        .q_first = first,
        .k_first = piece->first * (kv->ops->map.cp_size - !with_own),
        .k_count = keys,
        .table = first_entry,
        .q_set = own.tokens,
        .k_set = {with_own ? CPA_TOKENS_ALL : CPA_TOKENS_OTHERS, with_own ? 0 : own.tokens.shard},
    };
    return CPA_OK;
}

/* The first own row of a chunk, a local index, that begins with the own shard; those before it take one pass. */
static int64_t first_behind_own(const cpa_pass_kv *kv, const cpa_planned_chunk *chunk, cpa_chunk_share own) {
    return own.first + cpa_max64(0, cpa_min64(kv->now.own[chunk->form].one_pass_rows - chunk->row, own.rows));
}

/* What this rank attends of a segment: the rows of a form that see any of it. */
static cpa_status plan_receive(cpa_pass_kv *kv, const cpa_form *form, int64_t begin, int64_t end,
                               cpa_kv_transfer *transfer) {
    cpa_kv_attended *attended = &transfer->attended[form->index];
    int64_t n = 0, entries = 0;
    for (int64_t i = begin; i < end; i++) {
        const cpa_kv_piece *piece = &kv->received.data[i];
        const cpa_planned_chunk *chunk = &kv->step->chunks[piece->chunk];
        const cpa_chunk_share own = cpa_planned_share(kv->step, chunk, kv->ops->rank);
        const int causal = kv->now.masks[form->index].causal;
        const int64_t position = causal ? piece->first * kv->ops->map.cp_size : 0;
        const int64_t first = cpa_max64(own.first, cpa_tokens_before(kv->ops->map, own.tokens, position));
        const int64_t behind_own = first_behind_own(kv, chunk, own);
        if (chunk->form != form->index || first >= own.keys) continue;
        CPA_TRY(add_item(kv, transfer, piece, first, behind_own, 1, &n, &entries));
        CPA_TRY(add_item(kv, transfer, piece, cpa_max64(behind_own, first), own.keys, 0, &n, &entries));
        if (attended->rows == 0) attended->first_row = chunk->row + first - own.first;
        attended->rows += own.keys - first;
    }
    if (n == 0) return CPA_OK;
    CPA_TRY(cpa_kv_transfers_take_plan(&kv->transfers, &attended->plan));
    return cpa_row_plan_set(attended->plan, kv->ops, form, n, kv->table, entries, (cpa_attend_fusion){0});
}

/* Whether rows of some form take the own shard from the transfers. */
static int has_one_pass(const cpa_pass_kv *kv) {
    for (int32_t f = 0; f < kv->ops->forms.count; f++)
        if (kv->now.own[f].one_pass_rows > 0) return 1;
    return 0;
}

static cpa_status plan_segment(cpa_pass_kv *kv, int64_t begin, int64_t end) {
    const int32_t size = kv->ops->map.cp_size, rank = kv->ops->rank;
    cpa_kv_transfers *transfers = &kv->transfers;
    cpa_kv_transfer transfer = cpa_kv_transfers_open(transfers, 0);
    const int64_t own_blocks = sent_blocks(kv, rank, begin, end);
    const int receives = has_rows(kv, rank, begin, end);
    for (int32_t round = 1; round < size; round++) {
        int32_t peer = cpa_round_recv_peer(size, rank, round);
        cpa_kv_route route = {.peer = peer, .region = transfers->region_of[peer]};
        if (has_rows(kv, peer, begin, end)) route.send_blocks = own_blocks;
        if (receives) route.recv_blocks = sent_blocks(kv, peer, begin, end);
        CPA_TRY(cpa_kv_transfers_add_route(transfers, &transfer, route));
    }
    CPA_TRY(plan_send(kv, begin, end, &transfer));
    for (int32_t of = 0; of < size; of++) CPA_TRY(add_stretches(kv, of, begin, end, &transfer));
    const int attends_own = receives && has_one_pass(kv);
    cpa_kv_transfers_place(transfers, &transfer, kv->now.begin, attends_own ? own_blocks : 0);
    for (int32_t f = 0; receives && f < kv->ops->forms.count; f++)
        CPA_TRY(plan_receive(kv, &kv->ops->forms.list[f], begin, end, &transfer));
    return cpa_kv_transfers_add(transfers, &transfer);
}

/* ---- the own shard ---- */

/* (query, key) pairs of the shape of the cache, each for all heads, whose attention takes as long as is to be hidden of
 * the first segment, pieces [0, end). */
static int64_t pairs_to_hide(const cpa_pass_kv *kv, int64_t end) {
    const cpa_context_options *o = &kv->ops->options;
    int64_t blocks = 0;
    for (int32_t rank = 0; rank < kv->ops->map.cp_size; rank++) {
        if (rank != kv->ops->rank) blocks += sent_blocks(kv, rank, 0, end);
    }
    const int64_t flops_a_pair = 2 * (int64_t)o->shape.q_heads * columns_of(&o->shape);
    return TIMES_TO_HIDE * blocks * kv->transfers.staging.layouts[CPA_KV_OF_SHAPE].bytes * FLOPS_A_BYTE / flops_a_pair;
}

/* Keys of the own shard that the own row at a local index of a chunk sees, about. */
static int64_t own_keys_seen(const cpa_pass_kv *kv, const cpa_planned_chunk *chunk, int64_t row, int64_t keys) {
    const cpa_mask mask = kv->now.masks[chunk->form];
    const int64_t seen = mask.causal ? row + 1 : keys;
    return mask.window > 0 ? cpa_min64(seen, mask.window / kv->ops->map.cp_size + 1) : seen;
}

/* How many of the first rows of each form take one pass: the last ones, over the own shard, hide the first segment. */
static void choose_one_pass(cpa_pass_kv *kv, int64_t end) {
    const int64_t run = kv->ops->map.interleave, enough = pairs_to_hide(kv, end);
    int64_t pairs = 0;
    /* What is sent does not lie in its place in layers that want some blocks alone. */
    if (kv->now.wants_blocks) return;
    /* A device widens the blocks of a quantised cache, and latents are expanded, for each item: those of the peers twice
     * if some rows take one pass. */
    if (cpa_dtype_is_quantised(kv->ops->options.shape.kv_dtype)) return;
    for (int32_t f = 0; f < kv->ops->forms.count; f++)
        if (kv->ops->forms.list[f].is_expanded) return;
    for (int32_t f = 0; f < kv->ops->forms.count; f++)
        kv->now.own[f].one_pass_rows = kv->rows[f].n_runs > 0 ? kv->step->rows[f] : 0;
    for (int64_t i = kv->step->n_chunks; i-- > 0;) {
        const cpa_planned_chunk *chunk = &kv->step->chunks[i];
        const cpa_chunk_share own = cpa_planned_share(kv->step, chunk, kv->ops->rank);
        if (!cpa_planned_own_in_pass_kv(kv->step, chunk)) continue;
        for (int64_t row = own.keys, next; row > own.first; row = next) {
            next = cpa_max64((row - 1) / run * run, own.first);
            pairs += rows_of_cache(kv, chunk->form, (row - next) * own_keys_seen(kv, chunk, next, own.keys));
            kv->now.own[chunk->form].one_pass_rows = chunk->row + next - own.first;
            if (pairs >= enough) return;
        }
    }
    for (int32_t f = 0; f < kv->ops->forms.count; f++) kv->now.own[f].one_pass_rows = 0;
}

/* The other rows of a form, over the own shard. */
static cpa_status plan_own(cpa_pass_kv *kv, const cpa_form *form) {
    cpa_kv_own *of = &kv->now.own[form->index];
    int64_t n = 0;
    for (int64_t i = 0; i < kv->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &kv->step->chunks[i];
        const cpa_chunk_share own = cpa_planned_share(kv->step, chunk, kv->ops->rank);
        if (chunk->form != form->index || !cpa_planned_own_in_pass_kv(kv->step, chunk)) continue;
        const int64_t first = first_behind_own(kv, chunk, own);
        if (first < own.keys) kv->ops->items[n++] = cpa_planned_own_item(kv->step, chunk, first);
    }
    if (n == 0) return CPA_OK;
    CPA_TRY(cpa_kv_transfers_take_plan(&kv->transfers, &of->plan));
    const cpa_attend_fusion fusion = {.tables = {kv->step->tables, kv->now.table_set}};
    return cpa_row_plan_set(of->plan, kv->ops, form, n, NULL, 0, fusion);
}

/* ---- all of it ---- */

/* The piece behind those of the segment that begins with piece `begin`. */
static int64_t end_of_segment(const cpa_pass_kv *kv, int64_t begin) {
    const cpa_kv_pieces *pieces = &kv->received;
    int64_t end = begin;
    while (end < pieces->count && pieces->data[end].segment == pieces->data[begin].segment) end++;
    return end;
}

cpa_status cpa_pass_kv_plan_gather(cpa_pass_kv *kv) {
    CPA_TRY(cut_segments(kv));
    choose_one_pass(kv, end_of_segment(kv, 0));
    for (int32_t f = 0; f < kv->ops->forms.count; f++) CPA_TRY(plan_own(kv, &kv->ops->forms.list[f]));
    for (int64_t begin = 0, end; begin < kv->received.count; begin = end) {
        end = end_of_segment(kv, begin);
        CPA_TRY(plan_segment(kv, begin, end));
    }
    return CPA_OK;
}
