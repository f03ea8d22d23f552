/* The block pool: what is free, who owns the rest, and what is refused. */
#include <stdlib.h>
#include <string.h>

#include "src/cache/block_pool.h"
#include "tests/fixtures/unit.h"

static cpa_block_pool *new_pool(int64_t blocks) {
    cpa_block_pool *pool = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_block_pool_create(blocks, &pool, NULL), CPA_OK);
    return pool;
}

static void a_pool_needs_between_one_and_int32_max_blocks(void) {
    static const int64_t bad[] = {0, -1, INT64_C(1) << 31, INT64_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_block_pool *pool = NULL;
        cpa_error err = {0};
        CU_ASSERT_EQUAL(cpa_block_pool_create(bad[i], &pool, &err), CPA_INVALID);
        CU_ASSERT_PTR_NULL(pool);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected 1 to 2147483647"));
    }
}

static void take_is_all_or_nothing(void) {
    cpa_block_pool *pool = new_pool(5);
    int32_t blocks[6] = {-7, -7, -7, -7, -7, -7};
    CU_ASSERT(!cpa_block_pool_take(pool, 6, blocks));
    CU_ASSERT(!cpa_block_pool_take(pool, -1, blocks));
    CU_ASSERT_EQUAL(blocks[0], -7);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 5);
    CU_ASSERT(cpa_block_pool_take(pool, 5, blocks));
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 0);
    CU_ASSERT(cpa_block_pool_take(pool, 0, blocks));
    CU_ASSERT(!cpa_block_pool_take(pool, 1, blocks));
    cpa_block_pool_destroy(pool);
}

static void the_longest_free_block_is_taken_first(void) {
    cpa_block_pool *pool = new_pool(3);
    int32_t first[3], again[2];
    CU_ASSERT(cpa_block_pool_take(pool, 3, first));
    for (int32_t i = 0; i < 3; i++) CU_ASSERT_EQUAL(first[i], i);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, 2, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, 0, NULL), CPA_OK);
    CU_ASSERT(cpa_block_pool_take(pool, 2, again));
    CU_ASSERT_EQUAL(again[0], 2);
    CU_ASSERT_EQUAL(again[1], 0);
    cpa_block_pool_destroy(pool);
}

static void a_block_is_free_when_its_last_owner_lets_go(void) {
    cpa_block_pool *pool = new_pool(2);
    int32_t block;
    CU_ASSERT(cpa_block_pool_take(pool, 1, &block));
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, block, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_owners(pool, block), 2);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, block, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 1);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, block, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 2);
    CU_ASSERT_EQUAL(cpa_block_pool_owners(pool, block), 0);
    cpa_block_pool_destroy(pool);
}

static void a_double_free_is_an_error_that_names_the_block(void) {
    cpa_block_pool *pool = new_pool(4);
    int32_t blocks[2];
    cpa_error err = {0};
    CU_ASSERT(cpa_block_pool_take(pool, 2, blocks));
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, blocks[1], NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, blocks[1], &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "block pool: release of block 1, which is free");
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, blocks[1], NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 3);
    cpa_block_pool_destroy(pool);
}

static void an_id_out_of_range_is_an_error(void) {
    cpa_block_pool *pool = new_pool(4);
    static const int32_t bad[] = {-1, 4, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_error err = {0};
        CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, bad[i], NULL), CPA_INVALID);
        CU_ASSERT_EQUAL(cpa_block_pool_release(pool, bad[i], &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "blocks 0 to 3"));
        CU_ASSERT_EQUAL(cpa_block_pool_owners(pool, bad[i]), 0);
    }
    cpa_block_pool_destroy(pool);
}

static void the_peak_outlives_the_blocks(void) {
    cpa_block_pool *pool = new_pool(8);
    int32_t blocks[8];
    CU_ASSERT_EQUAL(cpa_block_pool_peak(pool), 0);
    CU_ASSERT(cpa_block_pool_take(pool, 5, blocks));
    for (int i = 0; i < 5; i++) CU_ASSERT_EQUAL(cpa_block_pool_release(pool, blocks[i], NULL), CPA_OK);
    CU_ASSERT(cpa_block_pool_take(pool, 3, blocks));
    CU_ASSERT_EQUAL(cpa_block_pool_peak(pool), 5);
    CU_ASSERT_EQUAL(cpa_block_pool_total(pool), 8);
    cpa_block_pool_destroy(pool);
}

/* Takes all blocks, keeps those of two parties in turn, and lets go of them in order. */
static void take_and_keep(cpa_block_pool *pool, const int32_t *parties, int32_t n) {
    int32_t blocks[16];
    CU_ASSERT_FATAL(cpa_block_pool_take(pool, n, blocks));
    for (int32_t i = 0; i < n; i++) {
        if (parties[i] >= 0) CU_ASSERT_EQUAL(cpa_block_pool_keep(pool, blocks[i], parties[i], NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_block_pool_release(pool, blocks[i], NULL), CPA_OK);
    }
}

static void note_eviction(void *ctx, int32_t block, int32_t party) {
    int32_t *evicted = ctx;
    CU_ASSERT_EQUAL(party, 0);
    evicted[++evicted[0]] = block;
}

static void kept_blocks_are_taken_last_and_the_least_recently_used_first(void) {
    cpa_block_pool *pool = new_pool(6);
    int32_t blocks[6], evicted[7] = {0};
    cpa_block_pool_set_evict(pool, note_eviction, evicted);
    take_and_keep(pool, (int32_t[]){0, -1, 0, 0, -1, -1}, 6);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 6);
    CU_ASSERT_EQUAL(cpa_block_pool_kept_count(pool), 3);
    /* Block 0 is used once more. */
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, 0, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_kept_count(pool), 2);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, 0, NULL), CPA_OK);
    CU_ASSERT(cpa_block_pool_take(pool, 3, blocks));
    CU_ASSERT_EQUAL(evicted[0], 0);
    CU_ASSERT(cpa_block_pool_take(pool, 3, blocks));
    CU_ASSERT_EQUAL(evicted[0], 3);
    CU_ASSERT(evicted[1] == 2 && evicted[2] == 3 && evicted[3] == 0);
    cpa_block_pool_destroy(pool);
}

