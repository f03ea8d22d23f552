/* The memory of a cache: its views, the null block, copies, and blocks in host memory, which come back as they left or
 * not at all. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/indexer.h>

#include "kernels/block_layout.h"
#include "kernels/operators.h"
#include "src/cache/kv_cache.h"
#include "tests/fixtures/unit.h"

enum { LAYERS = 4, BLOCKS = 6, HOST_BLOCKS = 4, BLOCK_SIZE = 16 };

/* Blocks of three lengths, the first of which is that of two layers side by side. */
static const cpa_attention_shape SHAPES[LAYERS] = {
    {.q_heads = 4, .kv_heads = 2, .k_dim = 8, .v_dim = 4, .kv_dtype = CPA_INT8},
    {.q_heads = 2, .kv_heads = 2, .k_dim = 4, .v_dim = 8, .kv_dtype = CPA_INT8, .layout = CPA_HEAD_MAJOR},
    {.q_heads = 1, .kv_heads = 1, .k_dim = 24, .v_dim = 8, .v_in_k = 1, .kv_dtype = CPA_BF16},
    {.q_heads = 6, .kv_heads = 3, .k_dim = 5, .v_dim = 4, .dtype = CPA_BF16, .kv_dtype = CPA_BF16},
};

static const cpa_kv_cache_options OPTIONS = {.shapes = SHAPES,
                                             .n_shapes = LAYERS,
                                             .layers = LAYERS,
                                             .block_size = BLOCK_SIZE,
                                             .num_blocks = BLOCKS,
                                             .host_blocks = HOST_BLOCKS};

typedef struct fixture {
    cpa_device *device;
    cpa_stream *stream;
    cpa_kv_cache *cache;
} fixture;

static int64_t bytes_of(int layer) {
    return cpa_block_layout_of(&SHAPES[layer], BLOCK_SIZE).bytes;
}

static char *block_at(const fixture *f, int layer, int64_t block) {
    return (char *)cpa_kv_cache_view(f->cache, layer).k + block * bytes_of(layer);
}

