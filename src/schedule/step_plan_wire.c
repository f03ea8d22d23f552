#include "src/schedule/step_plan_wire.h"

#include <inttypes.h>

#include "base/array.h"
#include "base/check.h"
#include "src/cache/parcel.h"
#include "src/schedule/step_plan_fields.h"

enum {
    WIRE_MAGIC = 0x50415043, /* "CPAP" */
    WIRE_VERSION = 12,
    HEADER_BYTES = 4 + 4 + 8 + 4 + CPA_WIRE_ARRAYS * 8,
    CHUNK_FLAGS = CPA_CHUNK_FIRST | CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES | CPA_CHUNK_DECODE | CPA_CHUNK_DRAWN
};

cpa_status cpa_step_plan_encode(const cpa_step_plan *plan, uint8_t **buffer, int64_t *capacity, int64_t *bytes,
                                cpa_error *err) {
    int64_t need = HEADER_BYTES;
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++)
        need += cpa_wire_count(plan, array) * cpa_wire_entry_bytes(array);
    if (!cpa_array_reserve(buffer, capacity, need, 1))
        return cpa_fail(err, CPA_NO_MEMORY, "step plan: no memory for a message of %" PRId64 " bytes", need);
    uint8_t *at = *buffer;
    cpa_wire_put(&at, WIRE_MAGIC, 4);
    cpa_wire_put(&at, WIRE_VERSION, 4);
    cpa_wire_put(&at, plan->step, 8);
    cpa_wire_put(&at, plan->flags, 4);
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++) cpa_wire_put(&at, (uint64_t)cpa_wire_count(plan, array), 8);
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++) {
        for (int64_t i = 0; i < cpa_wire_count(plan, array); i++)
            cpa_wire_put_entry(&at, array, cpa_wire_entry(plan, array, i));
    }
    *bytes = need;
    return CPA_OK;
}

typedef struct wire_header {
    uint64_t step;
    uint32_t flags;
    int64_t counts[CPA_WIRE_ARRAYS];
    const uint8_t *blocks, *parents; /* the bytes of these arrays */
} wire_header;

/* One array that claims n entries: no more than the bytes left can hold, and no more than `most`. */
static cpa_status check_count(int array, int64_t n, int64_t most, int64_t *bytes_left, cpa_error *err) {
    const char *what = cpa_wire_name(array);
    if (n < 0 || n > *bytes_left / cpa_wire_entry_bytes(array))
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " %s do not fit the %" PRId64 " bytes that are left", n,
                        what, *bytes_left);
    if (n > most)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " %s; expected at most %" PRId64, n, what, most);
    *bytes_left -= n * cpa_wire_entry_bytes(array);
    return CPA_OK;
}

