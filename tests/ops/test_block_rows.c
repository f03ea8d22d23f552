/* Blocks of a cache as rows: the same bytes from every layout and block size, and back; what is not asked for stays as
 * it was. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/blocks.h>

#include "kernels/block_layout.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { LAYERS = 3, TOKENS = 64, MOST_BLOCKS = TOKENS / 8 + 2 };

static const cpa_attention_shape SHAPES[] = {
    {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 16, .kv_dtype = CPA_F32},
    {.q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 32, .kv_dtype = CPA_BF16},
    {.q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .kv_dtype = CPA_INT8},
    {.q_heads = 4, .kv_heads = 4, .k_dim = 32, .v_dim = 32, .kv_dtype = CPA_FP8_E4M3},
    {.q_heads = 4, .kv_heads = 4, .k_dim = 32, .v_dim = 32, .kv_dtype = CPA_FP8_E4M3, .k_scale = .5f, .v_scale = 2},
    {.q_heads = 4, .kv_heads = 1, .k_dim = 96, .v_dim = 64, .v_in_k = 1, .kv_dtype = CPA_BF16},
    {.q_heads = 4, .kv_heads = 1, .k_dim = 576, .v_dim = 512, .v_in_k = 1, .kv_dtype = CPA_FP8_T128},
    {.q_heads = 4, .kv_heads = 1, .k_dim = 512, .v_dim = 512, .v_in_k = 1, .kv_dtype = CPA_FP8_T64},
};

typedef struct cache {
    cpa_kv_view views[LAYERS];
    void *memory[LAYERS];
    int64_t bytes; /* of a layer */
} cache;

/* All bytes of it are `value`. */
static cache make(const cpa_attention_shape *of, cpa_kv_layout layout, int32_t block_size, int64_t blocks, int value,
                  cpa_stream *stream) {
    cache c;
    cpa_attention_shape shape = *of;
    shape.layout = layout;
    const cpa_block_layout l = cpa_block_layout_of(&shape, block_size);
    c.bytes = l.bytes * blocks;
    char *bytes = malloc((size_t)c.bytes);
    memset(bytes, value, (size_t)c.bytes);
    for (int i = 0; i < LAYERS; i++) {
        c.memory[i] = cpa_test_upload(stream, bytes, c.bytes);
        c.views[i] = cpa_block_layout_view(&l, c.memory[i], blocks, 0);
    }
    free(bytes);
    return c;
}

static void discard(cache *c, cpa_stream *stream) {
    for (int i = 0; i < LAYERS; i++) cpa_test_free(stream, c->memory[i]);
}

/* Whether a block of a layer is of that byte alone. */
static int is_filled(const cache *c, int layer, int64_t block, int value, cpa_stream *stream) {
    const int64_t stride = c->bytes / c->views[0].num_blocks;
    char *bytes = malloc((size_t)c->bytes);
    cpa_test_download(stream, bytes, c->memory[layer], c->bytes);
    int same = 1;
    for (int64_t i = 0; i < stride; i++) same &= bytes[block * stride + i] == (char)value;
    free(bytes);
    return same;
}

/* The rows of a cache by memory of the device, out and in again: then they are there as before. */
static void go_through_device(cpa_blocks_args *args, const char *rows, int64_t row_bytes, cpa_stream *stream) {
    const int64_t bytes = TOKENS * row_bytes;
    char *back = calloc(1, (size_t)bytes);
    void *on_device = cpa_test_upload(stream, back, bytes);
    args->rows = on_device;
    args->rows_on_device = 1;
    CU_ASSERT_EQUAL(cpa_blocks_export(args, stream), CPA_OK);
    cpa_test_download(stream, back, on_device, bytes);
    CU_ASSERT_EQUAL(memcmp(rows, back, (size_t)bytes), 0);
    for (int64_t i = 0; i < bytes; i++) back[i] = (char)~rows[i];
    void *others = cpa_test_upload(stream, back, bytes);
    args->rows = others;
    CU_ASSERT_EQUAL(cpa_blocks_import(args, stream), CPA_OK);
    args->rows = on_device;
    CU_ASSERT_EQUAL(cpa_blocks_import(args, stream), CPA_OK);
    args->rows = back;
    args->rows_on_device = 0;
    CU_ASSERT_EQUAL(cpa_blocks_export(args, stream), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(rows, back, (size_t)bytes), 0);
    cpa_test_free(stream, on_device);
    cpa_test_free(stream, others);
    free(back);
}

/* Rows into a cache, which reads them back as they were, and leaves the other blocks alone. */
static void go_through(const cpa_attention_shape *shape, cpa_kv_layout layout, int32_t block_size, const char *rows,
                       int64_t row_bytes, cpa_stream *stream) {
    const int64_t n = TOKENS / block_size, blocks = n + 2;
    int32_t ids[MOST_BLOCKS];
    char *back = malloc((size_t)(TOKENS * row_bytes));
    cache c = make(shape, layout, block_size, blocks, 0x5a, stream);
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(n - i); /* neither the first nor the last */
    CU_ASSERT_EQUAL(cpa_blocks_row_bytes(c.views, LAYERS), row_bytes);
    cpa_blocks_args args = {.size = sizeof args,
                            .layers = c.views,
                            .n_layers = LAYERS,
                            .ids = ids,
                            .n = n,
                            .rows = (void *)(uintptr_t)rows};
    CU_ASSERT_EQUAL(cpa_blocks_import(&args, stream), CPA_OK);
    args.rows = back;
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, stream), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(rows, back, (size_t)(TOKENS * row_bytes)), 0);
    go_through_device(&args, rows, row_bytes, stream);
    for (int layer = 0; layer < LAYERS; layer++) {
        CU_ASSERT(is_filled(&c, layer, 0, 0x5a, stream));
        CU_ASSERT(is_filled(&c, layer, blocks - 1, 0x5a, stream));
        CU_ASSERT(!is_filled(&c, layer, 1, 0x5a, stream));
    }
    discard(&c, stream);
    free(back);
}

