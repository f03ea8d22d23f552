/* The wire form of a step plan, little-endian, without padding:
 *     header   magic u32, version u32, step u64, flags u32, counts u64[18]: chunks, releases, swap_outs, swap_ins,
 *              copies, appends, nulled, discards, cuts, samplings, biases, blocks, tokens, transfer blocks,
 *              transfers, stores, loads, parents
 *     chunk    request u64, seq i32, placement u32, its rank i32, start i64, count i64, first_output i64,
 *              algorithm u32, flags u32, tokens i64, given i64, drafts i64, parents i64, sampling i64
 *     release  seq i32
 *     move     request u64, group i32, rank i32, from i32, to i32: swap_outs, swap_ins, copies
 *     append   seq i32, group i32, rank i32, count i32, blocks i64
 *     void     seq i32, group i32, rank i32, entry i32
 *     discard  request u64, position i64
 *     cut      seq i32, tokens i64
 *     sampling the fields of src/schedule/drawing.h, 4 bytes each, seed u64, logprobs u32, top_logprobs i32,
 *              prompt_logprobs u32, top_prompt_logprobs i32, prompt_tokens i64, constrained u32, min_tokens i64,
 *              biases i64, n_biases i64, n_ends i64
 *     bias     token u32, value f32
 *     block    i32, -1: none
 *     token    u32
 *     transfer block  group i32, rank i32, entry i32, block i32
 *     transfer request u64, placement u32, its rank i32, tokens i64, digests i64, blocks i64, their count i64,
 *              imports u32
 *     store, load  group i32, rank i32, host i32, slot i32, ranks u32, digest u64[4]
 *     parent   i32, -1: none */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "src/cache/parcel.h"
#include "src/schedule/step_plan_wire.h"

enum {
    WIRE_MAGIC = 0x50415043, /* "CPAP" */
    WIRE_VERSION = 12,
    CHUNK_FLAGS = CPA_CHUNK_FIRST | CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES | CPA_CHUNK_DECODE | CPA_CHUNK_DRAWN
};

/* ---- what a message is made of ---- */

/* A field of an entry: where it lies there, and its bytes, 4 or 8, there and in a message. */
typedef struct wire_field {
    size_t offset, bytes;
} wire_field;

#define FIELD(type, name)                                                                                              \
    { offsetof(type, name), sizeof((type *)NULL)->name }

static const wire_field CHUNK[] = {
    FIELD(cpa_plan_chunk, request),        FIELD(cpa_plan_chunk, seq),       FIELD(cpa_plan_chunk, placement.kind),
    FIELD(cpa_plan_chunk, placement.rank), FIELD(cpa_plan_chunk, start),     FIELD(cpa_plan_chunk, count),
    FIELD(cpa_plan_chunk, first_output),   FIELD(cpa_plan_chunk, algorithm), FIELD(cpa_plan_chunk, flags),
    FIELD(cpa_plan_chunk, tokens),         FIELD(cpa_plan_chunk, given),     FIELD(cpa_plan_chunk, drafts),
    FIELD(cpa_plan_chunk, parents),        FIELD(cpa_plan_chunk, sampling),
};
static const wire_field MOVE[] = {FIELD(cpa_block_move, request), FIELD(cpa_block_move, group),
                                  FIELD(cpa_block_move, rank), FIELD(cpa_block_move, from), FIELD(cpa_block_move, to)};
static const wire_field APPEND[] = {FIELD(cpa_plan_append, seq), FIELD(cpa_plan_append, group),
                                    FIELD(cpa_plan_append, rank), FIELD(cpa_plan_append, count),
                                    FIELD(cpa_plan_append, blocks)};
static const wire_field NULLED[] = {FIELD(cpa_plan_nulled, seq), FIELD(cpa_plan_nulled, group),
                                    FIELD(cpa_plan_nulled, rank), FIELD(cpa_plan_nulled, entry)};