/* Reads the header and proves that the arrays fill the message exactly. */
static cpa_status get_header(const uint8_t **at, int64_t bytes, const cpa_plan_limits *limits, wire_header *header,
                             cpa_error *err) {
    if (bytes < HEADER_BYTES)
        return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " bytes; the header alone has %d", bytes, HEADER_BYTES);
    const uint32_t magic = (uint32_t)cpa_wire_get(at, 4), version = (uint32_t)cpa_wire_get(at, 4);
    if (magic != WIRE_MAGIC)
        return cpa_fail(err, CPA_INVALID, "step plan: begins with %08" PRIx32 "; expected %08x", magic, WIRE_MAGIC);
    if (version != WIRE_VERSION)
        return cpa_fail(err, CPA_INVALID, "step plan: version %" PRIu32 "; expected %d", version, WIRE_VERSION);
    header->step = cpa_wire_get(at, 8);
    header->flags = (uint32_t)cpa_wire_get(at, 4);
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++) header->counts[array] = (int64_t)cpa_wire_get(at, 8);
    if (header->flags & ~(uint32_t)CPA_PLAN_STOP)
        return cpa_fail(err, CPA_INVALID, "step plan: unknown flags %#" PRIx32, header->flags);
    int64_t left = bytes - HEADER_BYTES, most[CPA_WIRE_ARRAYS];
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++) most[array] = INT64_MAX;
    most[CPA_WIRE_CHUNKS] = most[CPA_WIRE_RELEASES] = most[CPA_WIRE_DISCARDS] = most[CPA_WIRE_CUTS] =
        most[CPA_WIRE_SAMPLINGS] = most[CPA_WIRE_TRANSFERS] = limits->max_seqs;
    most[CPA_WIRE_APPENDS] = most[CPA_WIRE_COPIES] = (int64_t)limits->max_seqs * limits->cp_size * limits->groups.count;
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++)
        CPA_TRY(check_count(array, header->counts[array], most[array], &left, err));
    if (left != 0) return cpa_fail(err, CPA_INVALID, "step plan: %" PRId64 " bytes too many", left);
    header->parents =
        *at + bytes - HEADER_BYTES - header->counts[CPA_WIRE_PARENTS] * cpa_wire_entry_bytes(CPA_WIRE_PARENTS);
    header->blocks = header->parents;
    for (int array = CPA_WIRE_BLOCKS; array < CPA_WIRE_PARENTS; array++)
        header->blocks -= header->counts[array] * cpa_wire_entry_bytes(array);
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
        CPA_TRY(check_index("chunk", index, "sampling", chunk->sampling, header->counts[CPA_WIRE_SAMPLINGS], err));
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
    CPA_TRY(check_range("chunk", index, chunk->parents, chunk->drafts, header->counts[CPA_WIRE_PARENTS], err));
    const uint8_t *at = header->parents + chunk->parents * cpa_wire_entry_bytes(CPA_WIRE_PARENTS);
    for (int64_t i = 0; i < chunk->drafts; i++) {
        const int32_t parent = cpa_wire_get_word(&at);
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
                       header->counts[CPA_WIRE_TOKENS], err);
}

