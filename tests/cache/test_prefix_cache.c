/* The prefix cache: digests that stand for all that comes before, and blocks that are found by them. */
#include <string.h>

#include "src/cache/prefix_cache.h"
#include "tests/fixtures/unit.h"

enum { RANKS = 2, BLOCKS = 8, BLOCK_SIZE = 4 };

static cpa_prefix_cache *new_cache(void) {
    cpa_prefix_cache *cache = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_prefix_cache_create(RANKS, BLOCKS, BLOCK_SIZE, &cache, NULL), CPA_OK);
    return cache;
}

static cpa_prefix_digest root_of(cpa_prefix_cache *cache, const char *identity, const char *salt, uint64_t group) {
    cpa_prefix_digest digest;
    CU_ASSERT_FATAL(cpa_prefix_cache_root(cache, identity, salt, group, &digest));
    return digest;
}

/* The digest of n tokens first, first + 1, ... after a prefix. */
static cpa_prefix_digest link_of(cpa_prefix_cache *cache, cpa_prefix_digest parent, uint32_t first, int32_t n) {
    cpa_prefix_digest digest;
    for (int32_t i = 0; i < n; i++) cpa_prefix_cache_tokens(cache)[i] = first + (uint32_t)i;
    CU_ASSERT_FATAL(cpa_prefix_cache_link(cache, &parent, n, &digest));
    return digest;
}

static int equal(cpa_prefix_digest a, cpa_prefix_digest b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

/* SHA-256 of 32 zero bytes and the tokens 1, 2 (little-endian), as sha256sum gives it. */
static void a_link_is_the_sha_256_of_parent_and_tokens(void) {
    static const uint8_t expected[] = {0xe7, 0xca, 0x17, 0xd6, 0x58, 0x1d, 0x12, 0x6a, 0xf7, 0xe0, 0xc8,
                                       0x57, 0x4c, 0xdd, 0x89, 0x87, 0xed, 0x93, 0x31, 0x99, 0x69, 0xb5,
                                       0x4a, 0x5e, 0x2a, 0x27, 0x2d, 0x58, 0x5a, 0x38, 0xf3, 0xea};
    cpa_prefix_cache *cache = new_cache();
    cpa_prefix_digest zero = {{0}}, got = link_of(cache, zero, 1, 2);
    CU_ASSERT_EQUAL(memcmp(got.bytes, expected, sizeof expected), 0);
    cpa_prefix_cache_destroy(cache);
}

static void equal_tokens_after_different_beginnings_differ(void) {
    cpa_prefix_cache *cache = new_cache();
    cpa_prefix_digest root = root_of(cache, "model", "", 0), first = link_of(cache, root, 7, 4);
    CU_ASSERT(equal(link_of(cache, root, 7, 4), first));
    CU_ASSERT(!equal(link_of(cache, first, 7, 4), first));
    CU_ASSERT(!equal(link_of(cache, root, 8, 4), first));
    CU_ASSERT(!equal(link_of(cache, root, 7, 3), first));
    cpa_prefix_cache_destroy(cache);
}

static void identity_salt_and_group_are_each_part_of_the_root(void) {
    cpa_prefix_cache *cache = new_cache();
    cpa_prefix_digest roots[] = {root_of(cache, "model", "", 0),  root_of(cache, "mode", "", 0),
                                 root_of(cache, "model", "s", 0), root_of(cache, "models", "", 0),
                                 root_of(cache, "model", "", 1),  root_of(cache, "", "model", 0)};
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < i; j++) CU_ASSERT(!equal(roots[i], roots[j]));
    CU_ASSERT(equal(root_of(cache, "model", NULL, 0), roots[0]));
    cpa_prefix_cache_destroy(cache);
}

/* Lets one block of a rank be found. */
static int add_block(cpa_prefix_cache *cache, const cpa_prefix_digest *digest, int32_t rank, int32_t block,
                     int partial) {
    int32_t unit[RANKS] = {-1, -1};
    unit[rank] = block;
    return cpa_prefix_cache_add(cache, digest, unit, partial);
}

static void check_found(cpa_prefix_cache *cache, const cpa_prefix_digest *digest, int32_t first, int32_t second) {
    const int32_t *unit = cpa_prefix_cache_find(cache, digest);
    CU_ASSERT_PTR_NOT_NULL_FATAL(unit);
    CU_ASSERT_EQUAL(unit[0], first);
    CU_ASSERT_EQUAL(unit[1], second);
}

