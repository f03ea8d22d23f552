/* The operations of the CUDA back end other than attend, against the host's on the same inputs: the same bits, or for
 * merge the same up to rounding of exp and log. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/hash.h"
#include "kernels/operators.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *cuda_device, *host_device;
static cpa_stream *cuda_stream, *host_stream;

/* A well-mixed number from a counter. */
static uint64_t mixed(uint64_t counter) {
    return cpa_mix64(counter * CPA_GOLDEN);
}

static float random_float(uint64_t counter) {
    return (float)(int32_t)(mixed(counter) >> 40) / 1048576.0f - 8;
}

/* n random elements of a dtype, one in 50 a NaN with a payload. */
static void *random_elements(uint64_t seed, cpa_dtype dtype, int64_t n) {
    float *wide = cpa_test_poisoned(n, sizeof *wide);
    void *elements = cpa_test_poisoned(n, cpa_dtype_bytes(dtype));
    for (int64_t i = 0; i < n; i++) {
        if (mixed(seed + (uint64_t)i) % 50 > 0) wide[i] = random_float(seed ^ (uint64_t)i << 8);
    }
    if (cpa_dtype_is_quantised(dtype)) {
        for (int64_t i = 0; i < n; i++) ((uint8_t *)elements)[i] = (uint8_t)mixed(seed + (uint64_t)i);
    } else {
        cpa_narrow(elements, wide, dtype, n);
    }
    free(wide);
    return elements;
}

/* Whether the device memory holds the same bytes as the host memory. */
static int same_bytes(const void *host, const void *device, int64_t bytes) {
    void *copy = cpa_test_poisoned(bytes, 1);
    cpa_test_download(cuda_stream, copy, device, bytes);
    int same = memcmp(host, copy, (size_t)bytes) == 0;
    free(copy);
    return same;
}

/* Whether two arrays of elements agree, a NaN with any NaN. */
static int same_elements(const void *host, const void *device, cpa_dtype dtype, int64_t n) {
    float *a = cpa_test_poisoned(n, sizeof *a), *b = cpa_test_poisoned(n, sizeof *b);
    void *copy = cpa_test_poisoned(n, cpa_dtype_bytes(dtype));
    int64_t differ = 0;
    cpa_test_download(cuda_stream, copy, device, n * cpa_dtype_bytes(dtype));
    cpa_widen(a, host, dtype, n);
    cpa_widen(b, copy, dtype, n);
    for (int64_t i = 0; i < n; i++) differ += a[i] != b[i] && !(isnan(a[i]) && isnan(b[i]));
    free(copy);
    free(b);
    free(a);
    return differ == 0;
}

static void kv_write_of(cpa_dtype from, cpa_dtype to, float scale, int32_t k_dim, int32_t v_dim, int head_major) {
    enum { TOKENS = 77, HEADS = 3, BLOCKS = 9, BLOCK_SIZE = 16 };
    cpa_kv_fixture kv;
    int64_t slots[TOKENS];
    cpa_kv_view shape = {.dtype = to,
                         .block_size = BLOCK_SIZE,
                         .num_blocks = BLOCKS,
                         .kv_heads = HEADS,
                         .k_dim = k_dim,
                         .v_dim = v_dim,
                         .k_scale = scale,
                         .v_scale = scale * 2};
    cpa_kv_fixture_init_view(&kv, shape, head_major);
    for (int i = 0; i < TOKENS; i++) slots[i] = i % 10 == 3 ? -1 : (i * 37) % (BLOCKS * BLOCK_SIZE);
    void *k = random_elements(1, from, TOKENS * HEADS * k_dim), *v = random_elements(2, from, TOKENS * HEADS * v_dim);
    cpa_kv_view view = cpa_kv_fixture_upload(&kv, cuda_stream);
    void *device_k = cpa_test_upload(cuda_stream, k, TOKENS * HEADS * k_dim * cpa_dtype_bytes(from));
    void *device_v = cpa_test_upload(cuda_stream, v, TOKENS * HEADS * v_dim * cpa_dtype_bytes(from));
    int64_t *device_slots = cpa_test_upload(cuda_stream, slots, sizeof slots);
    cpa_kv_write_args args = {.size = sizeof args, .tokens = TOKENS, .dtype = from, .k = k, .v = v};
    args.slot_mapping = slots;
    args.kv = kv.view;
    CU_ASSERT_EQUAL(cpa_kv_write(&args, host_stream), CPA_OK);
    args.k = device_k, args.v = device_v, args.slot_mapping = device_slots, args.kv = view;
    CU_ASSERT_EQUAL(cpa_kv_write(&args, cuda_stream), CPA_OK);
    if (!cpa_dtype_is_quantised(to)) {
        CU_ASSERT_TRUE(same_elements(kv.view.k, view.k, to, kv.k_bytes / cpa_dtype_bytes(to)));
        CU_ASSERT_TRUE(same_elements(kv.view.v, view.v, to, kv.v_bytes / cpa_dtype_bytes(to)));
    }
    if (from == to || cpa_dtype_is_quantised(to)) {
        CU_ASSERT_TRUE(same_bytes(kv.view.k, view.k, kv.k_bytes));
        CU_ASSERT_TRUE(same_bytes(kv.view.v, view.v, kv.v_bytes));
    }
    cpa_test_free(cuda_stream, device_slots);
    cpa_test_free(cuda_stream, device_v);
    cpa_test_free(cuda_stream, device_k);
    cpa_kv_view_free(&view, cuda_stream);
    free(v);
    free(k);
    cpa_kv_fixture_destroy(&kv);
}

