/* Calls of a compressor that are refused, each with its line: on the host what slots and tables say is as well. */
#include <cpattn/compress.h>

#include <string.h>

#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

static void refuse_state(cpa_compress_state_write_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_compress_state_write(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void refuse_entries(cpa_compress_write_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_compress_write(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void refuse_halos(cpa_compress_halo_pack_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_compress_halo_pack(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void bad_calls_are_refused(void) {
    static _Alignas(16) float rows[16 * 512], kv[4 * 256], cache[4096];
    static const int64_t positions[4] = {3, 7, 11, 15}, slots[4] = {0, 1, 2, 3};
    static const int32_t sequences[4], tables[2] = {0, 9};
    static _Alignas(16) float table[16 * 64];
    cpa_test_device_open(1, &device, &stream);
    const cpa_compress_state state = {
        .rows = rows, .num_blocks = 1, .block_size = 16, .ratio = 4, .overlap = 1, .head = 128};
    cpa_compress_state_write_args good = {sizeof good, 4, state, kv, kv, 0, 0, kv, positions, slots}, bad = good;
    bad.state.head = 64, refuse_state(bad, "state.head is 64, expected 128, 256 or 512");
    bad = good, bad.state.ratio = 129, refuse_state(bad, "state.ratio is 129, expected 1 to 128");
    bad = good, bad.state.overlap = 2, refuse_state(bad, "state.overlap is 2");
    bad = good, bad.state.block_size = 0, refuse_state(bad, "state.block_size is 0");
    bad = good, bad.state.reserved[3] = 1, refuse_state(bad, "the reserved bytes of state");
    bad = good, bad.kv_stride = 257, refuse_state(bad, "kv at");
    bad = good, bad.score = kv + 1, refuse_state(bad, "score at");
    bad = good, bad.ape = NULL, refuse_state(bad, "ape is NULL");
    bad = good, bad.slots = NULL, refuse_state(bad, "slots is NULL");
    cpa_compress_halo_pack_args halos = {sizeof halos, 1, state, slots, rows}, other = halos;
    other.state.overlap = 0, refuse_halos(other, "state.overlap is 0, expected 1");
    other = halos, other.halos = -1, refuse_halos(other, "halos is -1");
    other = halos, other.out = rows + 1, refuse_halos(other, "out at");
    cpa_compress_write_args entries =
                                {.size = sizeof entries,
                                 .tokens = 1,
                                 .state = state,
                                 .positions = positions,
                                 .sequences = sequences,
                                 .tables = tables,
                                 .n_sequences = 1,
                                 .table_stride = 1,
                                 .weight = kv,
                                 .rope = {.table = table, .max_position = 16, .dim = 64, .first = 64, .interleaved = 1},
                                 .slots = slots,
                                 .kv = {.k = cache,
                                        .dtype = CPA_FP8_E4M3,
                                        .block_size = 16,
                                        .num_blocks = 1,
                                        .kv_heads = 1,
                                        .k_dim = 128,
                                        .v_dim = 128,
                                        .v_in_k = 1}},
                            wrong = entries;
    wrong.rope.interleaved = 0, refuse_entries(wrong, "rope has interleaved 0");
    wrong = entries, wrong.rope.first = 63, refuse_entries(wrong, "first 63");
    wrong = entries, wrong.rope.table = NULL, refuse_entries(wrong, "rope.table is NULL");
    wrong = entries, wrong.kv.v_dim = 64, refuse_entries(wrong, "k_dim 128 and v_dim 64, expected 1, 1 and twice 128");
    wrong = entries, wrong.kv.dtype = CPA_F16, refuse_entries(wrong, "the cache is of fp16, expected fp8_t64, bf16");
    wrong = entries, wrong.n_sequences = 0, refuse_entries(wrong, "n_sequences is 0");
    wrong = entries, wrong.halo_slots = sequences, wrong.state.overlap = 0;
    refuse_entries(wrong, "halo_slots are given without overlap");
    wrong = entries, wrong.weight = kv + 2, refuse_entries(wrong, "weight at");
    wrong = entries, wrong.eps = -1, refuse_entries(wrong, "eps is -1");
    static _Alignas(4) uint8_t codes[64], exponents[4];
    wrong = entries, wrong.mxfp4 = codes, wrong.mxfp4_scales = exponents, wrong.mxfp4_rows = 1;
    refuse_entries(wrong, "kv.k and mxfp4 are both set, expected one");
    wrong.kv.k = NULL, wrong.mxfp4_rows = -1, refuse_entries(wrong, "mxfp4_rows is -1");
    wrong.mxfp4_rows = 1, wrong.mxfp4_scales = NULL, refuse_entries(wrong, "mxfp4_scales is NULL");
    wrong.mxfp4_scales = exponents, wrong.mxfp4 = codes + 1, refuse_entries(wrong, "mxfp4");
    CU_ASSERT_EQUAL(cpa_compress_write(&(cpa_compress_write_args){.size = sizeof wrong,
                                                                  .state = state,
                                                                  .tables = tables,
                                                                  .n_sequences = 1,
                                                                  .table_stride = 1,
                                                                  .weight = kv,
                                                                  .rope = entries.rope,
                                                                  .kv = entries.kv},
                                       stream),
                    CPA_OK);
    if (cpa_test_promises_bits()) { /* a device says so when it is waited for */
        wrong = entries, wrong.tables = tables + 1,
        refuse_entries(wrong, "the block of the state of row 4 of the window");
        wrong = entries, wrong.positions = positions + 3, wrong.indices = positions;
        refuse_entries(wrong, "the index of the window of row 0 of the window of token 0, at position 15");
        wrong = entries, wrong.slots = (const int64_t[]){16},
        refuse_entries(wrong, "slots[0] is 16, expected at most 15");
        bad = good, bad.slots = (const int64_t[]){0, 16, 2, 3},
        refuse_state(bad, "slots[1] is 16, expected at most 15");
    }
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"bad calls are refused", bad_calls_are_refused},
};
CPA_DEVICE_TEST_MAIN("refusals of a compressor", tests)
