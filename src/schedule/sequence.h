/* A request in the hands of the scheduler: how far it has come, and which blocks it holds in each pool. Pure logic. */
#ifndef CPA_SEQUENCE_H
#define CPA_SEQUENCE_H

#include <stdint.h>

#include "src/cache/block_pool.h"
#include "src/cache/prefix_cache.h"
#include "src/schedule/drafting.h"
#include "src/schedule/scheduler.h"
#include "src/schedule/tenants.h"

/* What it has in one pool: of a group of layers on a rank. */
typedef struct cpa_sequence_shard {
    int64_t held;      /* entries of the block table */
    int64_t voided;    /* entries, from the first behind the sinks on, that hold no block any more */
    int64_t announced; /* entries that the ranks know from earlier plans */
    int64_t swapped;   /* entries of the table in host memory */
    /* First group, while the sequence waits: units of its prefix found on this rank alone, when last looked up. */
    int64_t found;
} cpa_sequence_shard;

struct cpa_sequence {
    cpa_scheduler_request request; /* the request, without salt and tenant name */
    cpa_tenant *tenant;            /* tenant of the request, which the sequence leaves when it is destroyed */
    struct cpa_waiting_line *line; /* the line of a waiting sequence (waiting_lines.h) */
    int32_t level;                 /* order among sequences: level, then key, then id */
    double key;
    int64_t heap_index;      /* index in the heap of the queue that has the sequence, kept by the queue */
    int arrived;             /* not 0: the sequence waits or runs; 0: its request is yet to arrive */
    cpa_placement placement; /* where the sequence lies; may change while it waits */
    int32_t first_rank;      /* rank that owns position 0 of a sharded sequence */
    int32_t index;    /* while the sequence runs: its index in the tables of running sequences, here and on the ranks */
    int introduced;   /* the ranks know the sequence by its index */
    int restart;      /* blocks that were swapped in or imported are damaged: all is computed again */
    int held_back;    /* the sequence was held back for want of blocks for all its tokens (scheduler_chunk.h) */
    int64_t computed; /* tokens in the cache, once every planned step has run */
    int64_t emitted;  /* output tokens, once every planned step has run */
    int64_t served;   /* prompt tokens that have counted as service of the tenant */
    int64_t reported; /* output tokens that have been reported */
    uint32_t *outputs; /* [reported] the output tokens that were drawn */
    int64_t cap_outputs;
    int64_t planned;        /* tokens given to the sequence in the plan being made; 0: none */
    cpa_drafting *drafting; /* drafts of the sequence's tokens; NULL: none was needed yet */
    /* What it guesses of the tokens behind the last one: the last of the tokens planned, or of those that the last plan
     * gave it; n_drafts: how many no report has accepted yet. */
    const uint32_t *drafts;
    const int32_t *parents; /* parents of `drafts`, as cpa_drafting_ask gives them */
    int64_t n_drafts, n_listed;
    int64_t accepted; /* index of the last draft that a report has accepted; -1: none */
    uint32_t last;    /* the token that was reported last */
    uint32_t guess;   /* what was told to follow `last`; CPA_NO_TOKEN: nothing was */
    uint32_t told;    /* the draft of the last plan, where drafts are told */
    int64_t
        misplaced; /* of the tokens before the last one, those that lie in the cache where a tree had them, and so are
                          not `computed` but computed again */
    int64_t importable; /* tokens of the prompt that may be imported; 0: none */
    int64_t imported;   /* tokens of its last import */
    int import_failed;  /* an import has failed before */
    int exported;
    cpa_prefix_digest parcels; /* root of the digests of its parcels, where it imports or exports */
    uint64_t ready;            /* first step in which the sequence may be given tokens */
    int32_t *blocks; /* [pools, stride] ids of the blocks held, -1 where voided; NULL: the sequence does not run */
    int64_t stride;  /* most entries of a table over the sequence's life */
    int32_t *host;   /* [pools, stride] host blocks; NULL: the sequence is not swapped out */

    /* Of a waiting sequence: its prefix, unit by unit. */
    cpa_prefix_digest root;
    cpa_prefix_digest *probe; /* [probe_capacity] digests of its first blocks, as far as they were needed */
    int64_t n_probe, probe_capacity;
    int64_t found_sharded;             /* as `found` of a shard, sharded */
    struct cpa_sequence *next_skipped; /* in the plan being made */
    int64_t fetched; /* units that were fetched for it, or plans that it waited to (scheduler_fetch.h) */
    int queried;     /* the prefix is counted in the statistics */
    /* Of a running sequence: its prefix, unit by unit. */
    cpa_prefix_digest tip; /* digest of the first `linked` units, which are shared or can be found by others */
    int64_t linked;
    int64_t shared;             /* leading units, of the `linked`, that were found when the sequence was admitted */
    int tail_linked;            /* the end of its prompt after the last full unit is shared, or found by others */
    int has_next;               /* the digest of what it will compute next is known */
    cpa_prefix_digest next;     /* the digest of what it will compute next */
    cpa_prefix_digest next_key; /* the digest by which others look for what it will compute next */
    int32_t next_tokens;        /* tokens of the unit in which `next` ends, up to that end */
    UT_hash_handle hh;
    UT_hash_handle pending;      /* by `next_key`, among the running sequences */
    cpa_sequence_shard shards[]; /* [pools] */
};