static void kv_write_matches(void) {
    for (int from = 0; from < CPA_DTYPE_COUNT; from++) {
        for (int to = 0; to < CPA_DTYPE_COUNT; to++) {
            kv_write_of((cpa_dtype)from, (cpa_dtype)to, 0, 64, 64, 0);
            kv_write_of((cpa_dtype)from, (cpa_dtype)to, 0, 192, 128, 1);
            kv_write_of((cpa_dtype)from, (cpa_dtype)to, 0, 7, 3, 0);
        }
    }
}

static void kv_write_quantises_to_the_bits_of_the_host(void) {
    for (int from = 0; from < CPA_DTYPE_COUNT; from++) {
        for (int kind = 0; kind < 5; kind++) {
            cpa_dtype to = kind == 2 ? CPA_INT8 : kind > 2 ? CPA_FP8_E5M2 : CPA_FP8_E4M3;
            float scale = kind % 3 == 1 ? 0.03f : 0;
            kv_write_of((cpa_dtype)from, to, scale, 64, 64, 0);
            kv_write_of((cpa_dtype)from, to, scale, 192, 256, 1);
            kv_write_of((cpa_dtype)from, to, scale, 7, 3, 0);
        }
    }
}

/* Fills the pools of a fixture with random elements. */
static void fill_pools(cpa_kv_fixture *kv, uint64_t seed) {
    int64_t bytes = cpa_dtype_bytes(kv->view.dtype);
    void *k = random_elements(seed, kv->view.dtype, kv->k_bytes / bytes);
    void *v = random_elements(seed + 1, kv->view.dtype, kv->v_bytes / bytes);
    memcpy(kv->view.k, k, (size_t)kv->k_bytes);
    memcpy(kv->view.v, v, (size_t)kv->v_bytes);
    free(v);
    free(k);
}