static cpa_status check_chunk(const cpa_plan_chunk *chunk, int64_t index, const wire_header *header,
                              const cpa_plan_limits *limits, cpa_error *err) {
    CPA_TRY(check_index("chunk", index, "sequence", chunk->seq, limits->max_seqs, err));
    if (chunk->placement.kind != CPA_SHARDED && chunk->placement.kind != CPA_ON_RANK)
        return cpa_fail(err, CPA_INVALID, "step plan: chunk %" PRId64 " has unknown placement %u", index,
                        (unsigned)chunk->placement.kind);
    CPA_TRY(check_index("chunk", index, "rank", chunk->placement.rank, limits->cp_size, err));
    CPA_TRY(check_range("chunk", index, chunk->tokens, chunk->count, header->counts[CPA_WIRE_TOKENS], err));
    CPA_TRY(check_index("chunk", index, "start", chunk->start, INT64_MAX - chunk->count, err));
    CPA_TRY(
        check_range("chunk", index, chunk->tokens, cpa_plan_chunk_tokens(chunk), header->counts[CPA_WIRE_TOKENS], err));
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
static cpa_status check_moves(const char *what, const uint8_t **at, const wire_header *header, cpa_wire_array array,
                              const cpa_plan_limits *limits, cpa_error *err) {
    for (int64_t i = 0; i < header->counts[array]; i++) {
        cpa_block_move move;
        cpa_wire_get_entry(at, array, &move);
        CPA_TRY(check_pool(what, i, move.group, move.rank, limits, err));
        const cpa_layer_group *group = &limits->groups.list[move.group];
        const int64_t froms = array == CPA_WIRE_SWAP_INS ? group->host_blocks : group->num_blocks;
        const int64_t tos = array == CPA_WIRE_SWAP_OUTS ? group->host_blocks : group->num_blocks;
        CPA_TRY(check_index(what, i, "source", move.from, froms, err));
        CPA_TRY(check_index(what, i, "destination", move.to, tos, err));
    }
    return CPA_OK;
}

/* Moves between host memory and disk. */
static cpa_status check_disk_moves(const char *what, const uint8_t **at, const wire_header *header,
                                   cpa_wire_array array, const cpa_plan_limits *limits, cpa_error *err) {
    for (int64_t i = 0; i < header->counts[array]; i++) {
        cpa_disk_move move;
        cpa_wire_get_entry(at, array, &move);
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
    CPA_TRY(check_range("append", index, append->blocks, append->count, header->counts[CPA_WIRE_BLOCKS], err));
    const uint8_t *at = header->blocks + append->blocks * cpa_wire_entry_bytes(CPA_WIRE_BLOCKS);
    for (int64_t i = append->blocks; i < append->blocks + append->count; i++) {
        const int32_t block = cpa_wire_get_word(&at);
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
                        header->counts[CPA_WIRE_TOKENS], err));
    return check_range("transfer", index, transfer->blocks, transfer->n_blocks,
                       header->counts[CPA_WIRE_TRANSFER_BLOCKS], err);
}

static cpa_status check_transfers(const uint8_t **at, const wire_header *header, const cpa_plan_limits *limits,
                                  cpa_error *err) {
    for (int64_t i = 0; i < header->counts[CPA_WIRE_TRANSFER_BLOCKS]; i++) {
        cpa_plan_transfer_block block;
        cpa_wire_get_entry(at, CPA_WIRE_TRANSFER_BLOCKS, &block);
        CPA_TRY(check_pool("transfer block", i, block.group, block.rank, limits, err));
        CPA_TRY(check_index("transfer block", i, "entry", block.entry, INT32_MAX, err));
        CPA_TRY(check_index("transfer block", i, "id", block.block, limits->groups.list[block.group].num_blocks, err));
    }
    for (int64_t i = 0; i < header->counts[CPA_WIRE_TRANSFERS]; i++) {
        cpa_plan_transfer transfer;
        cpa_wire_get_entry(at, CPA_WIRE_TRANSFERS, &transfer);
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
    return n == 0 ? CPA_OK : check_range("sampling", index, sampling->biases, n, header->counts[CPA_WIRE_BIASES], err);
}

/* Every entry within the limits, before anything is stored. */
static cpa_status check_entries(const uint8_t *at, const wire_header *header, const cpa_plan_limits *limits,
                                cpa_error *err) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < header->counts[CPA_WIRE_CHUNKS]; i++) {
        cpa_plan_chunk chunk;
        cpa_wire_get_entry(&at, CPA_WIRE_CHUNKS, &chunk);
        CPA_TRY(check_chunk(&chunk, i, header, limits, err));
        if (chunk.count > limits->max_tokens - tokens)
            return cpa_fail(err, CPA_INVALID, "step plan: more than %" PRId64 " tokens up to chunk %" PRId64,
                            limits->max_tokens, i);
        tokens += chunk.count;
    }
    for (int64_t i = 0; i < header->counts[CPA_WIRE_RELEASES]; i++)
        CPA_TRY(check_index("release", i, "sequence", cpa_wire_get_word(&at), limits->max_seqs, err));
    CPA_TRY(check_moves("swap-out", &at, header, CPA_WIRE_SWAP_OUTS, limits, err));
    CPA_TRY(check_moves("swap-in", &at, header, CPA_WIRE_SWAP_INS, limits, err));
    CPA_TRY(check_moves("copy", &at, header, CPA_WIRE_COPIES, limits, err));
    for (int64_t i = 0; i < header->counts[CPA_WIRE_APPENDS]; i++) {
        cpa_plan_append append;
        cpa_wire_get_entry(&at, CPA_WIRE_APPENDS, &append);
        CPA_TRY(check_append(&append, i, header, limits, err));
    }
    for (int64_t i = 0; i < header->counts[CPA_WIRE_NULLED_ENTRIES]; i++) {
        cpa_plan_nulled entry;
        cpa_wire_get_entry(&at, CPA_WIRE_NULLED_ENTRIES, &entry);
        CPA_TRY(check_index("void", i, "sequence", entry.seq, limits->max_seqs, err));
        CPA_TRY(check_pool("void", i, entry.group, entry.rank, limits, err));
        CPA_TRY(check_index("void", i, "entry", entry.entry, limits->groups.list[0].num_blocks, err));
    }
    for (int64_t i = 0; i < header->counts[CPA_WIRE_DISCARDS]; i++) {
        cpa_plan_discard discard;
        cpa_wire_get_entry(&at, CPA_WIRE_DISCARDS, &discard);
        CPA_TRY(check_index("discard", i, "position", discard.position, INT64_MAX, err));
    }
    for (int64_t i = 0; i < header->counts[CPA_WIRE_CUTS]; i++) {
        cpa_plan_cut cut;
        cpa_wire_get_entry(&at, CPA_WIRE_CUTS, &cut);
        CPA_TRY(check_index("cut", i, "sequence", cut.seq, limits->max_seqs, err));
        CPA_TRY(check_index("cut", i, "length", cut.tokens, INT64_MAX, err));
    }
    for (int64_t i = 0; i < header->counts[CPA_WIRE_SAMPLINGS]; i++) {
        cpa_plan_sampling sampling;
        cpa_wire_get_entry(&at, CPA_WIRE_SAMPLINGS, &sampling);
        CPA_TRY(check_index("sampling", i, "prompt length", sampling.prompt_tokens, INT64_MAX, err));
        CPA_TRY(check_biases(&sampling, i, header, err));
    }
    at += header->counts[CPA_WIRE_BIASES] * cpa_wire_entry_bytes(CPA_WIRE_BIASES); /* any value */
    for (int64_t i = 0; i < header->counts[CPA_WIRE_BLOCKS]; i++) {
        int32_t block = cpa_wire_get_word(&at);
        if (block != -1) CPA_TRY(check_index("block", i, "id", block, limits->groups.list[0].num_blocks, err));
    }
    at += header->counts[CPA_WIRE_TOKENS] * cpa_wire_entry_bytes(CPA_WIRE_TOKENS); /* any value */
    CPA_TRY(check_transfers(&at, header, limits, err));
    CPA_TRY(check_disk_moves("store", &at, header, CPA_WIRE_STORES, limits, err));
    return check_disk_moves("load", &at, header, CPA_WIRE_LOADS, limits, err);
}

