#include "src/schedule/step_plan_fields.h"

#include <stddef.h>
#include <string.h>

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

static const struct {
    const char *name;
    size_t entries, count; /* offsets in cpa_step_plan of the array and of its count */
    size_t stride;
    size_t n_fields;
    const wire_field *fields;
} arrays[CPA_WIRE_ARRAYS] = {
#define ARRAY(text, name, fields)                                                                                      \
    {                                                                                                                  \
        text, offsetof(cpa_step_plan, name), offsetof(cpa_step_plan, n_##name), sizeof *((cpa_step_plan *)NULL)->name, \
            sizeof fields / sizeof fields[0], fields                                                                   \
    }
    [CPA_WIRE_CHUNKS] = ARRAY("chunks", chunks, CHUNK),
    [CPA_WIRE_RELEASES] = ARRAY("releases", releases, WORD),
    [CPA_WIRE_SWAP_OUTS] = ARRAY("swap-outs", swap_outs, MOVE),
    [CPA_WIRE_SWAP_INS] = ARRAY("swap-ins", swap_ins, MOVE),
    [CPA_WIRE_COPIES] = ARRAY("copies", copies, MOVE),
    [CPA_WIRE_APPENDS] = ARRAY("appends", appends, APPEND),
    [CPA_WIRE_NULLED_ENTRIES] = ARRAY("nulled", nulled, NULLED),
    [CPA_WIRE_BLOCKS] = ARRAY("blocks", block_ids, WORD),
    [CPA_WIRE_DISCARDS] = ARRAY("discards", discards, DISCARD),
    [CPA_WIRE_SAMPLINGS] = ARRAY("samplings", samplings, SAMPLING),
    [CPA_WIRE_BIASES] = ARRAY("biases", biases, BIAS),
    [CPA_WIRE_CUTS] = ARRAY("cuts", cuts, CUT),
    [CPA_WIRE_TOKENS] = ARRAY("tokens", token_ids, WORD),
    [CPA_WIRE_PARENTS] = ARRAY("parents", parents, WORD),
    [CPA_WIRE_TRANSFERS] = ARRAY("transfers", transfers, TRANSFER),
    [CPA_WIRE_STORES] = ARRAY("stores", stores, DISK_MOVE),
    [CPA_WIRE_LOADS] = ARRAY("loads", loads, DISK_MOVE),
    [CPA_WIRE_TRANSFER_BLOCKS] = ARRAY("transfer blocks", transfer_blocks, TRANSFER_BLOCK),
#undef ARRAY
};

const char *cpa_wire_name(cpa_wire_array array) {
    return arrays[array].name;
}

int64_t cpa_wire_entry_bytes(cpa_wire_array array) {
    size_t bytes = 0;
    for (size_t i = 0; i < arrays[array].n_fields; i++) bytes += arrays[array].fields[i].bytes;
    return (int64_t)bytes;
}

void *cpa_wire_entry(const cpa_step_plan *plan, cpa_wire_array array, int64_t i) {
    char *entries;
    memcpy(&entries, (const char *)plan + arrays[array].entries, sizeof entries);
    return entries + (size_t)i * arrays[array].stride;
}

int64_t cpa_wire_count(const cpa_step_plan *plan, cpa_wire_array array) {
    int64_t count;
    memcpy(&count, (const char *)plan + arrays[array].count, sizeof count);
    return count;
}

void cpa_wire_set_count(cpa_step_plan *plan, cpa_wire_array array, int64_t count) {
    memcpy((char *)plan + arrays[array].count, &count, sizeof count);
}

void cpa_wire_put(uint8_t **at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) *(*at)++ = (uint8_t)(value >> 8 * i);
}

uint64_t cpa_wire_get(const uint8_t **at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint64_t)(*at)[i] << 8 * i;
    *at += bytes;
    return value;
}

void cpa_wire_put_entry(uint8_t **at, cpa_wire_array array, const void *entry) {
    for (size_t i = 0; i < arrays[array].n_fields; i++) {
        const wire_field *field = &arrays[array].fields[i];
        const char *from = (const char *)entry + field->offset;
        uint32_t word;
        uint64_t wide;
        memcpy(&word, from, sizeof word);
        wide = word;
        if (field->bytes == sizeof wide) memcpy(&wide, from, sizeof wide);
        cpa_wire_put(at, wide, field->bytes);
    }
}

void cpa_wire_get_entry(const uint8_t **at, cpa_wire_array array, void *entry) {
    for (size_t i = 0; i < arrays[array].n_fields; i++) {
        const wire_field *field = &arrays[array].fields[i];
        const uint64_t wide = cpa_wire_get(at, field->bytes);
        const uint32_t word = (uint32_t)wide;
        memcpy((char *)entry + field->offset, field->bytes == sizeof wide ? (const void *)&wide : &word, field->bytes);
    }
}

int32_t cpa_wire_get_word(const uint8_t **at) {
    return (int32_t)cpa_wire_get(at, sizeof(int32_t));
}
