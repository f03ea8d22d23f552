/* The wire form of a step plan, little-endian, without padding:
 *     header   magic u32, version u32, step u64, flags u32, counts u64[9]: chunks, releases, swap_outs, swap_ins,
 *              copies, appends, nulled, blocks, tokens
 *     chunk    request u64, seq i32, placement u32, its rank i32, start i64, count i64, first_output i64,
 *              algorithm u32, flags u32, tokens i64
 *     release  seq i32
 *     move     request u64, rank i32, from i32, to i32: swap_outs, swap_ins, copies
 *     append   seq i32, rank i32, count i32, blocks i64
 *     void     seq i32, rank i32, entry i32
 *     block    i32, -1: none
 *     token    u32 */
#include <inttypes.h>

#include "base/array.h"
#include "base/check.h"
#include "src/schedule/step_plan_wire.h"

enum {
    WIRE_MAGIC = 0x50415043, /* "CPAP" */
    WIRE_VERSION = 3,
    HEADER_BYTES = 4 + 4 + 8 + 4 + 9 * 8,
    CHUNK_BYTES = 8 + 4 + 4 + 4 + 8 + 8 + 8 + 4 + 4 + 8,
    RELEASE_BYTES = 4,
    MOVE_BYTES = 8 + 4 + 4 + 4,
    APPEND_BYTES = 4 + 4 + 4 + 8,
    NULLED_BYTES = 4 + 4 + 4,
    BLOCK_BYTES = 4,
    TOKEN_BYTES = 4,
    CHUNK_FLAGS = CPA_CHUNK_FIRST | CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES | CPA_CHUNK_DECODE
};

static void put_u32(uint8_t **at, uint32_t value) {
    for (int i = 0; i < 4; i++) *(*at)++ = (uint8_t)(value >> 8 * i);
}

static void put_u64(uint8_t **at, uint64_t value) {
    for (int i = 0; i < 8; i++) *(*at)++ = (uint8_t)(value >> 8 * i);
}

static uint32_t get_u32(const uint8_t **at) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value |= (uint32_t)(*at)[i] << 8 * i;
    *at += 4;
    return value;
}

static uint64_t get_u64(const uint8_t **at) {
    uint64_t low = get_u32(at);
    return low | (uint64_t)get_u32(at) << 32;
}

static int32_t get_i32(const uint8_t **at) {
    return (int32_t)get_u32(at);
}

static int64_t get_i64(const uint8_t **at) {
    return (int64_t)get_u64(at);
}

static void put_chunk(uint8_t **at, const cpa_plan_chunk *chunk) {
    put_u64(at, chunk->request);
    put_u32(at, (uint32_t)chunk->seq);
    put_u32(at, (uint32_t)chunk->placement.kind);
    put_u32(at, (uint32_t)chunk->placement.rank);
    put_u64(at, (uint64_t)chunk->start);
    put_u64(at, (uint64_t)chunk->count);
    put_u64(at, (uint64_t)chunk->first_output);
    put_u32(at, (uint32_t)chunk->algorithm);
    put_u32(at, chunk->flags);
    put_u64(at, (uint64_t)chunk->tokens);
}

static cpa_plan_chunk get_chunk(const uint8_t **at) {
    cpa_plan_chunk chunk;
    chunk.request = get_u64(at);
    chunk.seq = get_i32(at);
    chunk.placement.kind = (cpa_placement_kind)get_u32(at);
    chunk.placement.rank = get_i32(at);
    chunk.start = get_i64(at);
    chunk.count = get_i64(at);
    chunk.first_output = get_i64(at);
    chunk.algorithm = (cpa_algorithm)get_u32(at);
    chunk.flags = get_u32(at);
    chunk.tokens = get_i64(at);
    return chunk;
}

static void put_append(uint8_t **at, const cpa_plan_append *append) {
    put_u32(at, (uint32_t)append->seq);
    put_u32(at, (uint32_t)append->rank);
    put_u32(at, (uint32_t)append->count);
    put_u64(at, (uint64_t)append->blocks);
}

static cpa_plan_append get_append(const uint8_t **at) {
    cpa_plan_append append;
    append.seq = get_i32(at);
    append.rank = get_i32(at);
    append.count = get_i32(at);
    append.blocks = get_i64(at);
    return append;
}

static void put_moves(uint8_t **at, const cpa_block_move *moves, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        put_u64(at, moves[i].request);
        put_u32(at, (uint32_t)moves[i].rank);
        put_u32(at, (uint32_t)moves[i].from);
        put_u32(at, (uint32_t)moves[i].to);
    }
}

