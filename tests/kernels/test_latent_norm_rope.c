/* latent_norm_rope against the calls that it is made of, rmsnorm, rotate and kv_write, bit for bit: rows, pages of each
 * dtype, flags, and the rotated parts of queries. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

enum { ROWS = 7, POSITIONS = 40, BLOCK = 4, BLOCKS = 5, NAN_ROW = 2, POISON = 0xff };
static const int64_t SLOTS[ROWS] = {7, BLOCK *BLOCKS - 1, 0, 13, -1, 14, 15};
/* Those of time, height and width; some are outside of the table. */
static const int64_t AT[3 * ROWS] = {0,         1,  POSITIONS - 1,
                                     POSITIONS, 17, 17,
                                     -1, /* height */
                                     3,         9,  30,
                                     2,         5,  POSITIONS,
                                     1, /* width */
                                     4,         8,  12,
                                     16,        20, 24,
                                     28};
static const float EPS = 1e-6f;

typedef struct form {
    int32_t k_dim, v_dim, q_heads;
    int32_t nope; /* elements of a query head in front of its rotated part, and in the row that gets it, v_dim */
    cpa_dtype dtype, kv_dtype;
    float k_scale;
    int32_t interleaved, sections[3];
    int pad, in_place;
} form;

static const form FORMS[] = {
    {576, 512, 16, 128, CPA_BF16, CPA_BF16, 0, 1, {0}, 8, 0},            /* DeepSeek V3 */
    {576, 512, 16, 128, CPA_BF16, CPA_FP8_E4M3, 0.25f, 1, {0}, 1536, 0}, /* the row lies behind that of queries */
    {576, 512, 1, 0, CPA_BF16, CPA_FP8_T128, 0, 0, {0}, 0, 1},
    {576, 512, 17, 128, CPA_F16, CPA_FP8_E4M3, 0, 0, {8, 12, 12}, 0, 0},
    {576, 512, 3, 8, CPA_F32, CPA_FP8_T128, 0, 1, {0}, 4, 0},
    {512, 448, 2, 8, CPA_BF16, CPA_FP8_T64, 0, 1, {0}, 0, 1},
    {512, 448, 2, 8, CPA_F32, CPA_FP8_T64, 0, 1, {0}, 4, 0},
    {512, 448, 2, 8, CPA_F16, CPA_FP8_T64, 0, 0, {0}, 3, 0},
    {576, 512, 0, 0, CPA_F32, CPA_F32, 0, 1, {0}, 0, 0},
    {48, 32, 4, 16, CPA_BF16, CPA_F16, 0, 0, {0}, 0, 1},
    {48, 32, 4, 16, CPA_BF16, CPA_FP8_E4M3, 0, 0, {0}, 0, 0}, /* rows with scales of their own */
    {37, 31, 2, 5, CPA_BF16, CPA_INT8, 0, 1, {0}, 3, 0},      /* nothing is aligned */
    {41, 35, 5, 3, CPA_F16, CPA_F16, 0, 0, {0}, 1, 1},
};

/* What both ways read, and where they write: 0 the calls one by one, 1 all in one. */
typedef struct both {
    const form *form;
    cpa_test_tensor x, weight, q;
    cpa_test_tensor out[2], q_out[2];
    char *pool[2]; /* device */
    uint8_t *flags[2];
    int64_t pool_bytes;
    float *table;
    int64_t *positions, *slots;
    cpa_kv_view view; /* without a pool */
} both;

static cpa_rope rope_of(const both *b) {
    const form *f = b->form;
    return (cpa_rope){.table = b->table,
                      .max_position = POSITIONS,
                      .dim = f->k_dim - f->v_dim,
                      .interleaved = f->interleaved,
                      .sections = {f->sections[0], f->sections[1], f->sections[2]}};
}

static void make_cache(both *b) {
    const form *f = b->form;
    const uint8_t none[ROWS] = {0};
    b->view = (cpa_kv_view){.dtype = f->kv_dtype,
                            .block_size = BLOCK,
                            .num_blocks = BLOCKS,
                            .kv_heads = 1,
                            .k_dim = f->k_dim,
                            .v_dim = f->v_dim,
                            .k_scale = f->k_scale,
                            .v_in_k = 1};
    b->pool_bytes = BLOCKS * cpa_kv_block_bytes(f->kv_dtype, CPA_KEYS, f->k_scale, BLOCK, 1, f->k_dim);
    char *poison = malloc((size_t)b->pool_bytes);
    memset(poison, POISON, (size_t)b->pool_bytes);
    for (int i = 0; i < 2; i++) {
        b->pool[i] = cpa_test_upload(stream, poison, b->pool_bytes);
        b->flags[i] = cpa_test_upload(stream, none, sizeof none);
    }
    free(poison);
}