static void copies_of(cpa_dtype dtype, int32_t k_dim, int32_t v_dim, int src_head_major, int dst_head_major) {
    enum { HEADS = 3, BLOCK_SIZE = 16, BLOCKS = 2500 }; /* more than the kernel's parameters hold */
    cpa_kv_fixture src, dst;
    cpa_kv_fixture_init(&src, dtype, BLOCKS, BLOCK_SIZE, HEADS, k_dim, v_dim, src_head_major);
    cpa_kv_fixture_init(&dst, dtype, BLOCKS, BLOCK_SIZE, HEADS, k_dim, v_dim, dst_head_major);
    fill_pools(&src, 5);
    cpa_kv_view device_src = cpa_kv_fixture_upload(&src, cuda_stream);
    cpa_kv_view device_dst = cpa_kv_fixture_upload(&dst, cuda_stream);
    int64_t(*pairs)[2] = cpa_test_poisoned(BLOCKS / 2, sizeof *pairs);
    for (int64_t i = 0; i < BLOCKS / 2; i++) pairs[i][0] = (i * 1009) % BLOCKS, pairs[i][1] = BLOCKS - 1 - i;
    cpa_kv_copy_args copy = {.size = sizeof copy, .src = src.view, .dst = dst.view, .n_pairs = BLOCKS / 2};
    copy.pairs = (const int64_t(*)[2])pairs;
    CU_ASSERT_EQUAL(cpa_kv_copy(&copy, host_stream), CPA_OK);
    copy.src = device_src, copy.dst = device_dst;
    CU_ASSERT_EQUAL(cpa_kv_copy(&copy, cuda_stream), CPA_OK);
    CU_ASSERT_TRUE(same_bytes(dst.view.k, device_dst.k, dst.k_bytes));
    CU_ASSERT_TRUE(same_bytes(dst.view.v, device_dst.v, dst.v_bytes));

    int32_t table[BLOCKS];
    for (int32_t i = 0; i < BLOCKS; i++) table[i] = (i * 271) % BLOCKS;
    const cpa_kv_range ranges[] = {{.table = 10, .first = 32, .count = 1000, .dst_block = 3},
                                   {.table = 0, .first = 0, .count = 16 * 1100 + 5, .dst_block = 70},
                                   {.table = 2000, .first = 16, .count = 0, .dst_block = 0},
                                   {.table = 300, .first = 0, .count = 1, .dst_block = 1300}};
    cpa_kv_pack_args pack = {.size = sizeof pack, .src = src.view, .dst = dst.view, .block_tables = table};
    pack.n_table_entries = sizeof table / sizeof table[0];
    pack.ranges = ranges;
    pack.n_ranges = sizeof ranges / sizeof ranges[0];
    CU_ASSERT_EQUAL(cpa_kv_pack(&pack, host_stream), CPA_OK);
    pack.src = device_src, pack.dst = device_dst;
    CU_ASSERT_EQUAL(cpa_kv_pack(&pack, cuda_stream), CPA_OK);
    CU_ASSERT_TRUE(same_bytes(dst.view.k, device_dst.k, dst.k_bytes));
    CU_ASSERT_TRUE(same_bytes(dst.view.v, device_dst.v, dst.v_bytes));
    free(pairs);
    cpa_kv_view_free(&device_dst, cuda_stream);
    cpa_kv_view_free(&device_src, cuda_stream);
    cpa_kv_fixture_destroy(&dst);
    cpa_kv_fixture_destroy(&src);
}

static void kv_copy_and_kv_pack_match(void) {
    copies_of(CPA_BF16, 64, 64, 0, 0);
    copies_of(CPA_F16, 24, 8, 1, 0);
    copies_of(CPA_F32, 7, 3, 0, 1);
    copies_of(CPA_BF16, 7, 3, 1, 1);
    copies_of(CPA_INT8, 64, 32, 0, 1);
    copies_of(CPA_FP8_E4M3, 7, 3, 0, 0);
}

/* States of some rows, some of them empty in each of the ways that count as empty, with NaN in what they hold. */
typedef struct merge_case {
    int64_t rows;
    int32_t heads, v_dim, n;
    int interleaved;
    cpa_dtype out_dtype;
} merge_case;

enum { MAX_STATES = 9 };

static float random_lse(uint64_t counter) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, -INFINITY};
    uint64_t kind = mixed(counter) % 16;
    return kind < 4 ? odd[kind] : kind == 4 ? 200 : random_float(counter * 31);
}

/* Equal (infinities too), near each other, or both NaN. */
static int agree(float a, float b, float tolerance) {
    return a == b || fabsf(a - b) <= tolerance || (isnan(a) && isnan(b));
}