static const wire_field DISCARD[] = {FIELD(cpa_plan_discard, request), FIELD(cpa_plan_discard, position)};
static const wire_field CUT[] = {FIELD(cpa_plan_cut, seq), FIELD(cpa_plan_cut, tokens)};
#define DRAWING(type, field, least, most, none) FIELD(cpa_plan_sampling, field),
static const wire_field SAMPLING[] = {
    CPA_DRAWING_FIELDS(DRAWING) FIELD(cpa_plan_sampling, seed),
    FIELD(cpa_plan_sampling, logprobs),
    FIELD(cpa_plan_sampling, top_logprobs),
    FIELD(cpa_plan_sampling, prompt_logprobs),
    FIELD(cpa_plan_sampling, top_prompt_logprobs),
    FIELD(cpa_plan_sampling, prompt_tokens),
    FIELD(cpa_plan_sampling, constrained),
    FIELD(cpa_plan_sampling, min_tokens),
    FIELD(cpa_plan_sampling, biases),
    FIELD(cpa_plan_sampling, n_biases),
    FIELD(cpa_plan_sampling, n_ends),
};
#undef DRAWING
static const wire_field BIAS[] = {FIELD(cpa_plan_bias, token), FIELD(cpa_plan_bias, value)};
static const wire_field TRANSFER_BLOCK[] = {FIELD(cpa_plan_transfer_block, group), FIELD(cpa_plan_transfer_block, rank),
                                            FIELD(cpa_plan_transfer_block, entry),
                                            FIELD(cpa_plan_transfer_block, block)};
static const wire_field TRANSFER[] = {
    FIELD(cpa_plan_transfer, request),        FIELD(cpa_plan_transfer, placement.kind),
    FIELD(cpa_plan_transfer, placement.rank), FIELD(cpa_plan_transfer, tokens),
    FIELD(cpa_plan_transfer, digests),        FIELD(cpa_plan_transfer, blocks),
    FIELD(cpa_plan_transfer, n_blocks),       FIELD(cpa_plan_transfer, imports)};
static const wire_field DISK_MOVE[] = {
    FIELD(cpa_disk_move, group),     FIELD(cpa_disk_move, rank),      FIELD(cpa_disk_move, host),
    FIELD(cpa_disk_move, slot),      FIELD(cpa_disk_move, ranks),     FIELD(cpa_disk_move, digest[0]),
    FIELD(cpa_disk_move, digest[1]), FIELD(cpa_disk_move, digest[2]), FIELD(cpa_disk_move, digest[3])};
static const wire_field WORD[] = {{0, 4}};

/* The arrays of a plan, in the order of a message. */
typedef enum wire_array_index {
    CHUNKS = 0,
    RELEASES,
    SWAP_OUTS,
    SWAP_INS,
    COPIES,
    APPENDS,
    NULLED_ENTRIES,
    DISCARDS,
    CUTS,
    SAMPLINGS,
    BIASES,
    BLOCKS,
    TOKENS,
    TRANSFER_BLOCKS,
    TRANSFERS,
    STORES,
    LOADS,
    PARENTS,
    ARRAYS
} wire_array_index;

static const struct {
    const char *name;
    size_t entries, count; /* offsets in cpa_step_plan of the array and of its count */
    size_t stride;
    size_t n_fields;
    const wire_field *fields;
} arrays[ARRAYS] = {
#define ARRAY(text, name, fields)                                                                                      \
    {                                                                                                                  \
        text, offsetof(cpa_step_plan, name), offsetof(cpa_step_plan, n_##name), sizeof *((cpa_step_plan *)NULL)->name, \
            sizeof fields / sizeof fields[0], fields                                                                   \
    }
    [CHUNKS] = ARRAY("chunks", chunks, CHUNK),
    [RELEASES] = ARRAY("releases", releases, WORD),
    [SWAP_OUTS] = ARRAY("swap-outs", swap_outs, MOVE),
    [SWAP_INS] = ARRAY("swap-ins", swap_ins, MOVE),
    [COPIES] = ARRAY("copies", copies, MOVE),
    [APPENDS] = ARRAY("appends", appends, APPEND),
    [NULLED_ENTRIES] = ARRAY("nulled", nulled, NULLED),
    [BLOCKS] = ARRAY("blocks", block_ids, WORD),
    [DISCARDS] = ARRAY("discards", discards, DISCARD),
    [SAMPLINGS] = ARRAY("samplings", samplings, SAMPLING),
    [BIASES] = ARRAY("biases", biases, BIAS),
    [CUTS] = ARRAY("cuts", cuts, CUT),
    [TOKENS] = ARRAY("tokens", token_ids, WORD),
    [PARENTS] = ARRAY("parents", parents, WORD),
    [TRANSFERS] = ARRAY("transfers", transfers, TRANSFER),
    [STORES] = ARRAY("stores", stores, DISK_MOVE),
    [LOADS] = ARRAY("loads", loads, DISK_MOVE),
    [TRANSFER_BLOCKS] = ARRAY("transfer blocks", transfer_blocks, TRANSFER_BLOCK),
#undef ARRAY
};

enum { HEADER_BYTES = 4 + 4 + 8 + 4 + ARRAYS * 8 };

static int64_t entry_bytes(int index) {
    size_t bytes = 0;
    for (size_t i = 0; i < arrays[index].n_fields; i++) bytes += arrays[index].fields[i].bytes;
    return (int64_t)bytes;
}

static void *entry_at(const cpa_step_plan *plan, int index, int64_t i) {
    char *entries;
    memcpy(&entries, (const char *)plan + arrays[index].entries, sizeof entries);
    return entries + (size_t)i * arrays[index].stride;
}

static int64_t count_of(const cpa_step_plan *plan, int index) {
    int64_t count;
    memcpy(&count, (const char *)plan + arrays[index].count, sizeof count);
    return count;
}

/* ---- bytes ---- */

static void put(uint8_t **at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) *(*at)++ = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t **at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint64_t)(*at)[i] << 8 * i;
    *at += bytes;
    return value;
}