static void make(both *b, const form *f) {
    const int32_t rotated = f->k_dim - f->v_dim;
    const cpa_rope_config config = {.size = sizeof config, .dim = rotated, .theta = 1e4, .max_position = POSITIONS};
    float *table = malloc((size_t)(POSITIONS * rotated) * sizeof *table);
    *b = (both){.form = f};
    CU_ASSERT_EQUAL_FATAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    b->table = cpa_test_upload(stream, table, POSITIONS * rotated * (int64_t)sizeof *table);
    b->positions = cpa_test_upload(stream, AT, sizeof AT);
    b->slots = cpa_test_upload(stream, SLOTS, sizeof SLOTS);
    b->x = cpa_test_tensor_make(stream, f->dtype, ROWS, f->k_dim, f->k_dim + f->pad, 1);
    cpa_test_row(&b->x, NAN_ROW)[f->v_dim + 1] = NAN;
    cpa_test_tensor_send(&b->x, stream);
    b->weight = cpa_test_tensor_make(stream, f->dtype, 1, f->v_dim, 0, 2);
    b->q = cpa_test_tensor_make(stream, f->dtype, ROWS, f->q_heads * (f->nope + rotated), 0, 3);
    for (int i = 0; i < 2; i++) {
        b->out[i] = cpa_test_tensor_blank(stream, f->dtype, ROWS, f->k_dim, f->k_dim + f->pad);
        b->q_out[i] = cpa_test_tensor_blank(stream, f->dtype, ROWS, f->q_heads * f->k_dim, 0);
    }
    make_cache(b);
    free(table);
}

static void destroy(both *b) {
    cpa_test_tensor *const tensors[] = {&b->x, &b->weight, &b->q, &b->out[0], &b->out[1], &b->q_out[0], &b->q_out[1]};
    void *const memory[] = {b->pool[0], b->pool[1], b->flags[0], b->flags[1], b->table, b->positions, b->slots};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) cpa_test_tensor_free(tensors[i], stream);
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
}

static void *at(const void *device_memory, cpa_dtype dtype, int64_t elements) {
    return (char *)(uintptr_t)device_memory + elements * cpa_dtype_bytes(dtype);
}

/* Queries: the rotated parts of heads, to those of absorbed queries. */
static void run_apart(both *b) {
    const form *f = b->form;
    const int32_t rotated = f->k_dim - f->v_dim;
    const cpa_rmsnorm_args norm = {.size = sizeof norm,
                                   .rows = ROWS,
                                   .width = f->v_dim,
                                   .dtype = f->dtype,
                                   .x = b->x.device,
                                   .x_stride = b->x.stride,
                                   .weight = b->weight.device,
                                   .weight_offset = 1,
                                   .eps = EPS,
                                   .out = b->out[0].device,
                                   .out_stride = b->out[0].stride};
    CU_ASSERT_EQUAL(cpa_rmsnorm(&norm, stream), CPA_OK);
    cpa_rotate_args rotate = {.size = sizeof rotate,
                              .rows = ROWS,
                              .heads = 1,
                              .dim = rotated,
                              .dtype = f->dtype,
                              .x = at(b->x.device, f->dtype, f->v_dim),
                              .x_stride = b->x.stride,
                              .rope = rope_of(b),
                              .positions = b->positions,
                              .out = at(b->out[0].device, f->dtype, f->v_dim),
                              .out_stride = b->out[0].stride};
    CU_ASSERT_EQUAL(cpa_rotate(&rotate, stream), CPA_OK);
    if (f->q_heads) {
        rotate.heads = f->q_heads;
        rotate.x = at(b->q.device, f->dtype, f->nope);
        rotate.x_stride = b->q.stride, rotate.x_head_stride = f->nope + rotated;
        rotate.out = at(b->q_out[0].device, f->dtype, f->v_dim);
        rotate.out_stride = b->q_out[0].stride, rotate.out_head_stride = f->k_dim;
        CU_ASSERT_EQUAL(cpa_rotate(&rotate, stream), CPA_OK);
    }
    cpa_kv_view view = b->view;
    view.k = b->pool[0];
    const cpa_kv_write_args write = {.size = sizeof write,
                                     .tokens = ROWS,
                                     .dtype = f->dtype,
                                     .k = b->out[0].device,
                                     .k_row_stride = b->out[0].stride,
                                     .slot_mapping = b->slots,
                                     .kv = view,
                                     .nonfinite = b->flags[0]};
    CU_ASSERT_EQUAL(cpa_kv_write(&write, stream), CPA_OK);
}