static cpa_block_move get_move(const uint8_t **at) {
    cpa_block_move move;
    move.request = get_u64(at);
    move.rank = get_i32(at);
    move.from = get_i32(at);
    move.to = get_i32(at);
    return move;
}

static void put_nulled(uint8_t **at, const cpa_plan_nulled *entry) {
    put_u32(at, (uint32_t)entry->seq);
    put_u32(at, (uint32_t)entry->rank);
    put_u32(at, (uint32_t)entry->entry);
}

static cpa_plan_nulled get_nulled(const uint8_t **at) {
    cpa_plan_nulled entry;
    entry.seq = get_i32(at);
    entry.rank = get_i32(at);
    entry.entry = get_i32(at);
    return entry;
}

cpa_status cpa_step_plan_encode(const cpa_step_plan *plan, uint8_t **buffer, int64_t *capacity, int64_t *bytes,
                                cpa_error *err) {
    int64_t need = HEADER_BYTES + plan->n_chunks * CHUNK_BYTES + plan->n_releases * RELEASE_BYTES +
                   (plan->n_swap_outs + plan->n_swap_ins + plan->n_copies) * MOVE_BYTES +
                   plan->n_appends * APPEND_BYTES + plan->n_nulled * NULLED_BYTES + plan->n_block_ids * BLOCK_BYTES +
                   plan->n_token_ids * TOKEN_BYTES;
    if (!cpa_array_reserve(buffer, capacity, need, 1))
        return cpa_fail(err, CPA_NO_MEMORY, "step plan: no memory for a message of %" PRId64 " bytes", need);
    uint8_t *at = *buffer;
    put_u32(&at, WIRE_MAGIC);
    put_u32(&at, WIRE_VERSION);
    put_u64(&at, plan->step);
    put_u32(&at, plan->flags);
    put_u64(&at, (uint64_t)plan->n_chunks);
    put_u64(&at, (uint64_t)plan->n_releases);
    put_u64(&at, (uint64_t)plan->n_swap_outs);
    put_u64(&at, (uint64_t)plan->n_swap_ins);
    put_u64(&at, (uint64_t)plan->n_copies);
    put_u64(&at, (uint64_t)plan->n_appends);
    put_u64(&at, (uint64_t)plan->n_nulled);
    put_u64(&at, (uint64_t)plan->n_block_ids);
    put_u64(&at, (uint64_t)plan->n_token_ids);
    for (int64_t i = 0; i < plan->n_chunks; i++) put_chunk(&at, &plan->chunks[i]);
    for (int64_t i = 0; i < plan->n_releases; i++) put_u32(&at, (uint32_t)plan->releases[i]);
    put_moves(&at, plan->swap_outs, plan->n_swap_outs);
    put_moves(&at, plan->swap_ins, plan->n_swap_ins);
    put_moves(&at, plan->copies, plan->n_copies);
    for (int64_t i = 0; i < plan->n_appends; i++) put_append(&at, &plan->appends[i]);
    for (int64_t i = 0; i < plan->n_nulled; i++) put_nulled(&at, &plan->nulled[i]);
    for (int64_t i = 0; i < plan->n_block_ids; i++) put_u32(&at, (uint32_t)plan->block_ids[i]);
    for (int64_t i = 0; i < plan->n_token_ids; i++) put_u32(&at, plan->token_ids[i]);
    *bytes = need;
    return CPA_OK;
}

typedef struct wire_header {
    uint64_t step;
    uint32_t flags;
    int64_t chunks, releases, swap_outs, swap_ins, copies, appends, nulled, blocks, tokens;
} wire_header;

/* One array that claims n entries: no more than the bytes left can hold, and no more than `most`. */
static cpa_status check_count(const char *what, int64_t n, int64_t entry_bytes, int64_t most, int64_t *bytes_left,
                              cpa_error *err) {
    if (n < 0 || n > *bytes_left / entry_bytes)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " %s do not fit the %" PRId64 " bytes that are left", n,
                        what, *bytes_left);
    if (n > most)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " %s; expected at most %" PRId64, n, what, most);
    *bytes_left -= n * entry_bytes;
    return CPA_OK;
}