static void merge_of(const merge_case *c) {
    int64_t o_floats = (int64_t)c->heads * c->v_dim,
            stride = c->interleaved ? (o_floats + c->heads + 3) / 4 * 4 : o_floats;
    int64_t lse_stride = c->interleaved ? stride : c->heads, floats = c->rows * (o_floats + c->heads + 4);
    cpa_partial host[MAX_STATES], device[MAX_STATES];
    float *memory[MAX_STATES], *device_memory[MAX_STATES];
    int32_t *maps[MAX_STATES], *device_maps[MAX_STATES];
    for (int32_t s = 0; s < c->n; s++) {
        memory[s] = cpa_test_poisoned(floats, sizeof(float));
        maps[s] = cpa_test_poisoned(c->rows, sizeof(int32_t));
        float *lse = memory[s] + (c->interleaved ? o_floats : c->rows * o_floats);
        host[s] = (cpa_partial){.o = memory[s], .o_row_stride = stride, .lse = lse, .lse_row_stride = lse_stride};
        for (int64_t row = 0; row < c->rows; row++) {
            maps[s][row] = (int32_t)(mixed((uint64_t)(row * 77 + s)) % 8 == 0 ? -1 : c->rows - 1 - row);
            for (int32_t h = 0; h < c->heads; h++) {
                float value = random_lse((uint64_t)((row * c->heads + h) * 64 + s));
                lse[row * lse_stride + h] = value;
                for (int32_t d = 0; d < c->v_dim && value < INFINITY && value > -INFINITY; d++)
                    memory[s][row * stride + (int64_t)h * c->v_dim + d] =
                        random_float((uint64_t)(row * 1000003 + h * 509 + d * 17 + s));
            }
        }
        device_memory[s] = cpa_test_upload(cuda_stream, memory[s], floats * (int64_t)sizeof(float));
        device_maps[s] = cpa_test_upload(cuda_stream, maps[s], c->rows * (int64_t)sizeof(int32_t));
        device[s] = (cpa_partial){.o = device_memory[s],
                                  .o_row_stride = stride,
                                  .lse = device_memory[s] + (lse - memory[s]),
                                  .lse_row_stride = lse_stride};
    }
    const int32_t *some_maps[MAX_STATES], *some_device_maps[MAX_STATES];
    for (int32_t s = 0; s < c->n; s++) {
        some_maps[s] = s % 2 ? maps[s] : NULL;
        some_device_maps[s] = s % 2 ? device_maps[s] : NULL;
    }
    int64_t out_bytes = c->rows * o_floats * cpa_dtype_bytes(c->out_dtype), lse_bytes = c->rows * c->heads * 4;
    void *out = cpa_test_poisoned(out_bytes, 1);
    float *out_lse = cpa_test_poisoned(lse_bytes, 1);
    void *device_out = cpa_test_upload(cuda_stream, out, out_bytes);
    float *device_lse = cpa_test_upload(cuda_stream, out_lse, lse_bytes);
    cpa_merge_args args = {.size = sizeof args, .rows = c->rows, .heads = c->heads, .v_dim = c->v_dim, .states = host};
    args.row_maps = some_maps, args.n_states = c->n, args.out_dtype = c->out_dtype, args.out = out,
    args.out_lse = out_lse, args.foreign_lse = 1;
    CU_ASSERT_EQUAL(cpa_merge(&args, host_stream), CPA_OK);
    args.states = device, args.row_maps = some_device_maps, args.out = device_out, args.out_lse = device_lse;
    CU_ASSERT_EQUAL(cpa_merge(&args, cuda_stream), CPA_OK);

    int64_t n = c->rows * o_floats, wrong = 0;
    float *want = cpa_test_poisoned(n, 4), *got = cpa_test_poisoned(n, 4), *got_lse = cpa_test_poisoned(lse_bytes, 1);
    void *copy = cpa_test_poisoned(out_bytes, 1);
    float tolerance = c->out_dtype == CPA_F32 ? 2e-5f : c->out_dtype == CPA_F16 ? 0.01f : 0.07f; /* an ulp of 8 */
    cpa_test_download(cuda_stream, copy, device_out, out_bytes);
    cpa_test_download(cuda_stream, got_lse, device_lse, lse_bytes);
    cpa_widen(want, out, c->out_dtype, n);
    cpa_widen(got, copy, c->out_dtype, n);
    for (int64_t i = 0; i < n; i++) wrong += !agree(want[i], got[i], tolerance);
    for (int64_t i = 0; i < c->rows * c->heads; i++) wrong += !agree(out_lse[i], got_lse[i], 1e-4f);
    CU_ASSERT_EQUAL(wrong, 0);

    /* One by one into an fp32 accumulator in place gives the bits of all at once. */
    if (c->out_dtype == CPA_F32 && !c->interleaved) {
        cpa_partial pair[2] = {
            {.o = device_memory[0], .o_row_stride = stride, .lse = device[0].lse, .lse_row_stride = lse_stride}, {0}};
        const int32_t *pair_maps[2] = {NULL, NULL};
        args.states = pair, args.row_maps = pair_maps, args.n_states = 2;
        args.out = device_memory[0], args.out_lse = device[0].lse;
        for (int32_t s = 1; s < c->n; s++) {
            pair[1] = device[s];
            pair_maps[1] = some_device_maps[s];
            CU_ASSERT_EQUAL(cpa_merge(&args, cuda_stream), CPA_OK);
        }
        cpa_test_download(cuda_stream, want, device_memory[0], n * 4);
        CU_ASSERT_EQUAL(memcmp(want, got, (size_t)n * 4), 0);
        CU_ASSERT_TRUE(c->n == 1 || same_bytes(got_lse, device[0].lse, lse_bytes));
    }
    free(copy);
    free(got_lse);
    free(got);
    free(want);
    cpa_test_free(cuda_stream, device_lse);
    cpa_test_free(cuda_stream, device_out);
    free(out_lse);
    free(out);
    for (int32_t s = 0; s < c->n; s++) {
        cpa_test_free(cuda_stream, device_maps[s]);
        cpa_test_free(cuda_stream, device_memory[s]);
        free(maps[s]);
        free(memory[s]);
    }
}