static void setup(fixture *f) {
    cpa_device_options device = {.size = sizeof device, .threads = 1};
    CU_ASSERT_EQUAL_FATAL(cpa_backend_host.open(&device, &f->device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(f->device->table->stream_create(f->device, &f->stream, NULL), CPA_OK);
    /* What was in use before is not zero. */
    CU_ASSERT_EQUAL_FATAL(cpa_kv_cache_create(&OPTIONS, f->stream, &f->cache, NULL), CPA_OK);
    for (int layer = 0; layer < LAYERS; layer++)
        memset(block_at(f, layer, 0), 0xff, (size_t)((BLOCKS + 1) * bytes_of(layer)));
    cpa_kv_cache_destroy(f->cache);
    CU_ASSERT_EQUAL_FATAL(cpa_kv_cache_create(&OPTIONS, f->stream, &f->cache, NULL), CPA_OK);
    srand(3);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int64_t i = 0; i < BLOCKS * bytes_of(layer); i++) block_at(f, layer, 0)[i] = (char)rand();
}

static void teardown(fixture *f) {
    cpa_kv_cache_destroy(f->cache);
    f->device->table->stream_destroy(f->stream);
    f->device->table->close(f->device);
}

static int blocks_equal(const fixture *f, int a, int b) {
    int equal = 1;
    for (int layer = 0; layer < LAYERS; layer++)
        equal &= !memcmp(block_at(f, layer, a), block_at(f, layer, b), (size_t)bytes_of(layer));
    return equal;
}

/* The blocks of the layers lie apart, and behind those of each is one of zeros, whatever the others hold. */
static void every_layer_has_its_blocks_and_a_null_block(void) {
    fixture f;
    setup(&f);
    const char *end = NULL;
    CU_ASSERT_EQUAL(cpa_kv_cache_block_bytes(&SHAPES[0], (cpa_index_rows){.dim = 0}, LAYERS, BLOCK_SIZE),
                    LAYERS * 2 * BLOCK_SIZE * (8 + 4 + 4 + 4));
    CU_ASSERT_EQUAL(cpa_kv_cache_null_block(f.cache), BLOCKS);
    for (int layer = 0; layer < LAYERS; layer++) {
        const cpa_kv_view kv = cpa_kv_cache_view(f.cache, layer);
        CU_ASSERT_EQUAL(kv.num_blocks, BLOCKS + 1);
        CU_ASSERT_EQUAL(kv.k_dim, SHAPES[layer].k_dim);
        CU_ASSERT_EQUAL(kv.k_block_stride * cpa_dtype_bytes(kv.dtype), bytes_of(layer));
        CU_ASSERT(layer == 0 || block_at(&f, layer, 0) == end);
        for (int64_t i = 0; i < bytes_of(layer); i++) CU_ASSERT_EQUAL_FATAL(block_at(&f, layer, BLOCKS)[i], 0);
        end = block_at(&f, layer, BLOCKS + 1);
    }
    teardown(&f);
}

/* What kv_write brings into each layer is read back from a copy, and from what came back from the host. */
static void rows_of_layers_of_several_shapes_survive_copies_and_swaps(void) {
    enum { LATENT = 2, TOKEN = BLOCK_SIZE - 1 };
    fixture f;
    setup(&f);
    cpa_block_move copy = {9, 0, 1, 1, 2}, out = {9, 0, 1, 2, 3}, in = {9, 0, 1, 3, 5};
    uint64_t damaged = 0;
    float k[3 * 24] = {0}, v[3 * 24] = {0};
    for (int i = 0; i < 3 * 24; i++) k[i] = (float)(i % 7 + 1), v[i] = (float)(i % 5 + 2);
    for (int layer = 0; layer < LAYERS; layer++) {
        const int64_t slot = 1 * BLOCK_SIZE + TOKEN;
        cpa_kv_write_args write = {.size = sizeof write,
                                   .tokens = 1,
                                   .k = k,
                                   .v = v,
                                   .slot_mapping = &slot,
                                   .kv = cpa_kv_cache_view(f.cache, layer)};
        if (layer != LATENT) CU_ASSERT_EQUAL(f.device->operators->kv_write(&write, f.stream), CPA_OK);
    }
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_DEVICE, CPA_TIER_DEVICE, 1, &copy, 1, NULL, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_DEVICE, CPA_TIER_HOST, 1, &out, 1, NULL, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_HOST, CPA_TIER_DEVICE, 1, &in, 1, &damaged, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(damaged, 0);
    CU_ASSERT(blocks_equal(&f, 1, 2));
    CU_ASSERT(blocks_equal(&f, 1, 5));
    /* The last layer's, which are exact in bf16: key 14 of head 2, value 10 of head 2. */
    const cpa_block_layout last = cpa_block_layout_of(&SHAPES[LAYERS - 1], BLOCK_SIZE);
    const int64_t at[] = {(TOKEN * 3 + 2) * 5 + 4, last.sections[CPA_VALUES].at / 2 + (TOKEN * 3 + 2) * 4 + 2};
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const uint16_t *elements = (const uint16_t *)(const void *)block_at(&f, LAYERS - 1, 5);
        const uint32_t bits = (uint32_t)elements[at[part]] << 16;
        float found;
        memcpy(&found, &bits, sizeof found);
        CU_ASSERT_EQUAL(found, part == CPA_KEYS ? k[14] : v[10]);
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

/* Keys of an indexer lie behind the keys and values of their layer, and come along wherever these go. */
static void keys_of_an_indexer_lie_in_the_blocks(void) {
    enum { DIM = 128, SLOT = 1 * BLOCK_SIZE + 3 };
    const cpa_index_rows kinds[] = {{DIM, CPA_FP8_E4M3}, {DIM, CPA_BF16}};
    for (int kind = 0; kind < 2; kind++) {
        fixture f;
        setup(&f);
        cpa_kv_cache_options options = OPTIONS;
        const int64_t row = kind == 0 ? DIM + 4 : 2 * DIM, slot = SLOT;
        const cpa_block_move out = {9, 0, 1, 1, 3}, in = {9, 0, 1, 3, 5};
        uint64_t damaged = 0;
        float k[DIM];
        options.index = kinds[kind];
        cpa_kv_cache_destroy(f.cache);
        CU_ASSERT_EQUAL_FATAL(cpa_kv_cache_create(&options, f.stream, &f.cache, NULL), CPA_OK);
        for (int layer = 0; layer < LAYERS; layer++) {
            const cpa_kv_view kv = cpa_kv_cache_view(f.cache, layer), index = cpa_kv_cache_index_view(f.cache, layer);
            const int64_t stride = kv.k_block_stride * cpa_dtype_bytes(kv.dtype);
            CU_ASSERT_EQUAL(stride, bytes_of(layer) + BLOCK_SIZE * row);
            CU_ASSERT_EQUAL(index.k_block_stride * cpa_dtype_bytes(index.dtype), stride);
            CU_ASSERT_PTR_EQUAL(index.k, (char *)kv.k + bytes_of(layer));
            memset(kv.k, 0x3c, (size_t)(BLOCKS * stride));
            for (int i = 0; i < DIM; i++) k[i] = (float)(i % 9 + layer + 1);
            const cpa_index_write_args write = {.size = sizeof write,
                                                .tokens = 1,
                                                .k = k,
                                                .k_row_stride = DIM,
                                                .slot_mapping = &slot,
                                                .cache = {.kv = index},
                                                .scales_pow2 = 1};
            CU_ASSERT_EQUAL(cpa_index_write(&write, f.stream), CPA_OK);
            for (int64_t i = 0; i < bytes_of(layer); i++) CU_ASSERT_EQUAL_FATAL(((char *)kv.k)[stride + i], 0x3c);
        }
        CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_DEVICE, CPA_TIER_HOST, 1, &out, 1, NULL, f.stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_kv_cache_move(f.cache, CPA_TIER_HOST, CPA_TIER_DEVICE, 1, &in, 1, &damaged, f.stream),
                        CPA_OK);
        CU_ASSERT_EQUAL(damaged, 0);
        for (int layer = 0; layer < LAYERS; layer++) {
            const cpa_kv_view index = cpa_kv_cache_index_view(f.cache, layer);
            const int64_t stride = index.k_block_stride * cpa_dtype_bytes(index.dtype);
            const char *there = index.k, *left = there + stride, *back = there + 5 * stride;
            char poison[2 * DIM];
            memset(poison, 0x3c, sizeof poison);
            CU_ASSERT_EQUAL(memcmp(left, back, (size_t)(BLOCK_SIZE * row)), 0);
            CU_ASSERT_NOT_EQUAL(memcmp(left + 3 * index.k_dim * cpa_dtype_bytes(index.dtype), poison, 16), 0);
        }
        teardown(&f);
    }
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
    const char *there = block_at(&f, 0, 4);
    const char before = *there;
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
    CPA_ASSERT_ORDER(bandwidth, >, 1e6);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"every layer has its blocks and a null block", every_layer_has_its_blocks_and_a_null_block},
    {"a copy takes all layers", a_copy_takes_all_layers},
    {"rows of layers of several shapes survive copies and swaps",
     rows_of_layers_of_several_shapes_survive_copies_and_swaps},
    {"keys of an indexer lie in the blocks", keys_of_an_indexer_lie_in_the_blocks},
    {"without host memory nothing moves there", without_host_memory_nothing_moves_there},
    {"a block comes back as it left, into any place", a_block_comes_back_as_it_left_into_any_place},
    {"ten thousand flipped bits are all noticed", ten_thousand_flipped_bits_are_all_noticed},
    {"what never left does not come back", what_never_left_does_not_come_back},
    {"the link to the host has a speed", the_link_to_the_host_has_a_speed},
};

CPA_TEST_MAIN("kv_cache", tests)