static void a_block_is_found_until_it_is_dropped(void) {
    cpa_prefix_cache *cache = new_cache();
    cpa_prefix_digest root = root_of(cache, "", "", 0), full = link_of(cache, root, 1, 4),
                      tail = link_of(cache, full, 5, 2);
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_find(cache, &full));
    CU_ASSERT(add_block(cache, &full, 1, 6, 0));
    CU_ASSERT(add_block(cache, &tail, 1, 6, 1));
    check_found(cache, &full, -1, 6);
    check_found(cache, &tail, -1, 6);
    CU_ASSERT_PTR_NOT_NULL(cpa_prefix_cache_unit(cache, 1, 6));
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_unit(cache, 0, 6));
    cpa_prefix_cache_drop(cache, 1, 6);
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_find(cache, &full));
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_find(cache, &tail));
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_unit(cache, 1, 6));
    cpa_prefix_cache_destroy(cache);
}

static void the_first_block_with_a_content_stays_the_one_that_is_found(void) {
    cpa_prefix_cache *cache = new_cache();
    cpa_prefix_digest root = root_of(cache, "", "", 0), full = link_of(cache, root, 1, 4);
    CU_ASSERT(add_block(cache, &full, 0, 2, 0));
    CU_ASSERT(!add_block(cache, &full, 0, 3, 0));
    check_found(cache, &full, 2, -1);
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_unit(cache, 0, 3));
    cpa_prefix_cache_drop(cache, 0, 3);
    check_found(cache, &full, 2, -1);
    cpa_prefix_cache_destroy(cache);
}

/* A unit over both ranks goes with whichever of its blocks is dropped; the end of a prompt that lies on the first alone
 * stays when the second goes. */
static void a_unit_is_found_until_one_of_its_blocks_is_dropped(void) {
    cpa_prefix_cache *cache = new_cache();
    cpa_prefix_digest root = root_of(cache, "", "", 0), full = link_of(cache, root, 1, 4),
                      tail = link_of(cache, root, 1, 1), other = link_of(cache, root, 9, 4);
    static const int32_t both[RANKS] = {3, 5}, first[RANKS] = {3, -1}, overlapping[RANKS] = {4, 5};
    CU_ASSERT(cpa_prefix_cache_add(cache, &tail, first, 1));
    CU_ASSERT(cpa_prefix_cache_add(cache, &full, both, 0));
    CU_ASSERT(!cpa_prefix_cache_add(cache, &other, overlapping, 0)); /* one of them has another content */
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_unit(cache, 0, 4));
    check_found(cache, &full, 3, 5);
    check_found(cache, &tail, 3, -1);
    CU_ASSERT_EQUAL(cpa_prefix_cache_unit(cache, 0, 3)[1], 5); /* the full one */
    cpa_prefix_cache_drop(cache, 1, 5);
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_find(cache, &full));
    check_found(cache, &tail, 3, -1);
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_unit(cache, 1, 5));
    CU_ASSERT_EQUAL(cpa_prefix_cache_unit(cache, 0, 3)[1], -1);
    CU_ASSERT(cpa_prefix_cache_add(cache, &full, both, 0));
    cpa_prefix_cache_drop(cache, 0, 3);
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_find(cache, &full));
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_find(cache, &tail));
    CU_ASSERT_PTR_NULL(cpa_prefix_cache_unit(cache, 1, 5));
    cpa_prefix_cache_destroy(cache);
}

static const cpa_test tests[] = {
    {"a link is the SHA-256 of parent and tokens", a_link_is_the_sha_256_of_parent_and_tokens},
    {"equal tokens after different beginnings differ", equal_tokens_after_different_beginnings_differ},
    {"identity, salt and group are each part of the root", identity_salt_and_group_are_each_part_of_the_root},
    {"a block is found until it is dropped", a_block_is_found_until_it_is_dropped},
    {"the first block with a content stays the one that is found",
     the_first_block_with_a_content_stays_the_one_that_is_found},
    {"a unit is found until one of its blocks is dropped", a_unit_is_found_until_one_of_its_blocks_is_dropped},
};

CPA_TEST_MAIN("prefix cache", tests)