static void merge_matches(void) {
    static const merge_case cases[] = {{100, 4, 128, 2, 0, CPA_F32},
                                       {57, 8, 64, 3, 0, CPA_F32},
                                       {33, 3, 256, 9, 0, CPA_F32},
                                       {101, 5, 128, 4, 1, CPA_BF16},
                                       {64, 2, 96, 5, 1, CPA_F16},
                                       {21, 3, 7, 3, 0, CPA_F32},
                                       {21, 3, 33, 3, 1, CPA_BF16},
                                       {1, 1, 1, 1, 0, CPA_F16},
                                       /* More than are merged by a warp each. */
                                       {1200, 4, 128, 2, 0, CPA_F32},
                                       {1200, 4, 64, 3, 1, CPA_F16},
                                       {1200, 4, 128, 4, 1, CPA_BF16},
                                       {1200, 4, 96, 6, 0, CPA_BF16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) merge_of(&cases[i]);
}

static void synthesize_gives_the_bits_of_the_host(void) {
    enum { ROWS = 150, HEADS = 6, KV_HEADS = 2 };
    static const int32_t dims[] = {1, 7, 8, 64, 96, 128, 192, 256};
    uint32_t tokens[ROWS];
    int64_t positions[ROWS];
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = i % 3 ? (uint32_t)mixed((uint64_t)i) : (uint32_t)i;
        positions[i] = i < 8 ? i : (int64_t)(mixed((uint64_t)i + 99) % 10000000);
    }
    uint32_t *device_tokens = cpa_test_upload(cuda_stream, tokens, sizeof tokens);
    int64_t *device_positions = cpa_test_upload(cuda_stream, positions, sizeof positions);
    for (int tensor = CPA_SYNTH_Q; tensor <= CPA_SYNTH_V; tensor++) {
        for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
            cpa_dtype dtype = (cpa_dtype)((tensor + (int)i) % CPA_DTYPE_COUNT);
            int64_t bytes = ROWS * HEADS * dims[i] * cpa_dtype_bytes(dtype);
            void *out = cpa_test_poisoned(bytes, 1), *device_out = cpa_test_upload(cuda_stream, out, bytes);
            cpa_synth_args args = {.tensor = (cpa_synth_tensor)tensor, .seed = 12345, .layer = 3, .heads = HEADS};
            args.kv_heads = KV_HEADS, args.dim = dims[i], args.rows = ROWS, args.dtype = dtype;
            args.tokens = tokens, args.positions = positions, args.out = out;
            CU_ASSERT_EQUAL(host_device->operators->synthesize(&args, host_stream), CPA_OK);
            args.tokens = device_tokens, args.positions = device_positions, args.out = device_out;
            CU_ASSERT_EQUAL(cuda_device->operators->synthesize(&args, cuda_stream), CPA_OK);
            CU_ASSERT_TRUE(same_bytes(out, device_out, bytes));
            cpa_test_free(cuda_stream, device_out);
            free(out);
        }
    }
    cpa_test_free(cuda_stream, device_positions);
    cpa_test_free(cuda_stream, device_tokens);
}

static void hash_rows_gives_the_sum_of_the_host(void) {
    enum { ROWS = 300, POOL = 1000 };
    static const int64_t widths[] = {2, 6, 256, 1000};
    int32_t index[ROWS];
    uint64_t salts[ROWS];
    for (int i = 0; i < ROWS; i++) index[i] = (int32_t)(mixed((uint64_t)i) % POOL), salts[i] = mixed((uint64_t)i + 7);
    int32_t *device_index = cpa_test_upload(cuda_stream, index, sizeof index);
    uint64_t *device_salts = cpa_test_upload(cuda_stream, salts, sizeof salts);
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        void *src = random_elements(3, CPA_BF16, POOL * widths[i] / 2);
        uint64_t sum = 41, *device_sum = cpa_test_upload(cuda_stream, &sum, sizeof sum);
        void *device_src = cpa_test_upload(cuda_stream, src, POOL * widths[i]);
        cpa_hash_rows_args args = {.rows = ROWS, .src = src, .layers = 1, .row_bytes = widths[i], .row_index = index};
        args.salts = salts, args.salt = 9, args.sum = &sum;
        CU_ASSERT_EQUAL(host_device->operators->hash_rows(&args, host_stream), CPA_OK);
        args.src = device_src, args.row_index = device_index, args.salts = device_salts, args.sum = device_sum;
        CU_ASSERT_EQUAL(cuda_device->operators->hash_rows(&args, cuda_stream), CPA_OK);
        CU_ASSERT_TRUE(same_bytes(&sum, device_sum, sizeof sum));
        cpa_test_free(cuda_stream, device_src);
        cpa_test_free(cuda_stream, device_sum);
        free(src);
    }
    cpa_test_free(cuda_stream, device_salts);
    cpa_test_free(cuda_stream, device_index);
}

