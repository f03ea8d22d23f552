/* A step: what rank 0 planned and every rank executes, and its wire form.
 *
 * A rank applies a plan in this order: cuts, nulled, releases, loads, swap_outs, stores, swap_ins, copies, transfers that
 * import, appends, chunks, transfers that export. So a device
 * block that is swapped out may be written by the same plan, since all that writes blocks comes later. What a swap_in
 * or a copy reads is not written by the plan at all: rank 0 hands such blocks out again only from the next plan on. A
 * store reads its block when the swap_outs have run, before the plan's layers. What is loaded is there when the step is
 * done, and a later plan reads it.
 * Plain arrays that keep their capacity from step to step.
 */
#ifndef CPA_STEP_PLAN_H
#define CPA_STEP_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/context.h>
#include <cpattn/status.h>

#include "src/cache/block_move.h"
#include "src/cache/layer_groups.h"
#include "src/schedule/drawing.h"

enum {
    CPA_PLAN_STOP = 1,      /* flags: no step follows */
    CPA_CHUNK_FIRST = 1,    /* chunk flags: the sequence starts (or restarts) under this index */
    CPA_CHUNK_EMITS = 2,    /* its last row yields an output token */
    CPA_CHUNK_FINISHES = 4, /* that token is the request's last */
    CPA_CHUNK_DECODE = 8,   /* the last token of a sequence that has emitted before, and drafts of those behind it; in
                               front of it those that a tree of drafts left in other tokens' places */
    CPA_CHUNK_DRAWN = 16 /* that token is what the plan before emits for the sequence: its place in token_ids is void */
};

typedef struct cpa_plan_chunk {
    uint64_t request;
    int32_t seq; /* index in the ranks' tables of running sequences */
    cpa_placement placement;
    int64_t start;
    int64_t count;
    int64_t first_output; /* rows at positions >= this one are results that no earlier step delivered */
    cpa_algorithm algorithm;
    uint32_t flags;
    int64_t tokens; /* index into token_ids of its first token; a first chunk that starts later than at 0, because what
                       comes before is in the cache already, has that index for the token at 0 */
    int64_t given;  /* the token that it emits; -1: it is drawn, or there is none. Of one that ends within a prompt, the
                        token of the prompt behind it, where log-probabilities of the prompt are wanted or layers draft */
    int64_t drafts; /* how many of its tokens are guesses: the last ones, of a decode chunk. Each of their rows emits a
                        token, as that of the token before them does, and those count whose row has the tokens that were
                        emitted before it. Given ones behind the first stand behind its tokens in token_ids */
    int64_t parents;  /* index into parents of what its drafts come behind; -1: each behind the one before */
    int64_t sampling; /* of a first chunk: index into samplings of how the sequence's tokens are drawn; -1: the most
                         probable ones, without penalties */
} cpa_plan_chunk;

/* How the tokens of a sequence are drawn: the fields of cpa_sampling that ranks need, with 1 for a top_p or a
 * repetition penalty that is none. */
typedef struct cpa_plan_sampling {
    CPA_DRAWING_FIELDS(CPA_DRAWING_MEMBER)
    uint64_t seed;
    uint32_t logprobs;
    int32_t top_logprobs;
    uint32_t prompt_logprobs;
    int32_t top_prompt_logprobs;
    int64_t prompt_tokens; /* tokens of the request's prompt; those after these are output */
    uint32_t constrained;  /* not 0: src/worker/token_masks.h tells in each step which tokens may be drawn */
    int64_t min_tokens;    /* output tokens before which no token that ends the request is drawn */
    /* Index into biases of the first of n_biases to be added, then n_ends of -infinity for the ending tokens. */
    int64_t biases;
    int64_t n_biases, n_ends; /* biases of each kind; their tokens ascend */
} cpa_plan_sampling;

/* What is added to the logit of a token. */
typedef struct cpa_plan_bias {
    uint32_t token;
    float value;
} cpa_plan_bias;

/* Of one request, both parts together. */
enum { CPA_PLAN_MOST_BIASES = 512 };

/* Whether what is drawn depends on the tokens before. */
static inline int cpa_plan_has_penalties(const cpa_plan_sampling *sampling) {
    return sampling->repetition_penalty != 1 || sampling->presence_penalty != 0 || sampling->frequency_penalty != 0;
}

/* How many entries of the plan's biases are its own. */
static inline int64_t cpa_plan_listed_biases(const cpa_plan_sampling *sampling) {
    return sampling->n_biases + sampling->n_ends;
}

