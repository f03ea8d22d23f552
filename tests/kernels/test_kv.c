/* kv_write, kv_copy, kv_move and kv_pack: what lands where, what is left alone, in every dtype, layout and block
 * size. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/convert.h"
#include "kernels/kv_view.h"
#include "src/check/reference.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

enum { HEADS = 3, K_DIM = 24, V_DIM = 10, BLOCKS = 12 };

static cpa_device *device;
static cpa_stream *stream;

/* A number for an element of a token, not exact in 16 bits. */
static float element(int64_t token, int head, int d, int side) {
    return sinf((float)(token * 131 + head * 17 + d * 3 + side) * 0.37f) * (d == 1 ? 300.0f : 1.0f);
}

static int is_poison(const cpa_kv_fixture *f, int64_t block, int64_t offset) {
    float k[K_DIM], v[V_DIM];
    for (int h = 0; h < HEADS; h++) {
        cpa_kv_fixture_load(f, block, offset, h, k, v);
        for (int d = 0; d < K_DIM; d++) {
            if (!isnan(k[d])) return 0;
        }
        for (int d = 0; d < V_DIM; d++) {
            if (!isnan(v[d])) return 0;
        }
    }
    return 1;
}

/* Whether a slot holds the key and value of a token, rounded to the dtype of the cache. */
static int holds(const cpa_kv_fixture *f, int64_t block, int64_t offset, int64_t token) {
    float k[K_DIM], v[V_DIM];
    for (int h = 0; h < HEADS; h++) {
        cpa_kv_fixture_load(f, block, offset, h, k, v);
        for (int d = 0; d < K_DIM; d++) {
            if (k[d] != cpa_reference_round(element(token, h, d, 0), f->view.dtype)) return 0;
        }
        for (int d = 0; d < V_DIM; d++) {
            if (v[d] != cpa_reference_round(element(token, h, d, 1), f->view.dtype)) return 0;
        }
    }
    return 1;
}

/* Fills slot s of the device's view with token s, every third slot left out, through kv_write with fp32 input. */
static void write_slots(const cpa_kv_view *view, int64_t slots) {
    float *k = malloc((size_t)(slots * HEADS * K_DIM) * sizeof *k),
          *v = malloc((size_t)(slots * HEADS * V_DIM) * sizeof *v);
    int64_t *mapping = malloc((size_t)slots * sizeof *mapping);
    for (int64_t i = 0; i < slots; i++) {
        int64_t token = slots - 1 - i; /* not in the order of the slots */
        mapping[i] = token % 3 == 2 ? -1 : token;
        for (int h = 0; h < HEADS; h++) {
            for (int d = 0; d < K_DIM; d++) k[(i * HEADS + h) * K_DIM + d] = element(token, h, d, 0);
            for (int d = 0; d < V_DIM; d++) v[(i * HEADS + h) * V_DIM + d] = element(token, h, d, 1);
        }
    }
    void *device_k = cpa_test_upload(stream, k, slots * HEADS * K_DIM * (int64_t)sizeof *k);
    void *device_v = cpa_test_upload(stream, v, slots * HEADS * V_DIM * (int64_t)sizeof *v);
    int64_t *device_mapping = cpa_test_upload(stream, mapping, slots * (int64_t)sizeof *mapping);
    cpa_kv_write_args args = {sizeof args, slots, CPA_F32, device_k, device_v, device_mapping, *view, NULL, 0, 0, 0, 0};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_free(stream, device_mapping);
    cpa_test_free(stream, device_v);
    cpa_test_free(stream, device_k);
    free(mapping);
    free(v);
    free(k);
}

