/* Which blocks hold which prefix: the content of full blocks, found by a chained SHA-256.
 *
 *     root = H(identity, secret)          what keys and values depend on besides tokens, and who may share
 *     d(0) = H(root, tokens of block 0)
 *     d(j) = H(d(j-1), tokens of block j)
 *
 * so that one digest stands for a block and for everything before it. Blocks are those of the text, in its order: block
 * j is tokens [j * B, (j+1) * B). What is found by a digest is a unit: the block of a rank where block j lies whole,
 * or, where runs of ranks are shorter than blocks, a block of each rank, which hold the last N * B tokens together. The
 * tokens of a prompt behind its last full unit have a digest of their own, which is that of a shorter text and so never
 * that of a full unit; they may lie on some ranks alone. The cache does not count owners: the pools of the ranks keep
 * the blocks and tell when one is evicted. Pure logic; one thread. */
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

/* The unit with the last tokens of a prefix: [cp_size] the block of each rank, -1 for a rank that has none of these
 * tokens; NULL if there is none. It is valid until something is dropped. */
const int32_t *cpa_prefix_cache_find(const cpa_prefix_cache *cache, const cpa_prefix_digest *digest);
/* Lets the blocks [cp_size] be found by the digest of a full unit, or (partial) of the end of a prompt, unless others
 * are already, or one of them is by another digest. Returns 1 if they now can be found by it. */
int cpa_prefix_cache_add(cpa_prefix_cache *cache, const cpa_prefix_digest *digest, const int32_t *blocks, int partial);
/* The unit that a block of a rank belongs to, as above: the full one, or the end of a prompt; NULL if there is none. */
const int32_t *cpa_prefix_cache_unit(const cpa_prefix_cache *cache, int32_t rank, int32_t block);
/* The digest that the full unit of a block of a rank is found by; NULL if there is none. It is valid until something is
 * dropped. */
const cpa_prefix_digest *cpa_prefix_cache_digest(const cpa_prefix_cache *cache, int32_t rank, int32_t block);
/* The units that the block belongs to are found no more. */
void cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block);

#endif
