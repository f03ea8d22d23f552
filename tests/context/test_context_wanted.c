/* pass-KV under a selection of blocks sends those alone that a row of another rank attends: counted in bytes, with what
 * is not sent poisoned; peer by peer and all peers at once. */
#include <stdlib.h>

#include "kernels/device.h"
#include "src/check/cases/selection.h"
#include "src/context/context_internal.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { LENGTH = 4000, START = 2000, STEP = 5 };

static cpa_device *device;
static cpa_stream *stream;

/* Nothing that does not come may be read. */
static void poison_staging(cpa_context *c) {
    const cpa_kv_transfers *t = &c->kv.transfers;
    const int64_t bytes = t->memory ? t->staging.segments * t->staging.capacity * t->staging.block_bytes : 0;
    char *poison = cpa_test_poisoned(bytes, 1);
    CU_ASSERT_EQUAL(device->table->copy(t->memory, poison, bytes, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    free(poison);
}

/* Rows attend some of every `step`-th block of the prefix; no row attends all. */
static cpa_case_score some_blocks(int32_t q_heads, int32_t block, int64_t step) {
    cpa_case_score score = {.q_heads = q_heads, .rows = LENGTH - START};
    CU_ASSERT_EQUAL_FATAL(cpa_case_score_add_blocks(&score, block, LENGTH + block, NULL), CPA_OK);
    const int64_t words = cpa_mask_words(score.n_blocks);
    for (int64_t i = 0; i < score.n_block_words; i++)
        for (int64_t bit = 0; bit < 32; bit++) {
            const int64_t of = i % words * 32 + bit;
            if (of % step != 0 || (of + 1) * block > START) score.blocks[i] &= ~(1u << bit);
        }
    for (int64_t row = 1; row < score.rows; row++)
        if (score.block_word[row] < 0) score.block_word[row] = score.block_word[row - 1];
    cpa_test_score_unmap(&score);
    return score;
}

static int is_own(const cpa_test_cache *cache, int64_t position) {
    return cpa_owner_rank(cache->map, cache->placements[0], position) == cache->rank;
}

/* Blocks of the cache of the own shard that rows of other ranks attend. */
static int64_t wanted_blocks(const cpa_test_cache *cache) {
    int64_t n = 0;
    for (int64_t key = 0; key < START; key += cache->shape.block_size) {
        int wanted = 0;
        for (int64_t row = 0; row < LENGTH - START && !wanted && is_own(cache, key); row++)
            for (int32_t head = 0; head < cache->shape.q_heads && !is_own(cache, START + row); head++)
                wanted |= cpa_case_score_selects(cache->score, row, head, key);
        n += wanted;
    }
    return n;
}

/* Attends the chunk over poisoned staging; returns the bytes that were sent. */
static int64_t attend(cpa_test_cache *cache, cpa_algorithm algorithm, int64_t *block_bytes, cpa_test_result *result) {
    const cpa_test_chunk chunk = {0, START, LENGTH - START, algorithm};
    cpa_context *context = cpa_test_context(device, &cache->shape, 0);
    cpa_context_stats stats;
    poison_staging(context);
    CU_ASSERT_EQUAL(cpa_test_plan(context, cache, &chunk, 1), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_test_attend(context, cache, cache->shape.mask, &chunk, 1, stream, result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(cache, cache->shape.mask, &chunk, 1, result), 0);
    cpa_context_get_stats(context, &stats, sizeof stats);
    *block_bytes = context->kv.transfers.layout ? context->kv.transfers.layout->bytes : 0;
    cpa_context_destroy(context);
    return stats.bytes_sent;
}

static void check(int gathers, int64_t step, int head_major) {
    const int32_t block = gathers ? 128 : 32;
    const cpa_placement placement = {CPA_SHARDED, 1};
    const int64_t length = LENGTH;
    const cpa_test_shape shape = {.q_heads = 4,
                                  .kv_heads = 2,
                                  .k_dim = 32,
                                  .v_dim = 32,
                                  .block_size = 16,
                                  .interleave = block,
                                  .head_major = head_major,
                                  .mask = {.causal = 1}};
    cpa_test_cache cache;
    cpa_test_result by_kv, by_q;
    int64_t block_bytes, none;
    cpa_test_device_open(1, &device, &stream);
    if (gathers) device->caps.bit_exact = 0, device->caps.split_tokens = 1;
    cpa_test_cache_init(&cache, shape, 5, &length, &placement, 1);
    cache.check_every = 2;
    cpa_case_score score = some_blocks(shape.q_heads, block, step);
    cache.score = &score;
    const int64_t sent = attend(&cache, CPA_PASS_KV, &block_bytes, &by_kv);
    const int64_t wanted = wanted_blocks(&cache) * (cpa_test_ranks() - 1) * block_bytes;
    CU_ASSERT_EQUAL(sent, wanted);
    if (cpa_test_ranks() > 1 && !gathers) CPA_ASSERT_ORDER(wanted, >, 0); /* large blocks: some rank has none */
    if (!gathers) {
        const cpa_test_chunk chunk = {0, START, LENGTH - START, CPA_PASS_KV};
        attend(&cache, CPA_PASS_Q, &none, &by_q);
        CU_ASSERT(cpa_test_same_bits_or_right(&cache, shape.mask, &chunk, 1, &by_kv, &by_q));
        cpa_test_result_destroy(&by_q);
    }
    cpa_test_result_destroy(&by_kv);
    cache.score = NULL;
    cpa_case_score_release(&score);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

static void peer_by_peer(void) {
    check(0, STEP, 0);
    check(0, STEP, 1);
}

static void all_peers_at_once(void) {
    check(1, STEP, 0);
    check(1, STEP, 1);
}

static const cpa_test tests[] = {
    {"peer by peer, what another rank attends is sent", peer_by_peer},
    {"all peers at once, what another rank attends is sent", all_peers_at_once},
};
CPA_MPI_DEVICE_TEST_MAIN("context_wanted", tests)