/* Reads the header and proves that the arrays fill the message exactly. */
static cpa_status get_header(const uint8_t **at, int64_t bytes, const cpa_plan_limits *limits, wire_header *header,
                             cpa_error *err) {
    if (bytes < HEADER_BYTES)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " bytes; the header alone has %d", bytes, HEADER_BYTES);
    uint32_t magic = get_u32(at), version = get_u32(at);
    if (magic != WIRE_MAGIC)
        return cpa_fail(err, CPA_INVALID, "step plan: begins with %08" PRIx32 "; expected %08x", magic, WIRE_MAGIC);
    if (version != WIRE_VERSION)
        return cpa_fail(err, CPA_INVALID, "step plan: version %" PRIu32 "; expected %d", version, WIRE_VERSION);
    header->step = get_u64(at);
    header->flags = get_u32(at);
    header->chunks = get_i64(at);
    header->releases = get_i64(at);
    header->swap_outs = get_i64(at);
    header->swap_ins = get_i64(at);
    header->copies = get_i64(at);
    header->appends = get_i64(at);
    header->nulled = get_i64(at);
    header->blocks = get_i64(at);
    header->tokens = get_i64(at);
    if (header->flags & ~(uint32_t)CPA_PLAN_STOP)
        return cpa_fail(err, CPA_INVALID, "step plan: unknown flags %#" PRIx32, header->flags);
    int64_t left = bytes - HEADER_BYTES, max_appends = (int64_t)limits->max_seqs * limits->cp_size;
    CPA_TRY(check_count("chunks", header->chunks, CHUNK_BYTES, limits->max_seqs, &left, err));
    CPA_TRY(check_count("releases", header->releases, RELEASE_BYTES, limits->max_seqs, &left, err));
    CPA_TRY(check_count("swap-outs", header->swap_outs, MOVE_BYTES, INT64_MAX, &left, err));
    CPA_TRY(check_count("swap-ins", header->swap_ins, MOVE_BYTES, INT64_MAX, &left, err));
    CPA_TRY(check_count("copies", header->copies, MOVE_BYTES, limits->max_seqs, &left, err));
    CPA_TRY(check_count("appends", header->appends, APPEND_BYTES, max_appends, &left, err));
    CPA_TRY(check_count("nulled", header->nulled, NULLED_BYTES, INT64_MAX, &left, err));
    CPA_TRY(check_count("blocks", header->blocks, BLOCK_BYTES, INT64_MAX, &left, err));
    CPA_TRY(check_count("tokens", header->tokens, TOKEN_BYTES, INT64_MAX, &left, err));
    if (left != 0) return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " bytes too many", left);
    return CPA_OK;
}

/* Entry `index` of `what` names something outside [0, end). */
static cpa_status check_index(const char *what, int64_t index, const char *name, int64_t value, int64_t end,
                              cpa_error *err) {
    if (value >= 0 && value < end) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "step plan: %s %" PRId64 " has %s %" PRId64 "; expected 0 to %" PRId64, what,
                    index, name, value, end - 1);
}

/* Entry `index` of `what` takes [first, first + count) of an array of `end` entries. */
static cpa_status check_range(const char *what, int64_t index, int64_t first, int64_t count, int64_t end,
                              cpa_error *err) {
    if (count > 0 && first >= 0 && first <= end && count <= end - first) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "step plan: %s %" PRId64 " takes %" PRId64 " entries from %" PRId64 " on; there are %" PRId64, what,
                    index, count, first, end);
}

static cpa_status check_chunk(const cpa_plan_chunk *chunk, int64_t index, const wire_header *header,
                              const cpa_plan_limits *limits, cpa_error *err) {
    CPA_TRY(check_index("chunk", index, "sequence", chunk->seq, limits->max_seqs, err));
    if (chunk->placement.kind != CPA_SHARDED && chunk->placement.kind != CPA_ON_RANK)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown placement %u", index,
                        (unsigned)chunk->placement.kind);
    CPA_TRY(check_index("chunk", index, "rank", chunk->placement.rank, limits->cp_size, err));
    CPA_TRY(check_range("chunk", index, chunk->tokens, chunk->count, header->tokens, err));
    CPA_TRY(check_index("chunk", index, "start", chunk->start, INT64_MAX - chunk->count, err));
    CPA_TRY(check_range("chunk", index, chunk->tokens, cpa_plan_chunk_tokens(chunk), header->tokens, err));
    CPA_TRY(check_index("chunk", index, "first output", chunk->first_output, INT64_MAX, err));
    if (chunk->algorithm != CPA_PASS_KV && chunk->algorithm != CPA_PASS_Q)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown algorithm %u", index,
                        (unsigned)chunk->algorithm);
    if (chunk->flags & ~(uint32_t)CHUNK_FLAGS)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown flags %#" PRIx32, index,
                        chunk->flags);
    return CPA_OK;
}

/* n moves from blocks [0, froms) to blocks [0, tos). */
static cpa_status check_moves(const char *what, const uint8_t **at, int64_t n, int64_t froms, int64_t tos,
                              const cpa_plan_limits *limits, cpa_error *err) {
    for (int64_t i = 0; i < n; i++) {
        cpa_block_move move = get_move(at);
        CPA_TRY(check_index(what, i, "rank", move.rank, limits->cp_size, err));
        CPA_TRY(check_index(what, i, "source", move.from, froms, err));
        CPA_TRY(check_index(what, i, "destination", move.to, tos, err));
    }
    return CPA_OK;
}

