/* Deliberate bugs that the tests switch on, one at a time, to show that the checks catch them. */
#ifndef CPA_TESTS_FAULT_H
#define CPA_TESTS_FAULT_H

typedef enum cpa_fault {
    CPA_FAULT_NONE = 0,
    CPA_FAULT_DROPPED_SHARD,   /* what a peer sent is not attended */
    CPA_FAULT_STALE_BLOCK,     /* the new keys and values of some tokens are not written */
    CPA_FAULT_OFF_BY_ONE_MASK, /* a query does not see its own key */
    CPA_FAULT_BASE2_LSE,       /* the LSE of remote partial states is in base 2 */
    CPA_FAULT_SWAPPED_KV_HEAD, /* queries read the keys and values of another head */
    CPA_FAULT_WRONG_SCALE,     /* quantised keys are read with a wrong scale */
    CPA_FAULT_STALE_HASH,      /* an evicted block can still be found by its hash */
    CPA_FAULT_UNCOUNTED_OWNER, /* a sequence that shares a block is not counted as its owner */
    CPA_FAULT_LEAKED_BLOCK,    /* a sequence that ends keeps one of its blocks */
    CPA_FAULT_EARLY_REUSE,     /* a block is handed out while a copy still reads it */
    CPA_FAULT_LOST_SEQUENCE,   /* a preempted sequence is forgotten */
    CPA_FAULT_DAMAGED_SWAP,    /* bits of blocks flip in host memory */
    CPA_FAULT_STARVED_WAITER,  /* a request waits for a prefix that nobody computes any more */
    CPA_FAULT_FAILED_RANK,     /* a step fails on the last rank alone */
    CPA_FAULT_NAN_KEY,         /* the synthetic keys of tokens at position 7 begin with NaN */
    CPA_FAULT_UNEVEN_UNIT,     /* rank 1 shares the block before the one that was found with those of the others */
    CPA_FAULT_EARLY_HASH,      /* a block can be found while drafts fill it that nobody has accepted */
    CPA_FAULT_ADJUSTED_LENGTH, /* the last rank takes off wrong drafts that it has itself, and no others */
    CPA_FAULT_FLAT_TREE,       /* drafts of a tree see those of other branches */
    CPA_FAULT_DEEP_PREFIX,     /* requests are taken to share more keys than they do */
    CPA_FAULT_LOST_RULES,      /* scores stay as they are: no rules, no bits, no sinks */
    CPA_FAULT_ROWS_FOR_RUNS,   /* attend reads rows in one piece where the layout has runs */
    CPA_FAULT_SWAPPED_HALVES,  /* halves of the rotated elements of latents change places */
    CPA_FAULT_WRONG_TILE,      /* the second tile of a latent has the scale of the first */
    CPA_FAULT_LATE_VALUES,     /* values begin in the wrong column of a latent */
    CPA_FAULT_WRONG_CHOICE,    /* an indexer's list has a key that was not chosen in the place of one that was */
    CPA_FAULT_STOPPED_LAST,    /* the last rank stops when its work is done, before it tells the others */
    CPA_FAULT_STOPPED_IN_MPI,  /* it stops in MPI_Finalize */
    CPA_FAULT_COUNT
} cpa_fault;

extern cpa_fault cpa_fault_armed;
/* The one that the program is to arm, from its start on. */
extern cpa_fault cpa_fault_named;
static inline int cpa_fault_is(cpa_fault fault) {
    return cpa_fault_armed == fault;
}
/* The fault of that name, as in "dropped-shard"; CPA_FAULT_COUNT if there is none. */
cpa_fault cpa_fault_by_name(const char *name);

#endif