static void put_entry(uint8_t **at, int index, const void *entry) {
    for (size_t i = 0; i < arrays[index].n_fields; i++) {
        const wire_field *field = &arrays[index].fields[i];
        const char *from = (const char *)entry + field->offset;
        uint32_t word;
        uint64_t wide;
        memcpy(&word, from, sizeof word);
        wide = word;
        if (field->bytes == sizeof wide) memcpy(&wide, from, sizeof wide);
        put(at, wide, field->bytes);
    }
}

static void get_entry(const uint8_t **at, int index, void *entry) {
    for (size_t i = 0; i < arrays[index].n_fields; i++) {
        const wire_field *field = &arrays[index].fields[i];
        const uint64_t wide = get(at, field->bytes);
        const uint32_t word = (uint32_t)wide;
        memcpy((char *)entry + field->offset, field->bytes == sizeof wide ? (const void *)&wide : &word, field->bytes);
    }
}

static int32_t get_word(const uint8_t **at) {
    return (int32_t)get(at, sizeof(int32_t));
}

/* ---- a plan ---- */

cpa_status cpa_step_plan_encode(const cpa_step_plan *plan, uint8_t **buffer, int64_t *capacity, int64_t *bytes,
                                cpa_error *err) {
    int64_t need = HEADER_BYTES;
    for (int array = 0; array < ARRAYS; array++) need += count_of(plan, array) * entry_bytes(array);
    if (!cpa_array_reserve(buffer, capacity, need, 1))
        return cpa_fail(err, CPA_NO_MEMORY, "step plan: no memory for a message of %" PRId64 " bytes", need);
    uint8_t *at = *buffer;
    put(&at, WIRE_MAGIC, 4);
    put(&at, WIRE_VERSION, 4);
    put(&at, plan->step, 8);
    put(&at, plan->flags, 4);
    for (int array = 0; array < ARRAYS; array++) put(&at, (uint64_t)count_of(plan, array), 8);
    for (int array = 0; array < ARRAYS; array++) {
        for (int64_t i = 0; i < count_of(plan, array); i++) put_entry(&at, array, entry_at(plan, array, i));
    }
    *bytes = need;
    return CPA_OK;
}

typedef struct wire_header {
    uint64_t step;
    uint32_t flags;
    int64_t counts[ARRAYS];
    const uint8_t *blocks, *parents; /* the bytes of these arrays */
} wire_header;

/* One array that claims n entries: no more than the bytes left can hold, and no more than `most`. */
static cpa_status check_count(int array, int64_t n, int64_t most, int64_t *bytes_left, cpa_error *err) {
    const char *what = arrays[array].name;
    if (n < 0 || n > *bytes_left / entry_bytes(array))
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " %s do not fit the %" PRId64 " bytes that are left", n,
                        what, *bytes_left);
    if (n > most)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " %s; expected at most %" PRId64, n, what, most);
    *bytes_left -= n * entry_bytes(array);
    return CPA_OK;
}

