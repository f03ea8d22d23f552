/* The memory of a cache: its views, the null block, copies, and blocks in host memory, which come back as they left or
 * not at all. */
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "kernels/kv_view.h"
#include "src/cache/kv_cache.h"
#include "tests/fixtures/unit.h"

enum { LAYERS = 3, BLOCKS = 6, HOST_BLOCKS = 4, BLOCK_SIZE = 16, KV_HEADS = 2, K_DIM = 8, V_DIM = 4 };
enum { K_BYTES = BLOCK_SIZE * KV_HEADS * (K_DIM + 4), V_BYTES = BLOCK_SIZE * KV_HEADS * (V_DIM + 4) };

static const cpa_kv_cache_options OPTIONS = {
    .shape = {.q_heads = 4, .kv_heads = KV_HEADS, .k_dim = K_DIM, .v_dim = V_DIM, .kv_dtype = CPA_INT8},
    .layers = LAYERS,
    .block_size = BLOCK_SIZE,
    .num_blocks = BLOCKS,
    .host_blocks = HOST_BLOCKS};

typedef struct fixture {
    cpa_device *device;
    cpa_stream *stream;
    cpa_kv_cache *cache;
} fixture;

static void setup(fixture *f) {
    cpa_device_options device = {.size = sizeof device, .threads = 1};
    CU_ASSERT_EQUAL_FATAL(cpa_backend_host.open(&device, &f->device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(f->device->table->stream_create(f->device, &f->stream, NULL), CPA_OK);
    /* What was in use before is not zero. */
    CU_ASSERT_EQUAL_FATAL(cpa_kv_cache_create(&OPTIONS, f->stream, &f->cache, NULL), CPA_OK);
    memset(cpa_kv_cache_view(f->cache, 0).k, 0xff, LAYERS * (BLOCKS + 1) * K_BYTES);
    memset(cpa_kv_cache_view(f->cache, 0).v, 0xff, LAYERS * (BLOCKS + 1) * V_BYTES);
    cpa_kv_cache_destroy(f->cache);
    CU_ASSERT_EQUAL_FATAL(cpa_kv_cache_create(&OPTIONS, f->stream, &f->cache, NULL), CPA_OK);
    srand(3);
    for (int layer = 0; layer < LAYERS; layer++) {
        const cpa_kv_view kv = cpa_kv_cache_view(f->cache, layer);
        for (int i = 0; i < BLOCKS * K_BYTES; i++) ((uint8_t *)kv.k)[i] = (uint8_t)rand();
        for (int i = 0; i < BLOCKS * V_BYTES; i++) ((uint8_t *)kv.v)[i] = (uint8_t)rand();
    }
}

static void teardown(fixture *f) {
    cpa_kv_cache_destroy(f->cache);
    f->device->table->stream_destroy(f->stream);
    f->device->table->close(f->device);
}

static int blocks_equal(const fixture *f, int a, int b) {
    int equal = 1;
    for (int layer = 0; layer < LAYERS; layer++) {
        const cpa_kv_view kv = cpa_kv_cache_view(f->cache, layer);
        const char *k = kv.k, *v = kv.v;
        equal &=
            !memcmp(k + a * K_BYTES, k + b * K_BYTES, K_BYTES) && !memcmp(v + a * V_BYTES, v + b * V_BYTES, V_BYTES);
    }
    return equal;
}

/* The views of the layers lie apart, and behind the blocks of each is one of zeros, whatever the others hold. */
static void every_layer_has_its_blocks_and_a_null_block(void) {
    fixture f;
    setup(&f);
    const char *k_end = NULL, *v_end = NULL;
    CU_ASSERT_EQUAL(cpa_kv_cache_block_bytes(&OPTIONS.shape, LAYERS, BLOCK_SIZE), LAYERS * (K_BYTES + V_BYTES));
    CU_ASSERT_EQUAL(cpa_kv_cache_null_block(f.cache), BLOCKS);
    for (int layer = 0; layer < LAYERS; layer++) {
        const cpa_kv_view kv = cpa_kv_cache_view(f.cache, layer);
        const char *k = kv.k, *v = kv.v;
        CU_ASSERT_EQUAL(kv.num_blocks, BLOCKS + 1);
        CU_ASSERT(layer == 0 || (k == k_end && v == v_end));
        for (int i = 0; i < K_BYTES; i++) CU_ASSERT_EQUAL_FATAL(k[BLOCKS * K_BYTES + i], 0);
        for (int i = 0; i < V_BYTES; i++) CU_ASSERT_EQUAL_FATAL(v[BLOCKS * V_BYTES + i], 0);
        k_end = k + (BLOCKS + 1) * K_BYTES;
        v_end = v + (BLOCKS + 1) * V_BYTES;
    }
    teardown(&f);
}

static void a_copy_takes_all_layers(void) {
    fixture f;
    setup(&f);
    const cpa_block_move copies[] = {{9, 0, 1, 0, 3}, {9, 0, 0, 1, 4}};
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_DEVICE, CPA_TIER_DEVICE, 1, copies, 2, NULL, f.stream), CPA_OK);
    CU_ASSERT(blocks_equal(&f, 0, 3));
    CU_ASSERT(!blocks_equal(&f, 1, 4)); /* of another rank */
    teardown(&f);
}

