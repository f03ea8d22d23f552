/* Which block holds which prefix: the content of full blocks, found by a chained SHA-256.
 *
 *     root = H(identity, secret)          what keys and values depend on besides tokens, and who may share
 *     d(0) = H(root, tokens of block 0)
 *     d(j) = H(d(j-1), tokens of block j)
 *
 * so that one digest stands for a block and for everything before it. Blocks are those of the sequence, in its order:
 * block j, tokens [j * B, (j+1) * B), lies whole on one rank. The tokens of a prompt behind its last full block have a
 * digest of their own, which is that of a shorter text and so never that of a full block. The cache does not count
 * owners: the pool of the rank keeps the block and tells when it is evicted. Pure logic; one thread. */
#ifndef CPA_PREFIX_CACHE_H
#define CPA_PREFIX_CACHE_H

#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_prefix_digest {
    uint8_t bytes[32];
} cpa_prefix_digest;

typedef struct cpa_prefix_cache cpa_prefix_cache;

/* For the blocks [0, num_blocks) of each of cp_size ranks, and for blocks of at most block_size tokens. */
cpa_status cpa_prefix_cache_create(int32_t cp_size, int64_t num_blocks, int32_t block_size, cpa_prefix_cache **out,
                                   cpa_error *err);
void cpa_prefix_cache_destroy(cpa_prefix_cache *cache);

/* The root of all prefixes with this identity and secret (texts; NULL counts as empty), in `group` (0: none). Returns 0
 * if it could not be computed. */
int cpa_prefix_cache_root(cpa_prefix_cache *cache, const char *identity, const char *secret, uint64_t group,
                          cpa_prefix_digest *out);
/* Where the n tokens after a prefix are to be put before cpa_prefix_cache_link. */
uint32_t *cpa_prefix_cache_tokens(cpa_prefix_cache *cache);
/* The digest of the prefix `parent` followed by the first n of cpa_prefix_cache_tokens. Returns 0 if it could not be
 * computed. */
int cpa_prefix_cache_link(cpa_prefix_cache *cache, const cpa_prefix_digest *parent, int32_t n, cpa_prefix_digest *out);

/* The block that holds the last tokens of a prefix; -1 if none does. */
int32_t cpa_prefix_cache_find(const cpa_prefix_cache *cache, const cpa_prefix_digest *digest);
/* Lets the block be found by the digest of a full block, or (partial) of the end of a prompt, unless another one is
 * already. Returns 1 if it now can be found by it. */
int cpa_prefix_cache_add(cpa_prefix_cache *cache, const cpa_prefix_digest *digest, int32_t rank, int32_t block,
                         int partial);
/* The block is found no more. */
void cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block);
/* Whether the block can be found. */
int cpa_prefix_cache_holds(const cpa_prefix_cache *cache, int32_t rank, int32_t block);

#endif