static void tokens_land_in_their_slots_and_nowhere_else(void) {
    for (int dtype = CPA_F32; dtype < CPA_DTYPE_COUNT; dtype++) {
        for (int32_t block_size = 1; block_size <= 256; block_size *= 4) {
            cpa_kv_fixture f;
            cpa_test_device_open(dtype + 1, &device, &stream);
            cpa_kv_fixture_init(&f, (cpa_dtype)dtype, BLOCKS, block_size, HEADS, K_DIM, V_DIM, dtype == CPA_BF16);
            int64_t slots = (BLOCKS - 1) * block_size;
            cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
            write_slots(&view, slots);
            cpa_kv_fixture_download(&f, &view, stream);
            cpa_kv_view_free(&view, stream);
            for (int64_t s = 0; s < BLOCKS * block_size; s++) {
                int written = s < slots && s % 3 != 2;
                CU_ASSERT(written ? holds(&f, s / block_size, s % block_size, s)
                                  : is_poison(&f, s / block_size, s % block_size));
            }
            cpa_kv_fixture_destroy(&f);
            cpa_test_device_close(device, stream);
        }
    }
}

/* Queries, keys and values as one product leaves them: k and v are slices of its rows, whose ends are poison. A row is
 * written with the bits that it has when it is contiguous. */
static void slices_of_wider_rows_are_written_like_contiguous_ones(void) {
    enum { TOKENS = 70, DIM = 32, WIDTH = HEADS * DIM, Q = 5 * DIM };
    for (int pair = 0; pair < CPA_DTYPE_COUNT * CPA_FP8_T128; pair++) {
        const cpa_dtype from = (cpa_dtype)(pair % CPA_DTYPE_COUNT), to = (cpa_dtype)(pair / CPA_DTYPE_COUNT);
        /* A stride that allows vectors, and one that does not. */
        for (int64_t stride = Q + 2 * WIDTH + 8; stride >= Q + 2 * WIDTH + 7; stride--) {
            const int64_t bytes = cpa_dtype_bytes(from), row = WIDTH * bytes;
            cpa_kv_fixture caches[2];
            int64_t mapping[TOKENS];
            char *qkv = cpa_test_poisoned(TOKENS * stride, bytes), *apart[2];
            cpa_test_device_open(1, &device, &stream);
            for (int part = 0; part < 2; part++) apart[part] = malloc((size_t)(TOKENS * row));
            for (int64_t t = 0; t < TOKENS; t++) {
                mapping[t] = t % 9 == 4 ? -1 : (t * 29) % (BLOCKS * 16);
                for (int part = 0; part < 2; part++) {
                    float wide[WIDTH];
                    for (int i = 0; i < WIDTH; i++) wide[i] = element(t, i / DIM, i % DIM, part);
                    cpa_narrow(apart[part] + t * row, wide, from, WIDTH);
                    memcpy(qkv + (t * stride + Q + part * WIDTH) * bytes, apart[part] + t * row, (size_t)row);
                }
            }
            int64_t *slots = cpa_test_upload(stream, mapping, sizeof mapping);
            for (int sliced = 0; sliced < 2; sliced++) {
                cpa_kv_fixture *f = &caches[sliced];
                cpa_kv_fixture_init_view(f,
                                         (cpa_kv_view){.dtype = to,
                                                       .block_size = 16,
                                                       .num_blocks = BLOCKS,
                                                       .kv_heads = HEADS,
                                                       .k_dim = DIM,
                                                       .v_dim = DIM},
                                         0);
                const cpa_kv_view view = cpa_kv_fixture_upload(f, stream);
                cpa_kv_write_args args = {
                    .size = sizeof args, .tokens = TOKENS, .dtype = from, .slot_mapping = slots, .kv = view};
                char *rows = sliced ? cpa_test_upload(stream, qkv, TOKENS * stride * bytes)
                                    : cpa_test_upload(stream, apart[0], TOKENS * row);
                char *values = sliced ? NULL : cpa_test_upload(stream, apart[1], TOKENS * row);
                args.k = sliced ? rows + Q * bytes : rows;
                args.v = sliced ? rows + (Q + WIDTH) * bytes : values;
                if (sliced) args.k_row_stride = args.v_row_stride = stride;
                CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
                cpa_kv_fixture_download(f, &view, stream);
                cpa_test_free(stream, values);
                cpa_test_free(stream, rows);
                cpa_kv_view_free(&view, stream);
            }
            CU_ASSERT_EQUAL(memcmp(caches[0].view.k, caches[1].view.k, (size_t)caches[0].k_bytes), 0);
            CU_ASSERT_EQUAL(memcmp(caches[0].view.v, caches[1].view.v, (size_t)caches[0].v_bytes), 0);
            for (int i = 0; i < 2; i++) cpa_kv_fixture_destroy(&caches[i]), free(apart[i]);
            cpa_test_free(stream, slots);
            free(qkv);
            cpa_test_device_close(device, stream);
        }
    }
}

