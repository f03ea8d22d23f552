/* Heads of attention over entries, byte for byte against fp32 oracles that do what cpattn/compress.h says in its order:
 * queries and rows before attention, results behind it. Pads between rows are NaN, and what is written lies among
 * poison that stays. */
#include <cpattn/compress.h>

#include <stdlib.h>

#include "kernels/kv_view.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/entry_oracle.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

enum { DIM = CPA_ENTRY_DIM, ROPE = 64, POSITIONS = 300, BLOCK = 16, BLOCKS = 3 };
static const float EPS = 1e-6f;

static cpa_device *device;
static cpa_stream *stream;
static float *table, *device_table;

static void open_device(void) {
    const cpa_rope_config config = {.size = sizeof config, .dim = ROPE, .theta = 1e4, .max_position = POSITIONS};
    cpa_test_device_open(2, &device, &stream);
    table = malloc(sizeof *table * POSITIONS * ROPE);
    CU_ASSERT_EQUAL_FATAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    device_table = cpa_test_upload(stream, table, POSITIONS * ROPE * (int64_t)sizeof *table);
}

static void close_device(void) {
    cpa_test_free(stream, device_table);
    free(table);
    cpa_test_device_close(device, stream);
}

static cpa_rope rope_of(int32_t first) {
    return (cpa_rope){.table = device_table, .max_position = POSITIONS, .dim = ROPE, .first = first, .interleaved = 1};
}

/* The last but one lies outside of the table, the one in front of it is negative. */
static int64_t position_of(int64_t row, int64_t rows) {
    return row == rows - 2 ? POSITIONS : row == rows - 3 ? -1 : row * 37 % POSITIONS;
}

/* ---- queries ---- */

typedef struct q_case {
    int64_t tokens;
    int32_t heads, out_heads, first;
    cpa_dtype dtype, kv_dtype;
    float scale;
    int32_t pad;
} q_case;

static void want_entry(cpa_kv_fixture *want, int64_t slot, const float *x) {
    const cpa_kv_view *kv = &want->view;
    const cpa_kv_pool pool = cpa_kv_pool_of(kv, CPA_KEYS);
    char *block = pool.memory + slot / BLOCK * pool.block_stride;
    uint8_t *row = (uint8_t *)block + slot % BLOCK * pool.token_stride;
    for (int32_t d = 0; d < DIM && kv->dtype != CPA_FP8_T64; d++) {
        const float rounded = cpa_reference_round(x[d], CPA_BF16);
        if (kv->dtype == CPA_BF16) cpa_narrow(row + 2 * d, &rounded, CPA_BF16, 1);
        if (kv->dtype == CPA_FP8_E4M3) row[d] = cpa_test_nearest_code(rounded / kv->k_scale);
    }
    if (kv->dtype == CPA_FP8_T64)
        cpa_test_t64_row(x, row, (uint8_t *)block + pool.scales_at + slot % BLOCK * pool.scale_bytes);
}

/* Wrong elements of q_out, and wrong bytes of the cache. */
static int64_t wrong_queries(const q_case *c, const cpa_test_tensor *q, const cpa_test_tensor *out) {
    int64_t wrong = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        for (int32_t h = 0; h < c->out_heads; h++) {
            float x[DIM] = {0};
            if (h < c->heads) {
                memcpy(x, cpa_test_row(q, t) + h * DIM, sizeof x);
                cpa_test_entry_norm(x, DIM, EPS);
                cpa_test_entry_turn(x, DIM, table, POSITIONS, ROPE, c->first, position_of(t, c->tokens), 1);
            }
            for (int32_t d = 0; d < DIM; d++) {
                const float want = cpa_reference_round(x[d], c->dtype), got = cpa_test_row(out, t)[h * DIM + d];
                wrong += memcmp(&want, &got, sizeof got) != 0 && !(isnan(want) && isnan(got));
            }
        }
    }
    return wrong;
}

static int64_t wrong_cache(const cpa_kv_fixture *want, const cpa_kv_view *view) {
    cpa_kv_fixture got;
    int64_t wrong = 0;
    cpa_kv_fixture_init_view(&got, want->view, 0);
    cpa_kv_fixture_download(&got, view, stream);
    for (int64_t at = 0; at < got.k_bytes; at += 2) { /* elements of bf16 may be any NaN */
        const char *a = (const char *)got.view.k + at, *b = (const char *)want->view.k + at;
        float x[2];
        cpa_widen(&x[0], a, CPA_BF16, 1);
        cpa_widen(&x[1], b, CPA_BF16, 1);
        wrong += memcmp(a, b, 2) != 0 && !(isnan(x[0]) && isnan(x[1]));
    }
    cpa_kv_fixture_destroy(&got);
    return wrong;
}