/* Tokens that an earlier plan emits and that do not count, as the request had ended or a draft before them was wrong:
 * those for `position` of the request's tokens and behind it. */
typedef struct cpa_plan_discard {
    uint64_t request;
    int64_t position;
} cpa_plan_discard;

/* The cache of a running sequence ends behind so many tokens: what the plan before has computed behind them came from
 * drafts that were wrong. */
typedef struct cpa_plan_cut {
    int32_t seq;
    int64_t tokens;
} cpa_plan_cut;

/* How many entries of token_ids belong to a chunk: those before its start come with a first chunk. */
static inline int64_t cpa_plan_chunk_tokens(const cpa_plan_chunk *chunk) {
    return chunk->flags & CPA_CHUNK_FIRST ? chunk->start + chunk->count : chunk->count;
}

/* Where its drafts begin among the tokens of the sequence, as they lie in the cache. */
static inline int64_t cpa_plan_first_draft(const cpa_plan_chunk *chunk) {
    return chunk->start + chunk->count - chunk->drafts;
}

/* How many of its rows, the first ones, are to tell what they say of the next token, which is one of the prompt. */
static inline int64_t cpa_plan_scored_rows(const cpa_plan_chunk *chunk, const cpa_plan_sampling *sampling) {
    const int64_t left = sampling->prompt_tokens - 1 - chunk->start;
    if (!sampling->prompt_logprobs || left <= 0) return 0;
    return left < chunk->count ? left : chunk->count;
}

/* How many tokens it emits. */
static inline int64_t cpa_plan_chunk_emissions(const cpa_plan_chunk *chunk) {
    return chunk->flags & CPA_CHUNK_EMITS ? 1 + chunk->drafts : 0;
}

/* Blocks added to the end of one rank's table of one sequence in a group of layers; -1 for an entry that no query
 * reads. */
typedef struct cpa_plan_append {
    int32_t seq;
    int32_t group;
    int32_t rank;
    int32_t count;
    int64_t blocks; /* index into block_ids of the first */
} cpa_plan_append;

/* An entry of such a table that no query reads any more: its block may be someone else's from now on. */
typedef struct cpa_plan_nulled {
    int32_t seq;
    int32_t group;
    int32_t rank;
    int32_t entry;
} cpa_plan_nulled;

/* A block that goes from host memory to a slot on disk, or comes back: part of what is found by a digest. */
typedef struct cpa_disk_move {
    int32_t group, rank;
    int32_t host, slot;
    uint32_t ranks;     /* how many ranks have a block of it */
    uint64_t digest[4]; /* bytes of a cpa_prefix_digest, as the machine has them */
} cpa_disk_move;

/* Words of the digest of a parcel. */
enum { CPA_PLAN_DIGEST_WORDS = 8 };

/* The first tokens of a request's prompt, which go to a store of blocks when the step is done, or come from it before
 * (cpattn/blocks.h). */
typedef struct cpa_plan_transfer {
    uint64_t request;
    cpa_placement placement;
    int64_t tokens;
    int64_t digests;          /* index into token_ids of the words of each parcel's digest */
    int64_t blocks, n_blocks; /* index into transfer_blocks of the first, and how many there are */
    uint32_t imports;         /* not 0: they come */
} cpa_plan_transfer;

/* A block of a transfer, and the entry of the request's table that it is. */
typedef struct cpa_plan_transfer_block {
    int32_t group;
    int32_t rank;
    int32_t entry;
    int32_t block;
} cpa_plan_transfer_block;

typedef struct cpa_step_plan {
    uint64_t step;
    uint32_t flags;
    cpa_plan_chunk *chunks;
    int64_t n_chunks, cap_chunks;
    int32_t *releases; /* indices whose sequence finished or was preempted */
    int64_t n_releases, cap_releases;
    cpa_block_move *swap_outs, *swap_ins, *copies;
    int64_t n_swap_outs, cap_swap_outs, n_swap_ins, cap_swap_ins, n_copies, cap_copies;
    cpa_disk_move *stores, *loads; /* to disk, and from there */
    int64_t n_stores, cap_stores, n_loads, cap_loads;
    cpa_plan_append *appends;
    int64_t n_appends, cap_appends;
    cpa_plan_nulled *nulled;
    int64_t n_nulled, cap_nulled;
    cpa_plan_discard *discards;
    int64_t n_discards, cap_discards;
    cpa_plan_cut *cuts;
    int64_t n_cuts, cap_cuts;
    cpa_plan_sampling *samplings;
    int64_t n_samplings, cap_samplings;
    cpa_plan_bias *biases;
    int64_t n_biases, cap_biases;
    int32_t *block_ids;
    int64_t n_block_ids, cap_block_ids;
    uint32_t *token_ids;
    int64_t n_token_ids, cap_token_ids;
    int32_t *parents; /* parent of each draft: a lower draft of the same chunk; -1: the token before all of them */
    int64_t n_parents, cap_parents;
    cpa_plan_transfer *transfers;
    int64_t n_transfers, cap_transfers;
    cpa_plan_transfer_block *transfer_blocks;
    int64_t n_transfer_blocks, cap_transfer_blocks;
} cpa_step_plan;