cpa_status cpa_step_plan_decode(const uint8_t *buffer, int64_t bytes, const cpa_plan_limits *limits, cpa_step_plan *out,
                                cpa_error *err) {
    const uint8_t *at = buffer;
    wire_header header = {0};
    CPA_TRY(get_header(&at, bytes, limits, &header, err));
    CPA_TRY(check_entries(at, &header, limits, err));
    const int64_t *n = header.counts;
    if (!cpa_step_plan_reserve(out, n[CPA_WIRE_CHUNKS], n[CPA_WIRE_RELEASES], n[CPA_WIRE_APPENDS], n[CPA_WIRE_BLOCKS],
                               n[CPA_WIRE_TOKENS]) ||
        !cpa_step_plan_reserve_moves(out, n[CPA_WIRE_SWAP_OUTS], n[CPA_WIRE_SWAP_INS], n[CPA_WIRE_COPIES],
                                     n[CPA_WIRE_NULLED_ENTRIES]) ||
        !cpa_step_plan_reserve_drawing(out, n[CPA_WIRE_DISCARDS], n[CPA_WIRE_CUTS], n[CPA_WIRE_SAMPLINGS],
                                       n[CPA_WIRE_BIASES], n[CPA_WIRE_PARENTS]) ||
        !cpa_step_plan_reserve_transfers(out, n[CPA_WIRE_TRANSFERS], n[CPA_WIRE_TRANSFER_BLOCKS]) ||
        !cpa_step_plan_reserve_disk(out, n[CPA_WIRE_STORES], n[CPA_WIRE_LOADS]))
        return cpa_fail(err, CPA_NO_MEMORY, "step plan: no memory for a plan of %" PRId64 " bytes", bytes);
    out->step = header.step;
    out->flags = header.flags;
    for (int array = 0; array < CPA_WIRE_ARRAYS; array++) {
        cpa_wire_set_count(out, array, n[array]);
        for (int64_t i = 0; i < n[array]; i++) cpa_wire_get_entry(&at, array, cpa_wire_entry(out, array, i));
    }
    return CPA_OK;
}
