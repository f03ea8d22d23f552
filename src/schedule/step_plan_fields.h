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
#ifndef CPA_STEP_PLAN_FIELDS_H
#define CPA_STEP_PLAN_FIELDS_H

#include "src/schedule/step_plan.h"

/* The arrays of a plan, in the order of a message. */
typedef enum cpa_wire_array {
    CPA_WIRE_CHUNKS = 0,
    CPA_WIRE_RELEASES,
    CPA_WIRE_SWAP_OUTS,
    CPA_WIRE_SWAP_INS,
    CPA_WIRE_COPIES,
    CPA_WIRE_APPENDS,
    CPA_WIRE_NULLED_ENTRIES,
    CPA_WIRE_DISCARDS,
    CPA_WIRE_CUTS,
    CPA_WIRE_SAMPLINGS,
    CPA_WIRE_BIASES,
    CPA_WIRE_BLOCKS,
    CPA_WIRE_TOKENS,
    CPA_WIRE_TRANSFER_BLOCKS,
    CPA_WIRE_TRANSFERS,
    CPA_WIRE_STORES,
    CPA_WIRE_LOADS,
    CPA_WIRE_PARENTS,
    CPA_WIRE_ARRAYS
} cpa_wire_array;

/* What messages call its entries. */
const char *cpa_wire_name(cpa_wire_array array);
/* Bytes of an entry in a message. */
int64_t cpa_wire_entry_bytes(cpa_wire_array array);

/* Entries of an array of a plan, and entry i. */
int64_t cpa_wire_count(const cpa_step_plan *plan, cpa_wire_array array);
void cpa_wire_set_count(cpa_step_plan *plan, cpa_wire_array array, int64_t count);
void *cpa_wire_entry(const cpa_step_plan *plan, cpa_wire_array array, int64_t i);

/* A number of 1 to 8 bytes, or an entry, is put to *at, or got from there; *at is then behind it. */
void cpa_wire_put(uint8_t **at, uint64_t value, size_t bytes);
uint64_t cpa_wire_get(const uint8_t **at, size_t bytes);
void cpa_wire_put_entry(uint8_t **at, cpa_wire_array array, const void *entry);
void cpa_wire_get_entry(const uint8_t **at, cpa_wire_array array, void *entry);
/* One of 4 bytes, with a sign. */
int32_t cpa_wire_get_word(const uint8_t **at);

#endif
