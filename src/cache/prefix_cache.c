#include "src/cache/prefix_cache.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* A digest is as good a hash as any. */
#define HASH_FUNCTION(key, length, hash) memcpy(&(hash), (key), sizeof(hash))
#include "base/hash_table.h"

typedef struct entry {
    cpa_prefix_digest digest;
    int32_t block;
    UT_hash_handle hh; /* hh.tbl is NULL while it cannot be found */
} entry;

struct cpa_prefix_cache {
    int32_t cp_size;
    int64_t num_blocks;
    EVP_MD *sha256;
    EVP_MD_CTX *hasher;
    uint8_t *text;   /* parent digest, then tokens */
    entry **entries; /* [cp_size * 2][num_blocks]: full, then partial; memory that is touched when it is used */
    entry *found;    /* hash table */
};

cpa_status cpa_prefix_cache_create(int32_t cp_size, int64_t num_blocks, int32_t block_size, cpa_prefix_cache **out,
                                   cpa_error *err) {
    cpa_prefix_cache *cache = calloc(1, sizeof *cache);
    if (!cache) goto no_memory;
    cache->cp_size = cp_size;
    cache->num_blocks = num_blocks;
    cache->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    cache->hasher = EVP_MD_CTX_new();
    if (!cache->sha256 || !cache->hasher) {
        cpa_prefix_cache_destroy(cache);
        return cpa_fail(err, CPA_UNSUPPORTED, "prefix cache: OpenSSL gives no SHA-256");
    }
    cache->text = malloc(sizeof(cpa_prefix_digest) + (size_t)block_size * sizeof(uint32_t));
    cache->entries = calloc(2 * (size_t)cp_size, sizeof *cache->entries);
    if (!cache->text || !cache->entries) goto no_memory;
    for (int32_t i = 0; i < 2 * cp_size; i++)
        if (!(cache->entries[i] = calloc((size_t)num_blocks, sizeof **cache->entries))) goto no_memory;
    *out = cache;
    return CPA_OK;

no_memory:
    cpa_prefix_cache_destroy(cache);
    return cpa_fail(err, CPA_NO_MEMORY, "prefix cache: no memory for %" PRId64 " blocks on %" PRId32 " ranks",
                    num_blocks, cp_size);
}

void cpa_prefix_cache_destroy(cpa_prefix_cache *cache) {
    if (!cache) return;
    HASH_CLEAR(hh, cache->found);
    for (int32_t i = 0; cache->entries && i < 2 * cache->cp_size; i++) free(cache->entries[i]);
    free(cache->entries);
    free(cache->text);
    EVP_MD_CTX_free(cache->hasher);
    EVP_MD_free(cache->sha256);
    free(cache);
}

int cpa_prefix_cache_root(cpa_prefix_cache *cache, const char *identity, const char *secret, uint64_t group,
                          cpa_prefix_digest *out) {
    /* Each text with its terminator: where one ends and the next begins is part of what is hashed. */
    const char *texts[] = {identity ? identity : "", secret ? secret : ""};
    int ok = EVP_DigestInit_ex2(cache->hasher, cache->sha256, NULL);
    for (int i = 0; ok && i < 2; i++) ok = EVP_DigestUpdate(cache->hasher, texts[i], strlen(texts[i]) + 1);
    return ok && EVP_DigestUpdate(cache->hasher, &group, sizeof group) &&
           EVP_DigestFinal_ex(cache->hasher, out->bytes, NULL);
}

uint32_t *cpa_prefix_cache_tokens(cpa_prefix_cache *cache) {
    return (uint32_t *)(void *)(cache->text + sizeof(cpa_prefix_digest));
}

int cpa_prefix_cache_link(cpa_prefix_cache *cache, const cpa_prefix_digest *parent, int32_t n, cpa_prefix_digest *out) {
    memcpy(cache->text, parent->bytes, sizeof parent->bytes);
    return EVP_DigestInit_ex2(cache->hasher, cache->sha256, NULL) &&
           EVP_DigestUpdate(cache->hasher, cache->text, sizeof *parent + (size_t)n * sizeof(uint32_t)) &&
           EVP_DigestFinal_ex(cache->hasher, out->bytes, NULL);
}

int32_t cpa_prefix_cache_find(const cpa_prefix_cache *cache, const cpa_prefix_digest *digest) {
    entry *e;
    HASH_FIND(hh, cache->found, digest, sizeof *digest, e);
    return e ? e->block : -1;
}

int cpa_prefix_cache_add(cpa_prefix_cache *cache, const cpa_prefix_digest *digest, int32_t rank, int32_t block,
                         int partial) {
    entry *e = &cache->entries[2 * rank + partial][block];
    if (e->hh.tbl || cpa_prefix_cache_find(cache, digest) >= 0) return 0;
    e->digest = *digest;
    e->block = block;
    HASH_ADD(hh, cache->found, digest, sizeof e->digest, e);
    return e->hh.tbl != NULL;
}

void cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block) {
    for (int partial = 0; partial < 2; partial++) {
        entry *e = &cache->entries[2 * rank + partial][block];
        if (!e->hh.tbl) continue;
        HASH_DEL(cache->found, e);
        memset(e, 0, sizeof *e);
    }
}

int cpa_prefix_cache_holds(const cpa_prefix_cache *cache, int32_t rank, int32_t block) {
    return cache->entries[2 * rank][block].hh.tbl || cache->entries[2 * rank + 1][block].hh.tbl;
}
