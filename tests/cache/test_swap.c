/* Blocks in host memory: they come back as they left, or not at all. */
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "kernels/kv_view.h"
#include "src/cache/swap.h"
#include "tests/fixtures/unit.h"

enum { LAYERS = 3, BLOCKS = 6, HOST_BLOCKS = 4, BLOCK_SIZE = 16, KV_HEADS = 2, K_DIM = 8, V_DIM = 4 };
enum { K_FLOATS = BLOCK_SIZE * KV_HEADS * K_DIM, V_FLOATS = BLOCK_SIZE * KV_HEADS * V_DIM };

static float k_pool[LAYERS][BLOCKS][K_FLOATS], v_pool[LAYERS][BLOCKS][V_FLOATS];

static cpa_kv_view layer_kv(const void *ctx, int32_t layer) {
    (void)ctx;
    return cpa_kv_view_resolve((cpa_kv_view){.k = k_pool[layer],
                                             .v = v_pool[layer],
                                             .dtype = CPA_F32,
                                             .block_size = BLOCK_SIZE,
                                             .num_blocks = BLOCKS,
                                             .kv_heads = KV_HEADS,
                                             .k_dim = K_DIM,
                                             .v_dim = V_DIM});
}

typedef struct fixture {
    cpa_device *device;
    cpa_stream *stream;
    cpa_swap *swap;
} fixture;

static void setup(fixture *f) {
    cpa_device_options device = {.size = sizeof device, .threads = 1};
    CU_ASSERT_EQUAL_FATAL(cpa_backend_host.open(&device, &f->device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(f->device->table->stream_create(f->device, &f->stream, NULL), CPA_OK);
    cpa_swap_options options = {layer_kv, NULL, LAYERS, HOST_BLOCKS};
    CU_ASSERT_EQUAL(cpa_swap_block_bytes(&options), LAYERS * (K_FLOATS + V_FLOATS) * 4);
    CU_ASSERT_EQUAL_FATAL(cpa_swap_create(f->device, &options, &f->swap, NULL), CPA_OK);
    srand(3);
    for (int l = 0; l < LAYERS; l++)
        for (int b = 0; b < BLOCKS; b++) {
            for (int i = 0; i < K_FLOATS; i++) k_pool[l][b][i] = (float)rand();
            for (int i = 0; i < V_FLOATS; i++) v_pool[l][b][i] = (float)rand();
        }
}

static void teardown(fixture *f) {
    cpa_swap_destroy(f->swap);
    f->device->table->stream_destroy(f->stream);
    f->device->table->close(f->device);
}

static int blocks_equal(int a, int b) {
    int equal = 1;
    for (int l = 0; l < LAYERS; l++)
        equal &= !memcmp(k_pool[l][a], k_pool[l][b], sizeof k_pool[l][a]) &&
                 !memcmp(v_pool[l][a], v_pool[l][b], sizeof v_pool[l][a]);
    return equal;
}

static void a_block_comes_back_as_it_left_into_any_place(void) {
    fixture f;
    setup(&f);
    cpa_block_move out[] = {{9, 1, 0, 3}, {9, 0, 1, 0}, {9, 1, 2, 1}},
                   in[] = {{9, 1, 3, 4}, {9, 0, 0, 3}, {9, 1, 1, 5}};
    uint64_t damaged[3] = {0};
    CU_ASSERT_EQUAL(cpa_swap_out(f.swap, 1, out, 3, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_swap_in(f.swap, 1, in, 3, damaged, f.stream), CPA_OK);
    CU_ASSERT(blocks_equal(0, 4));
    CU_ASSERT(blocks_equal(2, 5));
    CU_ASSERT(!blocks_equal(1, 3)); /* of another rank */
    CU_ASSERT_EQUAL(damaged[0] + damaged[1] + damaged[2], 0);
    teardown(&f);
}

static void ten_thousand_flipped_bits_are_all_noticed(void) {
    enum { BYTES = 24576 + 8 };
    uint8_t *memory = malloc(BYTES);
    srand(5);
    for (int i = 0; i < BYTES; i++) memory[i] = (uint8_t)rand();
    uint64_t left = cpa_swap_checksum(memory, BYTES);
    int missed = 0;
    for (int i = 0; i < 10000; i++) {
        int64_t bit = ((int64_t)rand() << 16 ^ rand()) % (BYTES * 8);
        memory[bit / 8] ^= (uint8_t)(1 << bit % 8);
        missed += cpa_swap_checksum(memory, BYTES) == left;
        memory[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CU_ASSERT_EQUAL(missed, 0);
    CU_ASSERT_EQUAL(cpa_swap_checksum(memory, BYTES), left);
    CU_ASSERT(cpa_swap_checksum(memory, BYTES - 3) != left);
    free(memory);
}

/* A block that was never swapped out has the checksum 0, which nothing else has in practice. */
static void what_never_left_does_not_come_back(void) {
    fixture f;
    setup(&f);
    cpa_block_move in = {9, 1, 2, 4};
    uint64_t damaged = 0;
    float before = k_pool[0][4][0];
    CU_ASSERT_EQUAL(cpa_swap_in(f.swap, 1, &in, 1, &damaged, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(damaged, 1);
    CU_ASSERT(k_pool[0][4][0] == before);
    teardown(&f);
}

static void the_link_to_the_host_has_a_speed(void) {
    fixture f;
    double bandwidth = 0;
    setup(&f);
    CU_ASSERT_EQUAL(cpa_swap_measure(f.device, &bandwidth, NULL), CPA_OK);
    CU_ASSERT(bandwidth > 1e6);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"a block comes back as it left, into any place", a_block_comes_back_as_it_left_into_any_place},
    {"ten thousand flipped bits are all noticed", ten_thousand_flipped_bits_are_all_noticed},
    {"what never left does not come back", what_never_left_does_not_come_back},
    {"the link to the host has a speed", the_link_to_the_host_has_a_speed},
};

CPA_TEST_MAIN("swap", tests)