static void queries_of(const q_case *c) {
    cpa_test_tensor q = cpa_test_tensor_make(stream, c->dtype, c->tokens, c->heads * DIM, c->heads * DIM + c->pad, 3);
    cpa_test_tensor kv = cpa_test_tensor_make(stream, c->dtype, c->tokens, DIM, DIM + c->pad, 4);
    cpa_test_tensor out =
        cpa_test_tensor_blank(stream, c->dtype, c->tokens, c->out_heads * DIM, c->out_heads * DIM + c->pad);
    cpa_kv_fixture want;
    cpa_kv_fixture_init_view(&want,
                             (cpa_kv_view){.dtype = c->kv_dtype,
                                           .block_size = BLOCK,
                                           .num_blocks = BLOCKS,
                                           .kv_heads = 1,
                                           .k_dim = DIM,
                                           .v_dim = DIM,
                                           .k_scale = c->scale,
                                           .v_in_k = 1},
                             0);
    const cpa_kv_view view = cpa_kv_fixture_upload(&want, stream);
    int64_t *positions = malloc(sizeof *positions * (size_t)(2 * c->tokens)), *slots = positions + c->tokens;
    for (int64_t t = 0; t < c->tokens; t++) {
        positions[t] = position_of(t, c->tokens);
        slots[t] = t % 5 == 3 || t >= BLOCK * BLOCKS ? -1 - t : t * 29 % (BLOCK * BLOCKS);
        if (slots[t] < 0) continue;
        float x[DIM];
        memcpy(x, cpa_test_row(&kv, t), sizeof x);
        cpa_test_entry_turn(x, DIM, table, POSITIONS, ROPE, c->first, positions[t], 1);
        for (int32_t d = 0; d < DIM; d++) x[d] = cpa_reference_round(x[d], c->dtype);
        want_entry(&want, slots[t], x);
    }
    int64_t *device_positions = cpa_test_upload(stream, positions, 2 * c->tokens * (int64_t)sizeof *positions);
    const cpa_q_norm_rope_kv_write_args args = {.size = sizeof args,
                                                .tokens = c->tokens,
                                                .heads = c->heads,
                                                .out_heads = c->out_heads,
                                                .dtype = c->dtype,
                                                .q = q.device,
                                                .q_stride = q.stride,
                                                .kv_rows = kv.device,
                                                .kv_stride = kv.stride,
                                                .eps = EPS,
                                                .rope = rope_of(c->first),
                                                .positions = device_positions,
                                                .q_out = out.device,
                                                .q_out_stride = out.stride,
                                                .slots = device_positions + c->tokens,
                                                .kv = view};
    if (cpa_q_norm_rope_kv_write(&args, stream) != CPA_OK) CU_FAIL(cpa_stream_error(stream));
    cpa_test_tensor_fetch(&out, stream);
    CU_ASSERT_EQUAL(wrong_queries(c, &q, &out), 0);
    CU_ASSERT(cpa_test_tensor_pads_are_poison(&out));
    CU_ASSERT_EQUAL(wrong_cache(&want, &view), 0);
    cpa_test_free(stream, device_positions);
    free(positions);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&want);
    cpa_test_tensor_free(&out, stream);
    cpa_test_tensor_free(&kv, stream);
    cpa_test_tensor_free(&q, stream);
}

static void queries_and_rows_are_those_of_an_oracle(void) {
    static const q_case cases[] = {
        {17, 64, 64, 448, CPA_BF16, CPA_FP8_T64, 0, 0}, {5, 16, 64, 448, CPA_BF16, CPA_FP8_T64, 0, 8},
        {40, 3, 5, 448, CPA_F16, CPA_FP8_T64, 0, 24},   {9, 1, 1, 64, CPA_F32, CPA_FP8_T64, 0, 4},
        {6, 128, 128, 448, CPA_BF16, CPA_BF16, 0, 0},   {33, 2, 3, 2, CPA_BF16, CPA_FP8_E4M3, 0.125f, 0},
        {4, 2, 64, 448, CPA_F32, CPA_BF16, 0, 0}};
    open_device();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) queries_of(&cases[i]);
    close_device();
}