/* Elements of the first and the last row, of keys or of values, in every dtype of input and cache; a token that is
 * skipped raises nothing, and what was raised before stays. */
static void tokens_that_are_not_finite_are_told(void) {
    enum { TOKENS = 70, NAN_K = 3, INF_V = 40, SKIPPED = 50, LAST_K = 69, RAISED = 5 };
    for (int pair = 0; pair < CPA_DTYPE_COUNT * CPA_FP8_T128; pair++) {
        const cpa_dtype from = (cpa_dtype)(pair % CPA_DTYPE_COUNT), to = (cpa_dtype)(pair / CPA_DTYPE_COUNT);
        const int64_t k_row = HEADS * 32, bytes = TOKENS * k_row * cpa_dtype_bytes(from);
        cpa_kv_fixture f;
        float wide[2][TOKENS * HEADS * 32] = {{0}};
        int64_t mapping[TOKENS];
        uint8_t flags[TOKENS] = {0};
        char *rows = malloc((size_t)bytes);
        cpa_test_device_open(1, &device, &stream);
        cpa_kv_fixture_init_view(
            &f,
            (cpa_kv_view){
                .dtype = to, .block_size = 16, .num_blocks = BLOCKS, .kv_heads = HEADS, .k_dim = 32, .v_dim = 32},
            0);
        for (int i = 0; i < TOKENS; i++) mapping[i] = i == SKIPPED ? -1 : i;
        wide[0][NAN_K * k_row] = NAN;
        wide[1][INF_V * k_row + 35] = -INFINITY;
        wide[0][SKIPPED * k_row] = NAN;
        wide[0][LAST_K * k_row + k_row - 1] = INFINITY;
        flags[RAISED] = 1;
        cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
        cpa_kv_write_args args = {.size = sizeof args, .tokens = TOKENS, .dtype = from, .kv = view};
        cpa_narrow(rows, wide[0], from, TOKENS * k_row);
        void *k = cpa_test_upload(stream, rows, bytes);
        cpa_narrow(rows, wide[1], from, TOKENS * k_row);
        void *v = cpa_test_upload(stream, rows, bytes);
        int64_t *device_mapping = cpa_test_upload(stream, mapping, sizeof mapping);
        args.k = k, args.v = v, args.slot_mapping = device_mapping;
        args.nonfinite = cpa_test_upload(stream, flags, sizeof flags);
        CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
        cpa_test_download(stream, flags, args.nonfinite, sizeof flags);
        for (int i = 0; i < TOKENS; i++)
            CU_ASSERT_EQUAL(flags[i], i == NAN_K || i == INF_V || i == LAST_K || i == RAISED);
        cpa_test_free(stream, args.nonfinite);
        cpa_test_free(stream, device_mapping);
        cpa_test_free(stream, v);
        cpa_test_free(stream, k);
        cpa_kv_view_free(&view, stream);
        cpa_kv_fixture_destroy(&f);
        free(rows);
        cpa_test_device_close(device, stream);
    }
}