/* A waiting sequence; NULL without memory. Its first rank follows from `first`, the digest of its first block (or of
 * what there is of it), so that short sequences are spread over the ranks, and those that begin with the same block
 * begin on the same rank. */
cpa_sequence *cpa_sequence_create(const cpa_scheduler_options *options, const cpa_scheduler_request *request,
                                  const cpa_prefix_digest *first);
void cpa_sequence_destroy(cpa_sequence *sequence);

/* Entries of a table on the fullest rank that `tokens` tokens of a sharded sequence need. */
int64_t cpa_request_blocks(const cpa_scheduler_options *options, int64_t tokens);
/* Blocks that a group of layers needs on the fullest rank to run a sequence of so many tokens. The first one needs
 * them all at once, as prompts that begin alike find all of them. */
int64_t cpa_request_needs(const cpa_scheduler_options *options, int32_t group, cpa_placement_kind kind, int64_t tokens);
/* Whether the sequence may lie on one rank, as far as its length says. */
int cpa_request_may_be_local(const cpa_scheduler_options *options, const cpa_scheduler_request *request);

/* Tokens of what is shared at once in a placement: those of a block, or, where runs are shorter than blocks, those of a
 * block on every rank. Unit j begins at position j times that, and with a block of every rank that has tokens of it. */
int64_t cpa_prefix_unit(const cpa_scheduler_options *options, cpa_placement placement);
/* What a prefix with that digest is found by: copies of it that lie differently on the ranks are found apart. Sharded
 * ones do where the prompt of one ends within the first block and its output goes on as the prompt of another. */
cpa_prefix_digest cpa_sequence_key(cpa_placement placement, const cpa_prefix_digest *digest);

/* Tokens that there are: the prompt and what has been emitted. */
int64_t cpa_sequence_known(const cpa_sequence *sequence);
/* How many of them the scheduler could name: all but what was drawn and has not been reported. */
int64_t cpa_sequence_named(const cpa_sequence *sequence);
/* The token at a position below that. */
uint32_t cpa_sequence_token(const cpa_sequence *sequence, const cpa_scheduler_options *options, int64_t position);
/* The draft of those listed that comes behind draft i, or behind the last token for -1, and is that token; -1: none
 * is. */
int64_t cpa_sequence_draft_behind(const cpa_sequence *sequence, int64_t i, uint32_t token);
/* Whether the next chunk is its last token, and those before it that are misplaced. */
int cpa_sequence_decodes(const cpa_sequence *sequence);
/* Whether a goes before b. */
int cpa_sequence_before(const cpa_sequence *a, const cpa_sequence *b);

/* Entries of a block table of a rank that `tokens` tokens need. */
int64_t cpa_sequence_needs(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t rank,
                           int64_t tokens);
/* Blocks that it lacks in a pool to hold its first `tokens` tokens. */
int64_t cpa_sequence_lacks(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool,
                           int64_t tokens);
/* The entries of a table that no query from a position on sees: the first, which is behind the sinks, and their end. */
int64_t cpa_sequence_first_unseen(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool);
int64_t cpa_sequence_unseen(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool,
                            int64_t position);
/* Where the id of a pool's block with tokens [first, end) of the sequence stands in `blocks`: `first` is where a unit
 * begins, and `end` no further than where it ends. NULL: the rank has none of them. */
int32_t *cpa_sequence_block(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool,
                            int64_t first, int64_t end);

/* Makes the tables that blocks are added to; 0 without memory. */
int cpa_sequence_open(cpa_sequence *sequence, int32_t n_pools);
/* Takes n blocks of pool number `index`, which must have them. */
void cpa_sequence_take(cpa_sequence *sequence, int32_t index, cpa_block_pool *pool, int64_t n);
/* Adds a block that someone else holds, or that is kept; or an entry that no query sees. */
cpa_status cpa_sequence_share(cpa_sequence *sequence, int32_t index, cpa_block_pool *pool, int32_t block,
                              cpa_error *err);
void cpa_sequence_skip_entry(cpa_sequence *sequence, int32_t index);
/* Gives back the block of an entry, which no query sees any more. */
cpa_status cpa_sequence_null_entry(cpa_sequence *sequence, int32_t index, int64_t entry, cpa_block_pool *pool,
                                   cpa_error *err);
/* Gives every block back to the pools, the last ones first: a prefix is worth more than what follows. */
cpa_status cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t n_pools, cpa_error *err);

#endif