/* ---- results ---- */

typedef struct result_case {
    int64_t rows;
    int32_t heads, groups, packed;
    cpa_dtype dtype;
    int32_t pad;
} result_case;

/* What a call writes, in one piece: codes, then scales. */
typedef struct result {
    int64_t code_bytes, bytes;
    uint8_t *memory;
} result;

static void want_head(const result_case *c, const result *r, int64_t row, int32_t head, float *x) {
    const int64_t of_group = c->heads / c->groups, padded = (c->rows + 3) / 4 * 4;
    const int64_t at = (head / of_group * c->rows + row) * of_group + head % of_group;
    uint32_t word = 0;
    for (int32_t t = 0; t < DIM / 128; t++) {
        const int exponent = cpa_test_power(x + 128 * t, 128, 1e-10f);
        const float scale = ldexpf(1, exponent);
        for (int32_t i = 128 * t; i < 128 * t + 128; i++) r->memory[at * DIM + i] = cpa_test_nearest_code(x[i] / scale);
        word |= (uint32_t)(exponent + 127) << (8 * t);
        if (!c->packed) memcpy(r->memory + r->code_bytes + ((head * 4 + t) * padded + row) * 4, &scale, sizeof scale);
    }
    if (c->packed) memcpy(r->memory + r->code_bytes + (head * padded + row) * 4, &word, sizeof word);
}

static void results_of(const result_case *c) {
    const int64_t width = (int64_t)c->heads * DIM, padded = (c->rows + 3) / 4 * 4, scales = c->packed ? 1 : 4;
    cpa_test_tensor o = cpa_test_tensor_make(stream, c->dtype, c->rows, width, width + c->pad, 5);
    int64_t *positions = malloc(sizeof *positions * (size_t)c->rows);
    result want = {.code_bytes = c->rows * width}, got;
    want.bytes = want.code_bytes + c->heads * scales * padded * 4;
    want.memory = malloc((size_t)want.bytes + 16);
    memset(want.memory, 0xa5, (size_t)want.bytes + 16);
    got = want;
    got.memory = malloc((size_t)want.bytes + 16);
    uint8_t *out = cpa_test_upload(stream, want.memory, want.bytes + 16);
    memset(want.memory + want.code_bytes, 0, (size_t)(want.bytes - want.code_bytes));
    for (int64_t row = 0; row < c->rows; row++) {
        positions[row] = position_of(row, c->rows);
        if (row == 1) cpa_test_row(&o, row)[3] = NAN, cpa_test_row(&o, row)[130] = INFINITY;
        if (row == 2) memset(cpa_test_row(&o, row), 0, DIM * sizeof(float));
    }
    cpa_test_tensor_send(&o, stream);
    for (int64_t row = 0; row < c->rows; row++) {
        for (int32_t head = 0; head < c->heads; head++) {
            float x[DIM];
            memcpy(x, cpa_test_row(&o, row) + head * DIM, sizeof x);
            cpa_test_entry_turn(x, DIM, table, POSITIONS, ROPE, DIM - ROPE, positions[row], -1);
            want_head(c, &want, row, head, x);
        }
    }
    int64_t *device_positions = cpa_test_upload(stream, positions, c->rows * (int64_t)sizeof *positions);
    const cpa_inverse_rope_quant_args args = {.size = sizeof args,
                                              .rows = c->rows,
                                              .heads = c->heads,
                                              .groups = c->groups,
                                              .dtype = c->dtype,
                                              .o = o.device,
                                              .o_stride = o.stride,
                                              .rope = rope_of(DIM - ROPE),
                                              .positions = device_positions,
                                              .codes = out,
                                              .scales = out + want.code_bytes,
                                              .packed = c->packed};
    if (cpa_inverse_rope_quant(&args, stream) != CPA_OK) CU_FAIL(cpa_stream_error(stream));
    cpa_test_download(stream, got.memory, out, want.bytes + 16);
    CU_ASSERT_EQUAL(memcmp(got.memory, want.memory, (size_t)want.bytes + 16), 0);
    cpa_test_free(stream, device_positions);
    cpa_test_free(stream, out);
    free(got.memory);
    free(want.memory);
    free(positions);
    cpa_test_tensor_free(&o, stream);
}