/* Every entry within the limits, before anything is stored. */
static cpa_status check_entries(const uint8_t *at, const wire_header *header, const cpa_plan_limits *limits,
                                cpa_error *err) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < header->chunks; i++) {
        cpa_plan_chunk chunk = get_chunk(&at);
        CPA_TRY(check_chunk(&chunk, i, header, limits, err));
        if (chunk.count > limits->max_tokens - tokens)
            return cpa_fail(err, CPA_INVALID, "step plan: more than %" PRId64 " tokens up to chunk %" PRId64,
                            limits->max_tokens, i);
        tokens += chunk.count;
    }
    for (int64_t i = 0; i < header->releases; i++)
        CPA_TRY(check_index("release", i, "sequence", get_i32(&at), limits->max_seqs, err));
    int64_t device = limits->num_blocks, host = limits->host_blocks;
    CPA_TRY(check_moves("swap-out", &at, header->swap_outs, device, host, limits, err));
    CPA_TRY(check_moves("swap-in", &at, header->swap_ins, host, device, limits, err));
    CPA_TRY(check_moves("copy", &at, header->copies, device, device, limits, err));
    for (int64_t i = 0; i < header->appends; i++) {
        cpa_plan_append append = get_append(&at);
        CPA_TRY(check_index("append", i, "sequence", append.seq, limits->max_seqs, err));
        CPA_TRY(check_index("append", i, "rank", append.rank, limits->cp_size, err));
        CPA_TRY(check_range("append", i, append.blocks, append.count, header->blocks, err));
    }
    for (int64_t i = 0; i < header->nulled; i++) {
        cpa_plan_nulled entry = get_nulled(&at);
        CPA_TRY(check_index("void", i, "sequence", entry.seq, limits->max_seqs, err));
        CPA_TRY(check_index("void", i, "rank", entry.rank, limits->cp_size, err));
        CPA_TRY(check_index("void", i, "entry", entry.entry, limits->num_blocks, err));
    }
    for (int64_t i = 0; i < header->blocks; i++) {
        int32_t block = get_i32(&at);
        if (block != -1) CPA_TRY(check_index("block", i, "id", block, limits->num_blocks, err));
    }
    return CPA_OK;
}

cpa_status cpa_step_plan_decode(const uint8_t *buffer, int64_t bytes, const cpa_plan_limits *limits, cpa_step_plan *out,
                                cpa_error *err) {
    const uint8_t *at = buffer;
    wire_header header = {0};
    CPA_TRY(get_header(&at, bytes, limits, &header, err));
    CPA_TRY(check_entries(at, &header, limits, err));
    if (!cpa_step_plan_reserve(out, header.chunks, header.releases, header.appends, header.blocks, header.tokens) ||
        !cpa_step_plan_reserve_moves(out, header.swap_outs, header.swap_ins, header.copies, header.nulled))
        return cpa_fail(err, CPA_NO_MEMORY, "step plan: no memory for a plan of %" PRId64 " bytes", bytes);
    out->step = header.step;
    out->flags = header.flags;
    out->n_chunks = header.chunks;
    out->n_releases = header.releases;
    out->n_swap_outs = header.swap_outs;
    out->n_swap_ins = header.swap_ins;
    out->n_copies = header.copies;
    out->n_appends = header.appends;
    out->n_nulled = header.nulled;
    out->n_block_ids = header.blocks;
    out->n_token_ids = header.tokens;
    for (int64_t i = 0; i < header.chunks; i++) out->chunks[i] = get_chunk(&at);
    for (int64_t i = 0; i < header.releases; i++) out->releases[i] = get_i32(&at);
    for (int64_t i = 0; i < header.swap_outs; i++) out->swap_outs[i] = get_move(&at);
    for (int64_t i = 0; i < header.swap_ins; i++) out->swap_ins[i] = get_move(&at);
    for (int64_t i = 0; i < header.copies; i++) out->copies[i] = get_move(&at);
    for (int64_t i = 0; i < header.appends; i++) out->appends[i] = get_append(&at);
    for (int64_t i = 0; i < header.nulled; i++) out->nulled[i] = get_nulled(&at);
    for (int64_t i = 0; i < header.blocks; i++) out->block_ids[i] = get_i32(&at);
    for (int64_t i = 0; i < header.tokens; i++) out->token_ids[i] = get_u32(&at);
    return CPA_OK;
}