static void without_host_memory_nothing_moves_there(void) {
    fixture f;
    setup(&f);
    cpa_kv_cache *cache = NULL;
    cpa_kv_cache_options options = OPTIONS;
    options.host_blocks = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_kv_cache_create(&options, f.stream, &cache, NULL), CPA_OK);
    const cpa_block_move move = {9, 0, 1, 0, 0};
    CU_ASSERT_EQUAL(cpa_kv_cache_move(cache, CPA_TIER_DEVICE, CPA_TIER_HOST, 1, &move, 1, NULL, f.stream),
                    CPA_INTERNAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(f.stream->error.message, "no host memory"));
    CU_ASSERT_EQUAL(cpa_kv_cache_move(cache, CPA_TIER_DEVICE, CPA_TIER_HOST, 1, NULL, 0, NULL, f.stream), CPA_OK);
    cpa_kv_cache_destroy(cache);
    teardown(&f);
}

static void a_block_comes_back_as_it_left_into_any_place(void) {
    fixture f;
    setup(&f);
    cpa_block_move out[] = {{9, 0, 1, 0, 3}, {9, 0, 0, 1, 0}, {9, 0, 1, 2, 1}},
                   in[] = {{9, 0, 1, 3, 4}, {9, 0, 0, 0, 3}, {9, 0, 1, 1, 5}};
    uint64_t damaged[3] = {0};
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_DEVICE, CPA_TIER_HOST, 1, out, 3, NULL, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_HOST, CPA_TIER_DEVICE, 1, in, 3, damaged, f.stream), CPA_OK);
    CU_ASSERT(blocks_equal(&f, 0, 4));
    CU_ASSERT(blocks_equal(&f, 2, 5));
    CU_ASSERT(!blocks_equal(&f, 1, 3)); /* of another rank */
    CU_ASSERT_EQUAL(damaged[0] + damaged[1] + damaged[2], 0);
    teardown(&f);
}

static void ten_thousand_flipped_bits_are_all_noticed(void) {
    enum { BYTES = 24576 + 8 };
    uint8_t *memory = malloc(BYTES);
    srand(5);
    for (int i = 0; i < BYTES; i++) memory[i] = (uint8_t)rand();
    uint64_t left = cpa_kv_checksum(memory, BYTES);
    int missed = 0;
    for (int i = 0; i < 10000; i++) {
        int64_t bit = ((int64_t)rand() << 16 ^ rand()) % (BYTES * 8);
        memory[bit / 8] ^= (uint8_t)(1 << bit % 8);
        missed += cpa_kv_checksum(memory, BYTES) == left;
        memory[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CU_ASSERT_EQUAL(missed, 0);
    CU_ASSERT_EQUAL(cpa_kv_checksum(memory, BYTES), left);
    CU_ASSERT(cpa_kv_checksum(memory, BYTES - 3) != left);
    free(memory);
}

/* A block that was never swapped out has the checksum 0, which nothing else has in practice. */
static void what_never_left_does_not_come_back(void) {
    fixture f;
    setup(&f);
    cpa_block_move in = {9, 0, 1, 2, 4};
    uint64_t damaged = 0;
    const uint8_t *there = (const uint8_t *)cpa_kv_cache_view(f.cache, 0).k + 4 * K_BYTES;
    const uint8_t before = *there;
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_HOST, CPA_TIER_DEVICE, 1, &in, 1, &damaged, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(damaged, 1);
    CU_ASSERT_EQUAL(*there, before);
    teardown(&f);
}

static void the_link_to_the_host_has_a_speed(void) {
    fixture f;
    double bandwidth = 0;
    setup(&f);
    CU_ASSERT_EQUAL(cpa_kv_tier_bandwidth(f.device, &bandwidth, NULL), CPA_OK);
    CU_ASSERT(bandwidth > 1e6);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"every layer has its blocks and a null block", every_layer_has_its_blocks_and_a_null_block},
    {"a copy takes all layers", a_copy_takes_all_layers},
    {"without host memory nothing moves there", without_host_memory_nothing_moves_there},
    {"a block comes back as it left, into any place", a_block_comes_back_as_it_left_into_any_place},
    {"ten thousand flipped bits are all noticed", ten_thousand_flipped_bits_are_all_noticed},
    {"what never left does not come back", what_never_left_does_not_come_back},
    {"the link to the host has a speed", the_link_to_the_host_has_a_speed},
};

CPA_TEST_MAIN("kv_cache", tests)