/* Without an owner it is empty at once, behind those that are; with one when that lets go. */
static void a_block_that_is_forgotten_is_kept_no_more(void) {
    cpa_block_pool *pool = new_pool(3);
    int32_t blocks[3];
    take_and_keep(pool, (int32_t[]){0, 0, 0}, 3);
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, 1, NULL), CPA_OK);
    cpa_block_pool_forget(pool, 1);
    cpa_block_pool_forget(pool, 2);
    cpa_block_pool_forget(pool, 2); /* once more: nothing */
    CU_ASSERT_EQUAL(cpa_block_pool_kept_count(pool), 1);
    CU_ASSERT_EQUAL(cpa_block_pool_free_count(pool), 2);
    CU_ASSERT_EQUAL(cpa_block_pool_owners(pool, 1), 1);
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, 1, NULL), CPA_INVALID);
    CU_ASSERT(cpa_block_pool_take(pool, 3, blocks));
    CU_ASSERT(blocks[0] == 2 && blocks[1] == 1 && blocks[2] == 0);
    cpa_block_pool_destroy(pool);
}

static void a_kept_block_with_an_owner_is_not_taken(void) {
    cpa_block_pool *pool = new_pool(3);
    int32_t blocks[3];
    take_and_keep(pool, (int32_t[]){0, 0, 0}, 3);
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, 1, NULL), CPA_OK);
    CU_ASSERT(!cpa_block_pool_take(pool, 3, blocks));
    CU_ASSERT(cpa_block_pool_take(pool, 2, blocks));
    CU_ASSERT(blocks[0] == 0 && blocks[1] == 2);
    /* Taken, it is kept no more. */
    CU_ASSERT_EQUAL(cpa_block_pool_release(pool, 0, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, 0, NULL), CPA_INVALID);
    cpa_block_pool_destroy(pool);
}

static void the_party_that_keeps_the_most_gives_first(void) {
    cpa_block_pool *pool = new_pool(8);
    int32_t blocks[8];
    take_and_keep(pool, (int32_t[]){0, 1, 1, 1, 1, 1, 0, 1}, 8);
    CU_ASSERT(cpa_block_pool_take(pool, 4, blocks));
    CU_ASSERT(blocks[0] == 1 && blocks[1] == 2 && blocks[2] == 3 && blocks[3] == 4);
    cpa_block_pool_destroy(pool);
}

/* Random takes, retains and releases beside a plain array of owner counts. */
static void random_use_agrees_with_a_plain_count_of_owners(void) {
    enum { BLOCKS = 61 };
    cpa_block_pool *pool = new_pool(BLOCKS);
    int32_t owners[BLOCKS] = {0}, blocks[BLOCKS];
    int64_t used = 0, peak = 0;
    srand(7);
    for (int step = 0; step < 200000; step++) {
        int32_t block = rand() % BLOCKS;
        int action = rand() % 4;
        if (action == 0) {
            int64_t n = rand() % 9;
            int took = cpa_block_pool_take(pool, n, blocks);
            CU_ASSERT_EQUAL_FATAL(took, n <= BLOCKS - used);
            for (int64_t i = 0; took && i < n; i++) {
                CU_ASSERT_EQUAL_FATAL(owners[blocks[i]], 0);
                owners[blocks[i]] = 1;
                used++;
            }
        } else if (action == 1) {
            CU_ASSERT_EQUAL(cpa_block_pool_retain(pool, block, NULL) == CPA_OK, owners[block] > 0);
            owners[block] += owners[block] > 0;
        } else {
            CU_ASSERT_EQUAL(cpa_block_pool_release(pool, block, NULL) == CPA_OK, owners[block] > 0);
            used -= owners[block] == 1;
            owners[block] -= owners[block] > 0;
        }
        if (used > peak) peak = used;
        CU_ASSERT_EQUAL_FATAL(cpa_block_pool_owners(pool, block), owners[block]);
        CU_ASSERT_EQUAL_FATAL(cpa_block_pool_free_count(pool), BLOCKS - used);
    }
    CU_ASSERT_EQUAL(cpa_block_pool_peak(pool), peak);
    cpa_block_pool_destroy(pool);
}

static const cpa_test tests[] = {
    {"a pool needs between one and INT32_MAX blocks", a_pool_needs_between_one_and_int32_max_blocks},
    {"take is all or nothing", take_is_all_or_nothing},
    {"the longest free block is taken first", the_longest_free_block_is_taken_first},
    {"a block is free when its last owner lets go", a_block_is_free_when_its_last_owner_lets_go},
    {"a double free is an error that names the block", a_double_free_is_an_error_that_names_the_block},
    {"an id out of range is an error", an_id_out_of_range_is_an_error},
    {"the peak outlives the blocks", the_peak_outlives_the_blocks},
    {"kept blocks are taken last, and the least recently used first",
     kept_blocks_are_taken_last_and_the_least_recently_used_first},
    {"a block that is forgotten is kept no more", a_block_that_is_forgotten_is_kept_no_more},
    {"a kept block with an owner is not taken", a_kept_block_with_an_owner_is_not_taken},
    {"the party that keeps the most gives first", the_party_that_keeps_the_most_gives_first},
    {"random use agrees with a plain count of owners", random_use_agrees_with_a_plain_count_of_owners},
};

CPA_TEST_MAIN("block pool", tests)