/* The draft that draft i of a chunk comes behind; -1: the token before all of them. */
static inline int64_t cpa_plan_parent(const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t i) {
    return chunk->parents < 0 ? i - 1 : plan->parents[chunk->parents + i];
}

/* The position that a token of a chunk would have, of those that lie in the cache from `start` on: drafts that are in
 * each other's place have the same. */
int64_t cpa_plan_position(const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t cached_at);
/* Whether, of two drafts of a chunk that lie there, the one at `cached_at` sees that at `other`: itself, and those that
 * it comes behind. */
int cpa_plan_draft_sees(const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t cached_at, int64_t other);

/* What the indices in a plan may be; decoding checks against it. */
typedef struct cpa_plan_limits {
    int32_t cp_size;
    int32_t max_seqs;
    cpa_layer_groups groups; /* groups of layers, and their pools of blocks */
    int64_t max_tokens;      /* tokens of all chunks of a step, at most */
} cpa_plan_limits;

void cpa_step_plan_init(cpa_step_plan *plan);
void cpa_step_plan_destroy(cpa_step_plan *plan);
/* Empties the plan and keeps its memory. */
void cpa_step_plan_clear(cpa_step_plan *plan);

/* Makes room for so many entries in all, so that adding up to them cannot fail. Returns 0, with every entry kept, if
 * there is no memory, else 1. */
int cpa_step_plan_reserve(cpa_step_plan *plan, int64_t chunks, int64_t releases, int64_t appends, int64_t block_ids,
                          int64_t token_ids);
/* The same for the entries that most plans do without. */
int cpa_step_plan_reserve_moves(cpa_step_plan *plan, int64_t swap_outs, int64_t swap_ins, int64_t copies,
                                int64_t nulled);
int cpa_step_plan_reserve_disk(cpa_step_plan *plan, int64_t stores, int64_t loads);
int cpa_step_plan_reserve_drawing(cpa_step_plan *plan, int64_t discards, int64_t cuts, int64_t samplings,
                                  int64_t biases, int64_t parents);
int cpa_step_plan_reserve_transfers(cpa_step_plan *plan, int64_t transfers, int64_t transfer_blocks);

/* Each reserves room for n more entries and returns a pointer to the first, zeroed, counted as used; NULL without
 * memory. */
cpa_plan_chunk *cpa_step_plan_add_chunk(cpa_step_plan *plan);
cpa_plan_append *cpa_step_plan_add_append(cpa_step_plan *plan);
int32_t *cpa_step_plan_add_release(cpa_step_plan *plan);
cpa_block_move *cpa_step_plan_add_swap_out(cpa_step_plan *plan);
cpa_block_move *cpa_step_plan_add_swap_in(cpa_step_plan *plan);
cpa_block_move *cpa_step_plan_add_copy(cpa_step_plan *plan);
cpa_disk_move *cpa_step_plan_add_store(cpa_step_plan *plan);
cpa_disk_move *cpa_step_plan_add_load(cpa_step_plan *plan);
cpa_plan_nulled *cpa_step_plan_add_nulled(cpa_step_plan *plan);
cpa_plan_discard *cpa_step_plan_add_discard(cpa_step_plan *plan);
cpa_plan_cut *cpa_step_plan_add_cut(cpa_step_plan *plan);
cpa_plan_sampling *cpa_step_plan_add_sampling(cpa_step_plan *plan);
cpa_plan_bias *cpa_step_plan_add_biases(cpa_step_plan *plan, int64_t n);
int32_t *cpa_step_plan_add_blocks(cpa_step_plan *plan, int64_t n);
uint32_t *cpa_step_plan_add_tokens(cpa_step_plan *plan, int64_t n);
int32_t *cpa_step_plan_add_parents(cpa_step_plan *plan, int64_t n);
cpa_plan_transfer *cpa_step_plan_add_transfer(cpa_step_plan *plan);
cpa_plan_transfer_block *cpa_step_plan_add_transfer_block(cpa_step_plan *plan);

#endif
