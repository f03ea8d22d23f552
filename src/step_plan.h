/* A step: what rank 0 planned and every rank executes, and its wire form.
 *
 * A rank applies a plan in this order: releases, appends, chunks. Plain arrays that keep their capacity from step to
 * step.
 *
 * Wire form, little-endian: magic "CPAP", version, step, flags, the counts, then the arrays field by field. Decoding
 * checks the magic, the version, every count and index against the bytes and limits at hand, and that nothing is left
 * over; a plan that fails leaves `out` untouched and says where it broke. */
#ifndef CPA_STEP_PLAN_H
#define CPA_STEP_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/context.h>
#include <cpattn/status.h>

enum {
    CPA_PLAN_STOP = 1,      /* flags: no step follows */
    CPA_CHUNK_FIRST = 1,    /* chunk flags: the sequence starts (or restarts) in this slot */
    CPA_CHUNK_EMITS = 2,    /* its last row yields an output token */
    CPA_CHUNK_FINISHES = 4, /* that token is the request's last */
    CPA_CHUNK_DECODE = 8    /* one token of a sequence that has emitted before */
};

typedef struct cpa_plan_chunk {
    uint64_t request;
    int32_t seq; /* slot in the ranks' tables of running sequences */
    int32_t phase;
    int64_t start;
    int64_t count;
    int64_t first_output; /* rows at positions >= this one are results that no earlier step delivered */
    cpa_algorithm algorithm;
    uint32_t flags;
    int64_t tokens; /* index into token_ids of its first token */
} cpa_plan_chunk;

/* Blocks added to the end of one rank's table of one sequence. */
typedef struct cpa_plan_append {
    int32_t seq;
    int32_t rank;
    int32_t count;
    int64_t blocks; /* index into block_ids of the first */
} cpa_plan_append;

typedef struct cpa_step_plan {
    uint64_t step;
    uint32_t flags;
    cpa_plan_chunk *chunks;
    int64_t n_chunks, cap_chunks;
    int32_t *releases; /* slots whose sequence finished or was preempted */
    int64_t n_releases, cap_releases;
    cpa_plan_append *appends;
    int64_t n_appends, cap_appends;
    int32_t *block_ids;
    int64_t n_block_ids, cap_block_ids;
    uint32_t *token_ids;
    int64_t n_token_ids, cap_token_ids;
} cpa_step_plan;

/* What the indices in a plan may be; decoding checks against it. */
typedef struct cpa_plan_limits {
    int32_t cp_size;
    int32_t max_seqs;
    int64_t num_blocks; /* of one rank */
    int64_t max_tokens; /* of one step */
} cpa_plan_limits;

void cpa_step_plan_init(cpa_step_plan *plan);
void cpa_step_plan_destroy(cpa_step_plan *plan);
/* Empties the plan and keeps its memory. */
void cpa_step_plan_clear(cpa_step_plan *plan);

/* Makes room for so many entries in all, so that adding up to them cannot fail. Returns 0, with every entry kept, if
 * there is no memory, else 1. */
int cpa_step_plan_reserve(cpa_step_plan *plan, int64_t chunks, int64_t releases, int64_t appends, int64_t block_ids,
                          int64_t token_ids);

/* Each reserves room for n more entries and returns a pointer to the first, zeroed, counted as used; NULL without
 * memory. */
cpa_plan_chunk *cpa_step_plan_add_chunk(cpa_step_plan *plan);
cpa_plan_append *cpa_step_plan_add_append(cpa_step_plan *plan);
int32_t *cpa_step_plan_add_release(cpa_step_plan *plan);
int32_t *cpa_step_plan_add_blocks(cpa_step_plan *plan, int64_t n);
uint32_t *cpa_step_plan_add_tokens(cpa_step_plan *plan, int64_t n);

/* Encodes into *buffer (malloc'd, grown as needed, kept by the caller from step to step). */
cpa_status cpa_step_plan_encode(const cpa_step_plan *plan, uint8_t **buffer, int64_t *capacity, int64_t *bytes,
                                cpa_error *err);
cpa_status cpa_step_plan_decode(const uint8_t *buffer, int64_t bytes, const cpa_plan_limits *limits, cpa_step_plan *out,
                                cpa_error *err);

#endif