static void results_have_the_codes_of_an_oracle(void) {
    static const result_case cases[] = {{9, 64, 8, 0, CPA_BF16, 0},  {8, 16, 16, 1, CPA_BF16, 16},
                                        {33, 6, 2, 0, CPA_F16, 8},   {5, 3, 1, 1, CPA_F32, 4},
                                        {1, 128, 8, 1, CPA_BF16, 0}, {65, 4, 4, 0, CPA_BF16, 0}};
    open_device();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) results_of(&cases[i]);
    close_device();
}

/* ---- bad input ---- */

static void refuse_q(cpa_q_norm_rope_kv_write_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_q_norm_rope_kv_write(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void refuse_o(cpa_inverse_rope_quant_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_inverse_rope_quant(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void bad_calls_are_refused(void) {
    static _Alignas(16) char memory[1 << 16];
    static const int64_t positions[2] = {0, 1}, slots[2] = {0, 1};
    open_device();
    const cpa_kv_view kv = {.k = memory,
                            .dtype = CPA_FP8_T64,
                            .block_size = BLOCK,
                            .num_blocks = 1,
                            .kv_heads = 1,
                            .k_dim = DIM,
                            .v_dim = DIM,
                            .v_in_k = 1};
    cpa_q_norm_rope_kv_write_args q = {.size = sizeof q,
                                       .tokens = 2,
                                       .heads = 2,
                                       .out_heads = 4,
                                       .dtype = CPA_BF16,
                                       .q = memory,
                                       .kv_rows = memory,
                                       .rope = rope_of(448),
                                       .positions = positions,
                                       .q_out = memory + 4096,
                                       .slots = slots,
                                       .kv = kv},
                                  bad = q;
    bad.out_heads = 1, refuse_q(bad, "out_heads is 1, expected 2 to");
    bad = q, bad.q = memory + 2, refuse_q(bad, "q at");
    bad = q, bad.q_stride = 1028, refuse_q(bad, "rows 2056 bytes apart, expected multiples of 16");
    bad = q, bad.q_out = memory, refuse_q(bad, "q_out is q");
    bad = q, bad.rope.inverse = 1, refuse_q(bad, "inverse 1, expected 1, an even number and 0");
    bad = q, bad.rope.sections[0] = 32, refuse_q(bad, "rope.sections are 32, 0 and 0, expected none");
    bad = q, bad.kv.dtype = CPA_FP8_E4M3, refuse_q(bad, "fp8_e4m3 without k_scale");
    bad = q, bad.kv.dtype = CPA_BF16, bad.kv.k_token_stride = 516, refuse_q(bad, "rows 1032");
    bad = q, bad.kv.k_block_stride = 9800, refuse_q(bad, "a block stride is 9800, expected a multiple of 576");
    bad = q, bad.slots = NULL, refuse_q(bad, "slots is NULL");
    cpa_inverse_rope_quant_args o = {.size = sizeof o,
                                     .rows = 2,
                                     .heads = 4,
                                     .groups = 2,
                                     .dtype = CPA_BF16,
                                     .o = memory,
                                     .rope = rope_of(448),
                                     .positions = positions,
                                     .codes = memory + 16384,
                                     .scales = memory + 32768},
                                wrong = o;
    wrong.groups = 3, refuse_o(wrong, "groups is 3, expected a divisor of the 4 heads");
    wrong = o, wrong.packed = 2, refuse_o(wrong, "packed is 2");
    wrong = o, wrong.o_stride = 2047, refuse_o(wrong, "o_stride is 2047");
    wrong = o, wrong.scales = NULL, refuse_o(wrong, "scales is NULL");
    wrong = o, wrong.positions = NULL, refuse_o(wrong, "positions is NULL");
    wrong = o, wrong.codes = memory + 8, refuse_o(wrong, "codes at");
    wrong = o, wrong.dtype = CPA_INT8, refuse_o(wrong, "dtype is 4");
    q.tokens = 0, o.rows = 0;
    CU_ASSERT_EQUAL(cpa_q_norm_rope_kv_write(&q, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_inverse_rope_quant(&o, stream), CPA_OK);
    close_device();
}

static const cpa_test tests[] = {
    {"queries and rows are those of an oracle", queries_and_rows_are_those_of_an_oracle},
    {"results have the codes of an oracle", results_have_the_codes_of_an_oracle},
    {"bad calls are refused", bad_calls_are_refused},
};
CPA_DEVICE_TEST_MAIN("heads of entries", tests)