static void copied_blocks_equal_their_source_in_either_layout(void) {
    cpa_kv_fixture src, dst;
    cpa_test_device_open(1, &device, &stream);
    cpa_kv_fixture_init(&src, CPA_F16, BLOCKS, 16, HEADS, K_DIM, V_DIM, 0);
    cpa_kv_fixture_init(&dst, CPA_F16, BLOCKS, 16, HEADS, K_DIM, V_DIM, 1);
    cpa_kv_view from = cpa_kv_fixture_upload(&src, stream), to = cpa_kv_fixture_upload(&dst, stream);
    write_slots(&from, BLOCKS * 16);
    const int64_t pairs[2][2] = {{3, 7}, {0, 2}};
    cpa_kv_copy_args args = {sizeof args, from, to, pairs, 2};
    CU_ASSERT_EQUAL(cpa_kv_copy(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&dst, &to, stream);
    for (int64_t block = 0; block < BLOCKS; block++) {
        int64_t source = block == 7 ? 3 : block == 2 ? 0 : -1;
        for (int64_t offset = 0; offset < 16; offset++) {
            int64_t token = source * 16 + offset;
            int written = source >= 0 && token % 3 != 2;
            CU_ASSERT(written ? holds(&dst, block, offset, token) : is_poison(&dst, block, offset));
        }
    }
    cpa_kv_view_free(&to, stream);
    cpa_kv_view_free(&from, stream);
    cpa_kv_fixture_destroy(&dst);
    cpa_kv_fixture_destroy(&src);
    cpa_test_device_close(device, stream);
}

static void packed_ranges_are_consecutive_and_leave_tails_alone(void) {
    cpa_kv_fixture src, staging;
    cpa_test_device_open(2, &device, &stream);
    cpa_kv_fixture_init(&src, CPA_BF16, BLOCKS, 16, HEADS, K_DIM, V_DIM, 0);
    cpa_kv_fixture_init(&staging, CPA_BF16, 8, 16, HEADS, K_DIM, V_DIM, 0);
    cpa_kv_view from = cpa_kv_fixture_upload(&src, stream), to = cpa_kv_fixture_upload(&staging, stream);
    write_slots(&from, BLOCKS * 16);
    const int32_t tables[6] = {9, 4, 11, INT32_MAX, 0, 5};
    /* 20 tokens from local 16 on of the first sequence, 30 of the second. */
    const cpa_kv_range ranges[2] = {{.table = 0, .first = 16, .count = 20, .dst_block = 1},
                                    {.table = 4, .first = 0, .count = 30, .dst_block = 3}};
    cpa_kv_pack_args args = {sizeof args, from, to, tables, sizeof tables / sizeof tables[0], ranges, 2};
    CU_ASSERT_EQUAL(cpa_kv_pack(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&staging, &to, stream);
    for (int64_t at = 0; at < 8 * 16; at++) {
        int64_t block = at / 16, offset = at % 16, token = -1;
        if (block >= 1 && at - 16 < 20) token = (block == 1 ? 4 : 11) * 16 + offset;
        if (block >= 3 && at - 48 < 30) token = (block == 3 ? 0 : 5) * 16 + offset;
        int written = token >= 0 && token % 3 != 2;
        CU_ASSERT(written ? holds(&staging, block, offset, token) : is_poison(&staging, block, offset));
    }
    cpa_kv_view_free(&to, stream);
    cpa_kv_view_free(&from, stream);
    cpa_kv_fixture_destroy(&staging);
    cpa_kv_fixture_destroy(&src);
    cpa_test_device_close(device, stream);
}

/* Whether the key and the value of a head have the same bits in two slots, and the scales of their rows. */
static int same_bits(const cpa_kv_fixture *a, int64_t slot_a, const cpa_kv_fixture *b, int64_t slot_b, int32_t head) {
    const cpa_kv_view views[2] = {cpa_kv_view_resolve(a->view), cpa_kv_view_resolve(b->view)};
    const int64_t slots[2] = {slot_a, slot_b};
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const char *row[2], *scale[2];
        cpa_kv_pool pool;
        for (int i = 0; i < 2; i++) {
            pool = cpa_kv_pool_of(&views[i], (cpa_kv_part)part);
            const int64_t size = views[i].block_size, offset = slots[i] % size;
            const char *block = pool.memory + slots[i] / size * pool.block_stride;
            row[i] = block + offset * pool.token_stride + head * pool.head_stride;
            scale[i] = block + pool.scales_at + (head * size + offset) * pool.scale_bytes;
        }
        if (memcmp(scale[0], scale[1], (size_t)pool.scale_bytes) != 0) return 0;
        for (int32_t run = 0; run < pool.runs; run++) {
            const int64_t at = run * pool.run_stride;
            if (memcmp(row[0] + at, row[1] + at, (size_t)pool.run_bytes) != 0) return 0;
        }
    }
    return 1;
}

/* A cycle of three slots, a chain across blocks, a pair that is none in four ways, and all slots that CPA_KV_MOVE_MOST
 * allows at once, turned around; into the same pool and into another one. The first slots of each are beside. */
static void moved_tokens_keep_their_bits(void) {
    enum { SLOTS = 2600 / 16 * 16, CHOSEN = 11 };
    static const int64_t chosen[CHOSEN][2] = {{3, 20}, {20, 90}, {90, 3},     {40, 41},    {41, 42}, {42, 64},
                                              {64, 9}, {-1, 7},  {10, SLOTS}, {SLOTS, 10}, {7, -1}};
    static const cpa_kv_view shapes[] = {
        {.dtype = CPA_F32, .k_dim = 24, .v_dim = 10},
        {.dtype = CPA_BF16, .k_dim = 64, .v_dim = 32},
        {.dtype = CPA_BF16, .k_dim = 5, .v_dim = 3},
        {.dtype = CPA_INT8, .k_dim = 32, .v_dim = 16},
        {.dtype = CPA_FP8_E4M3, .k_dim = 48, .v_dim = 7},
        {.dtype = CPA_BF16, .k_dim = 40, .v_dim = 24, .layout = CPA_VLLM_X},
        {.dtype = CPA_INT8, .k_dim = 16, .v_dim = 32, .layout = CPA_VLLM_X},
    };
    static int64_t slots[CPA_KV_MOVE_MOST][2];
    for (int run = 0; run < 4 * (int)(sizeof shapes / sizeof shapes[0]); run++) {
        cpa_kv_view shape = shapes[run / 4];
        const int one_pool = run % 2;
        const int64_t n = run / 2 % 2 ? CPA_KV_MOVE_MOST : CHOSEN;
        for (int64_t i = 0; i < n; i++) slots[i][0] = i, slots[i][1] = n - 1 - i;
        if (n == CHOSEN) memcpy(slots, chosen, sizeof chosen);
        shape.block_size = 16, shape.num_blocks = SLOTS / 16, shape.kv_heads = HEADS;
        cpa_kv_fixture src, dst, *after = one_pool ? &src : &dst;
        cpa_test_device_open(2, &device, &stream);
        const cpa_kv_layout layout = shape.layout;
        cpa_kv_fixture_init_layout(&src, shape, layout == CPA_TOKEN_MAJOR && run % 4 == 1 ? CPA_HEAD_MAJOR : layout);
        cpa_kv_fixture_init_layout(&dst, shape, layout);
        for (int64_t b = 0; b < src.k_bytes; b++) ((uint8_t *)src.view.k)[b] = (uint8_t)(b * 7 + b / 251);
        for (int64_t b = 0; b < src.v_bytes; b++) ((uint8_t *)src.view.v)[b] = (uint8_t)(b * 5 + b / 241);
        cpa_kv_fixture before = src;
        void *k = memcpy(malloc((size_t)src.k_bytes), src.view.k, (size_t)src.k_bytes);
        void *v = memcpy(malloc((size_t)src.v_bytes), src.view.v, (size_t)src.v_bytes);
        before.view.k = k, before.view.v = v;
        cpa_kv_view from = cpa_kv_fixture_upload(&src, stream), to = cpa_kv_fixture_upload(&dst, stream);
        void *pairs = cpa_test_upload(stream, slots, n * (int64_t)sizeof slots[0]);
        cpa_kv_move_args args = {sizeof args, from, one_pool ? from : to, (const int64_t(*)[2])pairs, n};
        CU_ASSERT_EQUAL(cpa_kv_move(&args, stream), CPA_OK);
        cpa_kv_fixture_download(after, &args.dst, stream);
        int64_t wrong = 0;
        for (int64_t slot = 0; slot < SLOTS; slot++) {
            int64_t source = -1;
            for (int64_t i = 0; i < n; i++)
                if (slots[i][1] == slot && slots[i][0] >= 0 && slots[i][0] < SLOTS) source = slots[i][0];
            if (source < 0 && !one_pool) continue;
            for (int32_t head = 0; head < HEADS; head++)
                wrong += !same_bits(after, slot, &before, source < 0 ? slot : source, head);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_test_free(stream, pairs);
        cpa_kv_view_free(&to, stream);
        cpa_kv_view_free(&from, stream);
        cpa_kv_fixture_destroy(&dst);
        cpa_kv_fixture_destroy(&src);
        free(v);
        free(k);
        cpa_test_device_close(device, stream);
    }
}

static void wrong_arguments_are_named_and_change_nothing(void) {
    cpa_kv_fixture f;
    cpa_test_device_open(1, &device, &stream);
    cpa_kv_fixture_init(&f, CPA_F32, BLOCKS, 16, HEADS, K_DIM, V_DIM, 0);
    cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
    const int64_t pairs[1][2] = {{0, BLOCKS}};
    cpa_kv_copy_args copy = {sizeof copy, view, view, pairs, 1};
    CU_ASSERT_EQUAL(cpa_kv_copy(&copy, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "block 12 of 12"));
    const float zeros[HEADS * K_DIM] = {0};
    const int64_t slot = BLOCKS * 16;
    void *k = cpa_test_upload(stream, zeros, sizeof zeros);
    int64_t *mapping = cpa_test_upload(stream, &slot, sizeof slot);
    cpa_kv_write_args write = {sizeof write, 1, CPA_F32, k, k, mapping, view, NULL, 0, 0, 0, 0};
    /* The host refuses the call; a device, which reads the mapping later, the next wait for the stream. */
    cpa_status status = cpa_kv_write(&write, stream);
    if (status == CPA_OK) status = cpa_stream_sync(stream);
    CU_ASSERT_EQUAL(status, CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "slot_mapping[0] is 192"));
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    write.k_row_stride = HEADS * K_DIM - 1;
    CU_ASSERT_EQUAL(cpa_kv_write(&write, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "k_row_stride is 71, expected 0 or at least 72"));
    write.size = 3;
    CU_ASSERT_EQUAL(cpa_kv_write(&write, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "struct size is 3"));
    cpa_kv_fixture_download(&f, &view, stream);
    for (int64_t s = 0; s < BLOCKS * 16; s++) CU_ASSERT(is_poison(&f, s / 16, s % 16));
    cpa_test_free(stream, mapping);
    cpa_test_free(stream, k);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&f);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"tokens land in their slots and nowhere else", tokens_land_in_their_slots_and_nowhere_else},
    {"slices of wider rows are written like contiguous ones", slices_of_wider_rows_are_written_like_contiguous_ones},
    {"tokens that are not finite are told", tokens_that_are_not_finite_are_told},
    {"copied blocks equal their source in either layout", copied_blocks_equal_their_source_in_either_layout},
    {"packed ranges are consecutive and leave tails alone", packed_ranges_are_consecutive_and_leave_tails_alone},
    {"moved tokens keep their bits", moved_tokens_keep_their_bits},
    {"wrong arguments are named and change nothing", wrong_arguments_are_named_and_change_nothing},
};
CPA_DEVICE_TEST_MAIN("kv", tests)