/* Reads the header and proves that the arrays fill the message exactly. */
static cpa_status get_header(const uint8_t **at, int64_t bytes, const cpa_plan_limits *limits, wire_header *header,
                             cpa_error *err) {
    if (bytes < HEADER_BYTES)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " bytes; the header alone has %d", bytes, HEADER_BYTES);
    const uint32_t magic = (uint32_t)get(at, 4), version = (uint32_t)get(at, 4);
    if (magic != WIRE_MAGIC)
        return cpa_fail(err, CPA_INVALID, "step plan: begins with %08" PRIx32 "; expected %08x", magic, WIRE_MAGIC);
    if (version != WIRE_VERSION)
        return cpa_fail(err, CPA_INVALID, "step plan: version %" PRIu32 "; expected %d", version, WIRE_VERSION);
    header->step = get(at, 8);
    header->flags = (uint32_t)get(at, 4);
    for (int array = 0; array < ARRAYS; array++) header->counts[array] = (int64_t)get(at, 8);
    if (header->flags & ~(uint32_t)CPA_PLAN_STOP)
        return cpa_fail(err, CPA_INVALID, "step plan: unknown flags %#" PRIx32, header->flags);
    int64_t left = bytes - HEADER_BYTES, most[ARRAYS];
    for (int array = 0; array < ARRAYS; array++) most[array] = INT64_MAX;
    most[CHUNKS] = most[RELEASES] = most[DISCARDS] = most[CUTS] = most[SAMPLINGS] = most[TRANSFERS] = limits->max_seqs;
    most[APPENDS] = most[COPIES] = (int64_t)limits->max_seqs * limits->cp_size * limits->groups.count;
    for (int array = 0; array < ARRAYS; array++)
        CPA_TRY(check_count(array, header->counts[array], most[array], &left, err));
    if (left != 0) return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " bytes too many", left);
    header->parents = *at + bytes - HEADER_BYTES - header->counts[PARENTS] * entry_bytes(PARENTS);
    header->blocks = header->parents;
    for (int array = BLOCKS; array < PARENTS; array++) header->blocks -= header->counts[array] * entry_bytes(array);
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

/* What a chunk says of the token that it emits and of the one that it begins with. */
static cpa_status check_drawing(const cpa_plan_chunk *chunk, int64_t index, const wire_header *header, cpa_error *err) {
    if (chunk->given != -1) CPA_TRY(check_index("chunk", index, "given token", chunk->given, 1LL << 32, err));
    if (chunk->sampling != -1)
        CPA_TRY(check_index("chunk", index, "sampling", chunk->sampling, header->counts[SAMPLINGS], err));
    if (chunk->flags & CPA_CHUNK_DRAWN && (chunk->count != 1 || chunk->flags & CPA_CHUNK_FIRST))
        return cpa_fail(err, CPA_INVALID,
                        "step plan: chunk %" PRId64 " of %" PRId64
                        " tokens goes on with a token that was drawn; expected one token, and no first chunk",
                        index, chunk->count);
    return CPA_OK;
}

/* Drafts of a tree come behind lower ones: nobody walks in circles. */
static cpa_status check_tree(const cpa_plan_chunk *chunk, int64_t index, const wire_header *header, cpa_error *err) {
    if (chunk->parents == -1) return CPA_OK;
    CPA_TRY(check_range("chunk", index, chunk->parents, chunk->drafts, header->counts[PARENTS], err));
    const uint8_t *at = header->parents + chunk->parents * entry_bytes(PARENTS);
    for (int64_t i = 0; i < chunk->drafts; i++) {
        const int32_t parent = get_word(&at);
        if (parent >= -1 && parent < i) continue;
        return cpa_fail(err, CPA_INVALID,
                        "step plan: draft %" PRId64 " of chunk %" PRId64 " comes behind draft %" PRId32
                        "; expected -1 to %" PRId64,
                        i, index, parent, i - 1);
    }
    return CPA_OK;
}

/* A chunk with drafts is what is certain, one token at least, and the drafts; it brings the tokens that it is given
 * behind its own. */