static void run_in_one(both *b) {
    const form *f = b->form;
    const int32_t rotated = f->k_dim - f->v_dim;
    cpa_kv_view view = b->view;
    view.k = b->pool[1];
    const cpa_latent_norm_rope_args args = {
        .size = sizeof args,
        .rows = ROWS,
        .shape = {.q_heads = f->q_heads,
                  .kv_heads = 1,
                  .k_dim = f->k_dim,
                  .v_dim = f->v_dim,
                  .v_in_k = 1,
                  .dtype = f->dtype},
        .x = b->x.device,
        .x_stride = b->x.stride,
        .weight = b->weight.device,
        .weight_offset = 1,
        .eps = EPS,
        .rope = rope_of(b),
        .positions = b->positions,
        .q = f->q_heads ? at(b->q.device, f->dtype, f->nope) : NULL,
        .q_stride = b->q.stride,
        .q_head_stride = f->nope + rotated,
        .q_out = at(b->q_out[1].device, f->dtype, f->v_dim),
        .q_out_stride = b->q_out[1].stride,
        .q_out_head_stride = f->k_dim,
        .out = f->in_place ? b->x.device : b->out[1].device,
        .out_stride = b->x.stride,
        .slot_mapping = b->slots,
        .kv = view,
        .nonfinite = b->flags[1],
    };
    CU_ASSERT_EQUAL(cpa_latent_norm_rope(&args, stream), CPA_OK);
}

static void check_tensors(cpa_test_tensor *want, cpa_test_tensor *got) {
    cpa_test_tensor_fetch(want, stream);
    cpa_test_tensor_fetch(got, stream);
    for (int row = 0; row < ROWS; row++)
        CU_ASSERT_EQUAL(
            memcmp(cpa_test_row(want, row), cpa_test_row(got, row), (size_t)want->width * sizeof *want->values), 0);
}

static void check_pages(const both *b) {
    uint8_t flags[2][ROWS];
    char *pools[2];
    for (int i = 0; i < 2; i++) {
        pools[i] = malloc((size_t)b->pool_bytes);
        cpa_test_download(stream, pools[i], b->pool[i], b->pool_bytes);
        cpa_test_download(stream, flags[i], b->flags[i], ROWS);
    }
    CU_ASSERT_EQUAL(memcmp(pools[0], pools[1], (size_t)b->pool_bytes), 0);
    CU_ASSERT_EQUAL(memcmp(flags[0], flags[1], ROWS), 0);
    CU_ASSERT_EQUAL(flags[1][NAN_ROW], 1);
    CU_ASSERT_EQUAL(flags[1][3], 1); /* no position */
    CU_ASSERT_EQUAL(flags[1][0], 0);
    free(pools[1]);
    free(pools[0]);
}

static void one_call_has_the_bits_of_three(void) {
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        both b;
        make(&b, &FORMS[i]);
        run_apart(&b);
        run_in_one(&b);
        check_tensors(&b.out[0], FORMS[i].in_place ? &b.x : &b.out[1]);
        check_tensors(&b.q_out[0], &b.q_out[1]);
        check_pages(&b);
        if (!FORMS[i].in_place) CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&b.out[1]));
        destroy(&b);
    }
    cpa_test_device_close(device, stream);
}

static void a_slot_that_is_none_is_refused(void) {
    const int64_t slot = BLOCK * BLOCKS;
    both b;
    cpa_test_device_open(1, &device, &stream);
    make(&b, &FORMS[0]);
    int64_t *bad = cpa_test_upload(stream, &slot, sizeof slot);
    cpa_kv_view view = b.view;
    view.k = b.pool[0];
    const cpa_latent_norm_rope_args args = {
        .size = sizeof args,
        .rows = 1,
        .shape = {.kv_heads = 1, .k_dim = 576, .v_dim = 512, .v_in_k = 1, .dtype = CPA_BF16},
        .x = b.x.device,
        .weight = b.weight.device,
        .rope = rope_of(&b),
        .positions = b.positions,
        .slot_mapping = bad,
        .kv = view,
    };
    cpa_status status = cpa_latent_norm_rope(&args, stream);
    if (status == CPA_OK) status = cpa_stream_sync(stream);
    CU_ASSERT_EQUAL(status, CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "slot_mapping[0] is 20, "));
    cpa_test_free(stream, bad);
    destroy(&b);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"one call has the bits of three", one_call_has_the_bits_of_three},
    {"a slot that is none is refused", a_slot_that_is_none_is_refused},
};
CPA_DEVICE_TEST_MAIN("latent_norm_rope", tests)
