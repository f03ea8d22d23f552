/* How many blocks of KV cache a run needs, and what fits in memory. */
#ifndef CPA_LLM_CACHE_SIZE_H
#define CPA_LLM_CACHE_SIZE_H

#include <cpattn/engine.h>

/* What decides the size of a rank's cache. */
typedef struct cpa_cache_limits {
    cpa_model_shape model;
    int32_t block_size;
    cpa_owner_map map;
    int32_t max_num_seqs;
    int32_t window_seqs; /* as in cpa_engine_options */
    int64_t max_num_batched_tokens;
    int64_t precise_tokens; /* as in cpa_engine_options */
    int64_t memory_bytes;   /* bytes that a rank may use for its cache */
    int64_t local_tokens;   /* for cpa_cache_size_for: sequences of up to so many tokens may lie on one rank */
} cpa_cache_limits;

/* The size of a rank's cache, as cpa_engine_options have it. */
typedef struct cpa_cache_size {
    int64_t num_blocks;
    int32_t window_seqs;
} cpa_cache_size;

/* What a rank's cache may have of its memory. */
typedef struct cpa_cache_memory {
    int64_t memory_bytes;  /* free memory of the rank */
    int64_t network_bytes; /* bytes of it that the network takes */
    /* On a device that serves: how much of it network, exchanges and cache take together. 0: half of what the network
     * leaves goes to the cache, and memory to everything else. */
    double share;
    int64_t num_blocks;    /* blocks that the user asks for, which may take all that the network leaves; 0: none */
    int64_t staging_bytes; /* with a share: bytes that exchanges take; 0: as many as a device's take by default */
} cpa_cache_memory;
int64_t cpa_cache_memory_bytes(const cpa_cache_memory *memory);

/* Bytes of one block, all layers, keys and values. */
int64_t cpa_cache_block_bytes(const cpa_cache_limits *limits);

/* Bytes of a rank's cache with so many blocks for the layers that keep most, and most blocks that memory has room for.
 */
int64_t cpa_cache_bytes(const cpa_cache_limits *limits, int64_t blocks);
int64_t cpa_cache_most_blocks(const cpa_cache_limits *limits);

/* Blocks that the fullest rank holds of a sequence of `tokens` tokens. */
int64_t cpa_cache_blocks_of(const cpa_cache_limits *limits, int64_t tokens);

/* Tokens of the longest single sequence that `blocks` blocks a rank can hold. */
int64_t cpa_cache_tokens_of(const cpa_cache_limits *limits, int64_t blocks);

/* Blocks of one rank with which max_num_seqs of the requests can run at once, whichever these are, or as many as memory
 * allows. CPA_INVALID, with the numbers, if the largest request alone does not fit. */
cpa_status cpa_cache_size_for(const cpa_cache_limits *limits, const cpa_request *requests, int64_t count, int64_t *out,
                              cpa_error *err);

/* Checks a number of blocks that the user asks for by the option of that name. CPA_INVALID, with the numbers, if memory
 * does not hold them. */
cpa_status cpa_cache_check(const cpa_cache_limits *limits, const char *option, int64_t blocks, cpa_error *err);

#endif