static cpa_status check_drafts(const cpa_plan_chunk *chunk, int64_t index, const wire_header *header, cpa_error *err) {
    const uint32_t decodes = CPA_CHUNK_EMITS | CPA_CHUNK_DECODE;
    if (chunk->drafts == 0 && chunk->parents == -1) return CPA_OK;
    if (chunk->drafts < 0 || chunk->count <= chunk->drafts || (chunk->flags & decodes) != decodes ||
        chunk->flags & (CPA_CHUNK_DRAWN | CPA_CHUNK_FINISHES))
        return cpa_fail(err, CPA_INVALID,
                        "step plan: chunk %" PRId64 " of %" PRId64 " tokens and flags %#" PRIx32 " has %" PRId64
                        " drafts; expected fewer than tokens, in a decode chunk that goes on",
                        index, chunk->count, chunk->flags, chunk->drafts);
    CPA_TRY(check_tree(chunk, index, header, err));
    if (chunk->given == -1) return CPA_OK;
    return check_range("chunk", index, chunk->tokens, cpa_plan_chunk_tokens(chunk) + chunk->drafts,
                       header->counts[TOKENS], err);
}

static cpa_status check_chunk(const cpa_plan_chunk *chunk, int64_t index, const wire_header *header,
                              const cpa_plan_limits *limits, cpa_error *err) {
    CPA_TRY(check_index("chunk", index, "sequence", chunk->seq, limits->max_seqs, err));
    if (chunk->placement.kind != CPA_SHARDED && chunk->placement.kind != CPA_ON_RANK)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown placement %u", index,
                        (unsigned)chunk->placement.kind);
    CPA_TRY(check_index("chunk", index, "rank", chunk->placement.rank, limits->cp_size, err));
    CPA_TRY(check_range("chunk", index, chunk->tokens, chunk->count, header->counts[TOKENS], err));
    CPA_TRY(check_index("chunk", index, "start", chunk->start, INT64_MAX - chunk->count, err));
    CPA_TRY(check_range("chunk", index, chunk->tokens, cpa_plan_chunk_tokens(chunk), header->counts[TOKENS], err));
    CPA_TRY(check_index("chunk", index, "first output", chunk->first_output, INT64_MAX, err));
    if (chunk->algorithm != CPA_PASS_KV && chunk->algorithm != CPA_PASS_Q)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown algorithm %u", index,
                        (unsigned)chunk->algorithm);
    if (chunk->flags & ~(uint32_t)CHUNK_FLAGS)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown flags %#" PRIx32, index,
                        chunk->flags);
    CPA_TRY(check_drawing(chunk, index, header, err));
    return check_drafts(chunk, index, header, err);
}

/* Whose pool an entry is of. */
static cpa_status check_pool(const char *what, int64_t index, int32_t group, int32_t rank,
                             const cpa_plan_limits *limits, cpa_error *err) {
    CPA_TRY(check_index(what, index, "group", group, limits->groups.count, err));
    return check_index(what, index, "rank", rank, limits->cp_size, err);
}

/* Moves from and to the host's or the device's blocks. */
static cpa_status check_moves(const char *what, const uint8_t **at, const wire_header *header, wire_array_index array,
                              const cpa_plan_limits *limits, cpa_error *err) {
    for (int64_t i = 0; i < header->counts[array]; i++) {
        cpa_block_move move;
        get_entry(at, array, &move);
        CPA_TRY(check_pool(what, i, move.group, move.rank, limits, err));
        const cpa_layer_group *group = &limits->groups.list[move.group];
        const int64_t froms = array == SWAP_INS ? group->host_blocks : group->num_blocks;
        const int64_t tos = array == SWAP_OUTS ? group->host_blocks : group->num_blocks;
        CPA_TRY(check_index(what, i, "source", move.from, froms, err));
        CPA_TRY(check_index(what, i, "destination", move.to, tos, err));
    }
    return CPA_OK;
}

/* Moves between host memory and disk. */
static cpa_status check_disk_moves(const char *what, const uint8_t **at, const wire_header *header,
                                   wire_array_index array, const cpa_plan_limits *limits, cpa_error *err) {
    for (int64_t i = 0; i < header->counts[array]; i++) {
        cpa_disk_move move;
        get_entry(at, array, &move);
        CPA_TRY(check_pool(what, i, move.group, move.rank, limits, err));
        const cpa_layer_group *group = &limits->groups.list[move.group];
        CPA_TRY(check_index(what, i, "host block", move.host, group->host_blocks, err));
        CPA_TRY(check_index(what, i, "slot", move.slot, group->disk_blocks, err));
        CPA_TRY(check_index(what, i, "number of further ranks", (int64_t)move.ranks - 1, limits->cp_size, err));
    }
    return CPA_OK;
}