static void copies_of_rows_match(void) {
    enum { ROWS = 130, PITCH = 240 };
    static const int64_t widths[] = {1, 12, 16, 208, PITCH};
    char *src = random_elements(4, CPA_BF16, ROWS * PITCH / 2), *dst = cpa_test_poisoned(ROWS * PITCH, 1);
    int32_t map[ROWS];
    for (int i = 0; i < ROWS; i++) map[i] = (i * 7) % ROWS;
    char *device_src = cpa_test_upload(cuda_stream, src, ROWS * PITCH);
    char *device_dst = cpa_test_upload(cuda_stream, dst, ROWS * PITCH);
    int32_t *device_map = cpa_test_upload(cuda_stream, map, sizeof map);
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        const cpa_device_table *host_table = host_device->table, *cuda_table = cuda_device->table;
        const cpa_operator_table *host = host_device->operators, *cuda = cuda_device->operators;
        CU_ASSERT_EQUAL(host_table->copy_rows(dst, PITCH, src + 1, PITCH, widths[i] - 1, ROWS, host_stream), CPA_OK);
        CU_ASSERT_EQUAL(
            cuda_table->copy_rows(device_dst, PITCH, device_src + 1, PITCH, widths[i] - 1, ROWS, cuda_stream), CPA_OK);
        CU_ASSERT_TRUE(same_bytes(dst, device_dst, ROWS * PITCH));
        CU_ASSERT_EQUAL(host->gather_rows(dst, src, map, ROWS, widths[i], host_stream), CPA_OK);
        CU_ASSERT_EQUAL(cuda->gather_rows(device_dst, device_src, device_map, ROWS, widths[i], cuda_stream), CPA_OK);
        CU_ASSERT_TRUE(same_bytes(dst, device_dst, ROWS * PITCH));
        CU_ASSERT_EQUAL(host->gather_rows(dst, src, NULL, ROWS, widths[i], host_stream), CPA_OK);
        CU_ASSERT_EQUAL(memcmp(dst, src, (size_t)(ROWS * widths[i])), 0);
        CU_ASSERT_EQUAL(cuda->gather_rows(device_dst, device_src, NULL, ROWS, widths[i], cuda_stream), CPA_OK);
        CU_ASSERT_TRUE(same_bytes(dst, device_dst, ROWS * PITCH));
    }
    cpa_test_free(cuda_stream, device_map);
    cpa_test_free(cuda_stream, device_dst);
    cpa_test_free(cuda_stream, device_src);
    free(dst);
    free(src);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"kv_write matches the host for every pair of dtypes", kv_write_matches},
        {"kv_write quantises to the bits of the host", kv_write_quantises_to_the_bits_of_the_host},
        {"kv_copy and kv_pack give the bytes of the host", kv_copy_and_kv_pack_match},
        {"merge matches the host, and one by one gives the bits of all at once", merge_matches},
        {"synthesize gives the bits of the host", synthesize_gives_the_bits_of_the_host},
        {"hash_rows gives the sum of the host", hash_rows_gives_the_sum_of_the_host},
        {"copies of rows match the host", copies_of_rows_match},
    };
    cpa_device_options options = {.size = sizeof options};
    int missing = cpa_test_cuda_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    cpa_test_device_open(1, &cuda_device, &cuda_stream);
    if (cpa_device_open(&options, &host_device, NULL) != CPA_OK) abort();
    if (cpa_stream_create(host_device, &host_stream, NULL) != CPA_OK) abort();
    int code = cpa_test_main(argc, argv, "operations on CUDA", tests, (int)(sizeof tests / sizeof tests[0]));
    cpa_test_device_close(host_device, host_stream);
    cpa_test_device_close(cuda_device, cuda_stream);
    return code;
}