static void rows_are_the_same_from_any_layout_and_block_size(void) {
    static const int32_t sizes[] = {8, 32};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(2, &device, &stream);
    for (size_t s = 0; s < sizeof SHAPES / sizeof SHAPES[0]; s++) {
        const cpa_attention_shape *shape = &SHAPES[s];
        cache one = make(shape, CPA_TOKEN_MAJOR, 8, 1, 0, stream);
        const int64_t row_bytes = cpa_blocks_row_bytes(one.views, LAYERS);
        discard(&one, stream);
        char *rows = malloc((size_t)(TOKENS * row_bytes));
        for (int64_t i = 0; i < TOKENS * row_bytes; i++) rows[i] = (char)(i * 31 + i / 255);
        for (int layout = CPA_TOKEN_MAJOR; layout <= CPA_VLLM_X; layout++)
            for (int b = 0; b < 2; b++)
                if (layout != CPA_VLLM_X || !shape->v_in_k)
                    go_through(shape, (cpa_kv_layout)layout, sizes[b], rows, row_bytes, stream);
        free(rows);
    }
    cpa_test_device_close(device, stream);
}

/* A row of a layer is its keys, then their scales, then the values likewise. */
static void a_row_is_keys_scales_values_and_scales(void) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(2, &device, &stream);
    const cpa_attention_shape shape = {.q_heads = 2, .kv_heads = 2, .k_dim = 16, .v_dim = 32, .kv_dtype = CPA_INT8};
    cache c = make(&shape, CPA_HEAD_MAJOR, 8, 1, 0, stream);
    CU_ASSERT_EQUAL(cpa_blocks_row_bytes(c.views, LAYERS), LAYERS * 2 * (16 + 4 + 32 + 4));
    /* Token 5, head 1: of a block in the order of heads. */
    char block[8 * 2 * (16 + 4 + 32 + 4)], rows[8 * LAYERS * 2 * (16 + 4 + 32 + 4)];
    memset(block, 0, sizeof block);
    block[(1 * 8 + 5) * 16 + 3] = 11;                        /* element 3 of the key */
    block[8 * 2 * 16 + (1 * 8 + 5) * 4] = 12;                /* its scale */
    block[8 * 2 * (16 + 4) + (1 * 8 + 5) * 32 + 31] = 13;    /* the last of the value */
    block[8 * 2 * (16 + 4 + 32) + (1 * 8 + 5) * 4 + 3] = 14; /* its scale */
    for (int i = 0; i < LAYERS; i++) {
        cpa_test_free(stream, c.memory[i]);
        c.memory[i] = c.views[i].k = cpa_test_upload(stream, block, c.bytes);
        c.views[i].v = (char *)c.memory[i] + 8 * 2 * (16 + 4);
    }
    const int32_t id = 0;
    const cpa_blocks_args args = {
        .size = sizeof args, .layers = c.views, .n_layers = LAYERS, .ids = &id, .n = 1, .rows = rows};
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, stream), CPA_OK);
    for (int layer = 0; layer < LAYERS; layer++) {
        const char *row = rows + (5 * LAYERS + layer) * 2 * (16 + 4 + 32 + 4);
        CU_ASSERT_EQUAL(row[16 + 3], 11);
        CU_ASSERT_EQUAL(row[2 * 16 + 4], 12);
        CU_ASSERT_EQUAL(row[2 * (16 + 4) + 32 + 31], 13);
        CU_ASSERT_EQUAL(row[2 * (16 + 4 + 32) + 4 + 3], 14);
    }
    discard(&c, stream);
    cpa_test_device_close(device, stream);
}

static void wrong_blocks_are_refused(void) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(2, &device, &stream);
    cache c = make(&SHAPES[0], CPA_TOKEN_MAJOR, 8, 3, 0, stream);
    char *rows = malloc((size_t)(2 * 8 * cpa_blocks_row_bytes(c.views, LAYERS)));
    const int32_t twice[] = {1, 1}, beyond[] = {0, 3}, negative[] = {-1, 0};
    cpa_blocks_args args = {
        .size = sizeof args, .layers = c.views, .n_layers = LAYERS, .ids = twice, .n = 2, .rows = rows};
    CU_ASSERT_EQUAL(cpa_blocks_import(&args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, stream), CPA_OK); /* may be read twice */
    args.ids = beyond;
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, stream), CPA_INVALID);
    args.ids = negative;
    CU_ASSERT_EQUAL(cpa_blocks_import(&args, stream), CPA_INVALID);
    args.ids = NULL;
    CU_ASSERT_EQUAL(cpa_blocks_import(&args, stream), CPA_INVALID);
    c.views[1].num_blocks = 2;
    args.ids = twice;
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_blocks_export(NULL, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_blocks_row_bytes(NULL, 1), 0);
    free(rows);
    discard(&c, stream);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"rows are the same from any layout and block size", rows_are_the_same_from_any_layout_and_block_size},
    {"a row is keys, scales, values and scales", a_row_is_keys_scales_values_and_scales},
    {"wrong blocks are refused", wrong_blocks_are_refused},
};

CPA_DEVICE_TEST_MAIN("block rows", tests)