static cpa_status check_append(const cpa_plan_append *append, int64_t index, const wire_header *header,
                               const cpa_plan_limits *limits, cpa_error *err) {
    CPA_TRY(check_index("append", index, "sequence", append->seq, limits->max_seqs, err));
    CPA_TRY(check_pool("append", index, append->group, append->rank, limits, err));
    CPA_TRY(check_range("append", index, append->blocks, append->count, header->counts[BLOCKS], err));
    const uint8_t *at = header->blocks + append->blocks * entry_bytes(BLOCKS);
    for (int64_t i = append->blocks; i < append->blocks + append->count; i++) {
        const int32_t block = get_word(&at);
        const int64_t end = limits->groups.list[append->group].num_blocks;
        if (block != -1) CPA_TRY(check_index("block", i, "id", block, end, err));
    }
    return CPA_OK;
}

/* A transfer of tokens of one prompt, with a digest for each parcel, and its blocks. */
static cpa_status check_transfer(const cpa_plan_transfer *transfer, int64_t index, const wire_header *header,
                                 const cpa_plan_limits *limits, cpa_error *err) {
    if (transfer->placement.kind != CPA_SHARDED && transfer->placement.kind != CPA_ON_RANK)
        return cpa_fail(err, CPA_INVALID, "step plan: transfer %" PRId64 " has unknown placement %u", index,
                        (unsigned)transfer->placement.kind);
    CPA_TRY(check_index("transfer", index, "rank", transfer->placement.rank, limits->cp_size, err));
    CPA_TRY(check_index("transfer", index, "length", transfer->tokens, INT64_MAX / 64, err));
    CPA_TRY(check_range("transfer", index, transfer->digests, cpa_parcels(transfer->tokens) * CPA_PLAN_DIGEST_WORDS,
                        header->counts[TOKENS], err));
    return check_range("transfer", index, transfer->blocks, transfer->n_blocks, header->counts[TRANSFER_BLOCKS], err);
}

static cpa_status check_transfers(const uint8_t **at, const wire_header *header, const cpa_plan_limits *limits,
                                  cpa_error *err) {
    for (int64_t i = 0; i < header->counts[TRANSFER_BLOCKS]; i++) {
        cpa_plan_transfer_block block;
        get_entry(at, TRANSFER_BLOCKS, &block);
        CPA_TRY(check_pool("transfer block", i, block.group, block.rank, limits, err));
        CPA_TRY(check_index("transfer block", i, "entry", block.entry, INT32_MAX, err));
        CPA_TRY(check_index("transfer block", i, "id", block.block, limits->groups.list[block.group].num_blocks, err));
    }
    for (int64_t i = 0; i < header->counts[TRANSFERS]; i++) {
        cpa_plan_transfer transfer;
        get_entry(at, TRANSFERS, &transfer);
        CPA_TRY(check_transfer(&transfer, i, header, limits, err));
    }
    return CPA_OK;
}

/* The biases of a sampling, which are its own, and not too many. */
static cpa_status check_biases(const cpa_plan_sampling *sampling, int64_t index, const wire_header *header,
                               cpa_error *err) {
    const int64_t most = CPA_PLAN_MOST_BIASES + 1;
    CPA_TRY(check_index("sampling", index, "count of biases", sampling->n_biases, most, err));
    CPA_TRY(check_index("sampling", index, "count of ends", sampling->n_ends, most - sampling->n_biases, err));
    const int64_t n = sampling->n_biases + sampling->n_ends;
    return n == 0 ? CPA_OK : check_range("sampling", index, sampling->biases, n, header->counts[BIASES], err);
}

