#include "src/cache/prefix_cache.h"

#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* A digest is as good a hash as any. */
#define HASH_FUNCTION(key, length, hash) memcpy(&(hash), (key), sizeof(hash))
#include "base/hash_table.h"

/* What is found by one digest. */
typedef struct unit {
    cpa_prefix_digest digest;
    UT_hash_handle hh;
    int32_t blocks[]; /* [cp_size] */
} unit;

struct cpa_prefix_cache {
    int32_t cp_size;
    int64_t num_blocks;
    EVP_MD *sha256;
    EVP_MD_CTX *hasher;
    uint8_t *text; /* parent digest, then tokens */
    unit ***units; /* [cp_size * 2][num_blocks] of each block: full, then partial; NULL while it cannot be found */
    unit *found;   /* hash table */
};

cpa_status cpa_prefix_cache_create(int32_t cp_size, int64_t num_blocks, int32_t block_size, cpa_prefix_cache **out,
                                   cpa_error *err) {
    cpa_prefix_cache *cache = calloc(1, sizeof *cache);
    if (!cache) goto no_memory;
    cache->cp_size = cp_size;
    cache->num_blocks = num_blocks;
    cache->hasher = EVP_MD_CTX_new();
    if (!cache->hasher) goto no_memory;
    errno = 0;
    cache->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (!cache->sha256 && errno == ENOMEM) goto no_memory;
    if (!cache->sha256) {
        cpa_prefix_cache_destroy(cache);
        return cpa_fail(err, CPA_UNSUPPORTED, "prefix cache: OpenSSL gives no SHA-256");
    }
    cache->text = malloc(sizeof(cpa_prefix_digest) + (size_t)block_size * sizeof(uint32_t));
    cache->units = calloc(2 * (size_t)cp_size, sizeof *cache->units);
    if (!cache->text || !cache->units) goto no_memory;
    for (int32_t i = 0; i < 2 * cp_size; i++)
        if (!(cache->units[i] = calloc((size_t)num_blocks, sizeof **cache->units))) goto no_memory;
    *out = cache;
    return CPA_OK;

no_memory:
    cpa_prefix_cache_destroy(cache);
    return cpa_fail(err, CPA_NO_MEMORY, "prefix cache: no memory for %" PRId64 " blocks on %" PRId32 " ranks",
                    num_blocks, cp_size);
}

void cpa_prefix_cache_destroy(cpa_prefix_cache *cache) {
    if (!cache) return;
    unit *u, *next;
    HASH_ITER(hh, cache->found, u, next) {
        HASH_DEL(cache->found, u);
        free(u);
    }
    for (int32_t i = 0; cache->units && i < 2 * cache->cp_size; i++) free(cache->units[i]);
    free(cache->units);
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

static unit *find(const cpa_prefix_cache *cache, const cpa_prefix_digest *digest) {
    unit *u;
    HASH_FIND(hh, cache->found, digest, sizeof *digest, u);
    return u;
}

const int32_t *cpa_prefix_cache_find(const cpa_prefix_cache *cache, const cpa_prefix_digest *digest) {
    const unit *u = find(cache, digest);
    return u ? u->blocks : NULL;
}

/* Makes the blocks of a unit name `to`: it, or NULL. */
static void name_blocks(cpa_prefix_cache *cache, const unit *u, int partial, unit *to) {
    for (int32_t r = 0; r < cache->cp_size; r++)
        if (u->blocks[r] >= 0) cache->units[2 * r + partial][u->blocks[r]] = to;
}

int cpa_prefix_cache_add(cpa_prefix_cache *cache, const cpa_prefix_digest *digest, const int32_t *blocks, int partial) {
    const size_t bytes = (size_t)cache->cp_size * sizeof *blocks;
    for (int32_t r = 0; r < cache->cp_size; r++)
        if (blocks[r] >= 0 && cache->units[2 * r + partial][blocks[r]]) return 0;
    if (find(cache, digest)) return 0;
    unit *u = calloc(1, sizeof *u + bytes);
    if (!u) return 0;
    u->digest = *digest;
    memcpy(u->blocks, blocks, bytes);
    HASH_ADD(hh, cache->found, digest, sizeof u->digest, u);
    if (!u->hh.tbl) {
        free(u);
        return 0;
    }
    name_blocks(cache, u, partial, u);
    return 1;
}

const int32_t *cpa_prefix_cache_unit(const cpa_prefix_cache *cache, int32_t rank, int32_t block) {
    const unit *full = cache->units[2 * rank][block], *partial = cache->units[2 * rank + 1][block];
    return full ? full->blocks : partial ? partial->blocks : NULL;
}

const cpa_prefix_digest *cpa_prefix_cache_digest(const cpa_prefix_cache *cache, int32_t rank, int32_t block) {
    const unit *full = cache->units[2 * rank][block];
    return full ? &full->digest : NULL;
}

void cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block) {
    for (int partial = 0; partial < 2; partial++) {
        unit *u = cache->units[2 * rank + partial][block];
        if (!u) continue;
        HASH_DEL(cache->found, u);
        name_blocks(cache, u, partial, NULL);
        free(u);
    }
}