/* Every entry within the limits, before anything is stored. */
static cpa_status check_entries(const uint8_t *at, const wire_header *header, const cpa_plan_limits *limits,
                                cpa_error *err) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < header->counts[CHUNKS]; i++) {
        cpa_plan_chunk chunk;
        get_entry(&at, CHUNKS, &chunk);
        CPA_TRY(check_chunk(&chunk, i, header, limits, err));
        if (chunk.count > limits->max_tokens - tokens)
            return cpa_fail(err, CPA_INVALID, "step plan: more than %" PRId64 " tokens up to chunk %" PRId64,
                            limits->max_tokens, i);
        tokens += chunk.count;
    }
    for (int64_t i = 0; i < header->counts[RELEASES]; i++)
        CPA_TRY(check_index("release", i, "sequence", get_word(&at), limits->max_seqs, err));
    CPA_TRY(check_moves("swap-out", &at, header, SWAP_OUTS, limits, err));
    CPA_TRY(check_moves("swap-in", &at, header, SWAP_INS, limits, err));
    CPA_TRY(check_moves("copy", &at, header, COPIES, limits, err));
    for (int64_t i = 0; i < header->counts[APPENDS]; i++) {
        cpa_plan_append append;
        get_entry(&at, APPENDS, &append);
        CPA_TRY(check_append(&append, i, header, limits, err));
    }
    for (int64_t i = 0; i < header->counts[NULLED_ENTRIES]; i++) {
        cpa_plan_nulled entry;
        get_entry(&at, NULLED_ENTRIES, &entry);
        CPA_TRY(check_index("void", i, "sequence", entry.seq, limits->max_seqs, err));
        CPA_TRY(check_pool("void", i, entry.group, entry.rank, limits, err));
        CPA_TRY(check_index("void", i, "entry", entry.entry, limits->groups.list[0].num_blocks, err));
    }
    for (int64_t i = 0; i < header->counts[DISCARDS]; i++) {
        cpa_plan_discard discard;
        get_entry(&at, DISCARDS, &discard);
        CPA_TRY(check_index("discard", i, "position", discard.position, INT64_MAX, err));
    }
    for (int64_t i = 0; i < header->counts[CUTS]; i++) {
        cpa_plan_cut cut;
        get_entry(&at, CUTS, &cut);
        CPA_TRY(check_index("cut", i, "sequence", cut.seq, limits->max_seqs, err));
        CPA_TRY(check_index("cut", i, "length", cut.tokens, INT64_MAX, err));
    }
    for (int64_t i = 0; i < header->counts[SAMPLINGS]; i++) {
        cpa_plan_sampling sampling;
        get_entry(&at, SAMPLINGS, &sampling);
        CPA_TRY(check_index("sampling", i, "prompt length", sampling.prompt_tokens, INT64_MAX, err));
        CPA_TRY(check_biases(&sampling, i, header, err));
    }
    at += header->counts[BIASES] * entry_bytes(BIASES); /* any value */
    for (int64_t i = 0; i < header->counts[BLOCKS]; i++) {
        int32_t block = get_word(&at);
        if (block != -1) CPA_TRY(check_index("block", i, "id", block, limits->groups.list[0].num_blocks, err));
    }
    at += header->counts[TOKENS] * entry_bytes(TOKENS); /* any value */
    CPA_TRY(check_transfers(&at, header, limits, err));
    CPA_TRY(check_disk_moves("store", &at, header, STORES, limits, err));
    return check_disk_moves("load", &at, header, LOADS, limits, err);
}

cpa_status cpa_step_plan_decode(const uint8_t *buffer, int64_t bytes, const cpa_plan_limits *limits, cpa_step_plan *out,
                                cpa_error *err) {
    const uint8_t *at = buffer;
    wire_header header = {0};
    CPA_TRY(get_header(&at, bytes, limits, &header, err));
    CPA_TRY(check_entries(at, &header, limits, err));
    const int64_t *n = header.counts;
    if (!cpa_step_plan_reserve(out, n[CHUNKS], n[RELEASES], n[APPENDS], n[BLOCKS], n[TOKENS]) ||
        !cpa_step_plan_reserve_moves(out, n[SWAP_OUTS], n[SWAP_INS], n[COPIES], n[NULLED_ENTRIES]) ||
        !cpa_step_plan_reserve_drawing(out, n[DISCARDS], n[CUTS], n[SAMPLINGS], n[BIASES], n[PARENTS]) ||
        !cpa_step_plan_reserve_transfers(out, n[TRANSFERS], n[TRANSFER_BLOCKS]) ||
        !cpa_step_plan_reserve_disk(out, n[STORES], n[LOADS]))
        return cpa_fail(err, CPA_NO_MEMORY, "step plan: no memory for a plan of %" PRId64 " bytes", bytes);
    out->step = header.step;
    out->flags = header.flags;
    for (int array = 0; array < ARRAYS; array++) {
        memcpy((char *)out + arrays[array].count, &n[array], sizeof n[array]);
        for (int64_t i = 0; i < n[array]; i++) get_entry(&at, array, entry_at(out, array, i));
    }
    return CPA_OK;
}
