/* synthesize and hash_rows: reproducible whatever the threads and the grouping of rows, and peaky as promised. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/operators.h"
#include "kernels/synthesize.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROWS = 400, HEADS = 4, KV_HEADS = 2, DIM = 64 };

static cpa_device *device;
static cpa_stream *stream;

static uint32_t tokens[ROWS];
static int64_t positions[ROWS];

static cpa_synth_args args_of(cpa_synth_tensor tensor, void *out) {
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = (uint32_t)i * 2654435761u;
        positions[i] = i;
    }
    return (cpa_synth_args){.tensor = tensor,
                            .seed = 5,
                            .layer = 1,
                            .heads = tensor == CPA_SYNTH_Q ? HEADS : KV_HEADS,
                            .kv_heads = KV_HEADS,
                            .dim = DIM,
                            .rows = ROWS,
                            .tokens = tokens,
                            .positions = positions,
                            .dtype = CPA_F32,
                            .out = out};
}

/* Runs the generator on the device, from and to host memory. */
static void synthesize(cpa_synth_args args) {
    int64_t bytes = args.rows * args.heads * args.dim * cpa_dtype_bytes(args.dtype);
    uint32_t *device_tokens = cpa_test_upload(stream, args.tokens, args.rows * (int64_t)sizeof *args.tokens);
    int64_t *device_positions = cpa_test_upload(stream, args.positions, args.rows * (int64_t)sizeof *args.positions);
    void *host = args.out;
    args.tokens = device_tokens;
    args.positions = device_positions;
    args.out = cpa_test_upload(stream, host, bytes);
    CU_ASSERT_EQUAL(device->operators->synthesize(&args, stream), CPA_OK);
    cpa_test_download(stream, host, args.out, bytes);
    cpa_test_free(stream, args.out);
    cpa_test_free(stream, device_positions);
    cpa_test_free(stream, device_tokens);
}

static void rows_do_not_depend_on_threads_or_grouping(void) {
    static float one[ROWS * HEADS * DIM], three[ROWS * HEADS * DIM], alone[ROWS * DIM];
    for (int t = CPA_SYNTH_Q; t <= CPA_SYNTH_V; t++) {
        cpa_synth_args args = args_of((cpa_synth_tensor)t, one);
        cpa_test_device_open(1, &device, &stream);
        synthesize(args);
        cpa_test_device_close(device, stream);
        cpa_test_device_open(3, &device, &stream);
        args.out = three;
        args.rows = 150;
        synthesize(args);
        args.out = three + 150 * args.heads * DIM;
        args.rows = ROWS - 150;
        args.tokens += 150;
        args.positions += 150;
        synthesize(args);
        cpa_test_device_close(device, stream);
        CU_ASSERT_EQUAL(memcmp(one, three, (size_t)(ROWS * args.heads * DIM) * sizeof *one), 0);
        args = args_of((cpa_synth_tensor)t, alone);
        cpa_synthesize_rows(&args, 1, 0, ROWS, alone, DIM);
        for (int i = 0; i < ROWS; i++) {
            CU_ASSERT_EQUAL(memcmp(alone + i * DIM, one + (i * args.heads + 1) * DIM, DIM * sizeof *one), 0);
        }
    }
}

static void every_input_of_the_generator_matters(void) {
    static float base[ROWS * HEADS * DIM], other[ROWS * HEADS * DIM];
    cpa_test_device_open(1, &device, &stream);
    cpa_synth_args args = args_of(CPA_SYNTH_Q, base);
    synthesize(args);
    for (int change = 0; change < 4; change++) {
        args = args_of(CPA_SYNTH_Q, other);
        if (change == 0) args.seed++;
        if (change == 1) args.layer++;
        if (change == 2) tokens[7]++;
        if (change == 3) positions[7]++;
        synthesize(args);
        for (int h = 0; h < HEADS; h++) {
            CU_ASSERT(memcmp(base + (7 * HEADS + h) * DIM, other + (7 * HEADS + h) * DIM, DIM * sizeof *base) != 0);
        }
    }
    cpa_test_device_close(device, stream);
}

/* The softmax of the last query: how much weight its 8 heaviest keys have, and whether they lie at the sinks, near and
 * far. */
static void scores_are_peaky_at_the_sinks_near_the_query_and_far(void) {
    static float q[ROWS * HEADS * DIM], k[ROWS * KV_HEADS * DIM];
    cpa_test_device_open(1, &device, &stream);
    cpa_synth_args args = args_of(CPA_SYNTH_Q, q);
    synthesize(args);
    args = args_of(CPA_SYNTH_K, k);
    synthesize(args);
    cpa_test_device_close(device, stream);
    double sink = 0, near = 0, rest = 0, peak = -INFINITY, sums[3] = {0};
    int queries = 0, far_peaks = 0;
    for (int i = ROWS / 2; i < ROWS; i++, queries++) {
        double best = -INFINITY;
        int best_at = -1;
        for (int j = 0; j <= i; j++) {
            double score = 0;
            for (int d = 0; d < DIM; d++) score += (double)q[i * HEADS * DIM + d] * (double)k[j * KV_HEADS * DIM + d];
            score /= sqrt(DIM);
            peak = fmax(peak, score);
            if (score > best) best = score, best_at = j;
            if (j < 4)
                sink += score, sums[0]++;
            else if (i - j < 16)
                near += score, sums[1]++;
            else
                rest += score, sums[2]++;
        }
        far_peaks += best_at >= 4 && i - best_at > 64;
    }
    CPA_ASSERT_ORDER(sink / sums[0], >, rest / sums[2] + 3);
    CPA_ASSERT_ORDER(near / sums[1], >, rest / sums[2] + 3);
    CPA_ASSERT_ORDER(far_peaks, >, queries / 20);
    CPA_ASSERT_ORDER(peak, <, 60);
}

/* The digest of three rows of six 16-bit numbers, computed on the device; the hashes of the rows are its parts. */
static uint64_t hash_of(const uint16_t rows[3][6], const int32_t index[3], const uint64_t salts[3]) {
    uint64_t sum = 0, sums[3] = {1, 2, 3};
    void *device_rows = cpa_test_upload(stream, rows, 3 * 12);
    int32_t *device_index = cpa_test_upload(stream, index, 3 * sizeof *index);
    uint64_t *device_salts = cpa_test_upload(stream, salts, 3 * sizeof *salts);
    uint64_t *device_sum = cpa_test_upload(stream, &sum, sizeof sum);
    uint64_t *device_sums = cpa_test_upload(stream, sums, sizeof sums);
    cpa_hash_rows_args args = {.rows = 3,
                               .layers = 1,
                               .src = device_rows,
                               .row_bytes = 12,
                               .row_index = device_index,
                               .salts = device_salts,
                               .sum = device_sum,
                               .sums = device_sums};
    CU_ASSERT_EQUAL(device->operators->hash_rows(&args, stream), CPA_OK);
    cpa_test_download(stream, &sum, device_sum, sizeof sum);
    cpa_test_download(stream, sums, device_sums, sizeof sums);
    CU_ASSERT_EQUAL(sums[0] - 1 + sums[1] - 2 + sums[2] - 3, sum);
    for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL(sums[i] != (uint64_t)i + 1, index[i] >= 0);
    cpa_test_free(stream, device_sums);
    cpa_test_free(stream, device_sum);
    cpa_test_free(stream, device_salts);
    cpa_test_free(stream, device_index);
    cpa_test_free(stream, device_rows);
    return sum;
}

static void hashes_see_every_bit_and_place_but_not_the_order_of_rows(void) {
    uint16_t rows[3][6] = {{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6}, {9, 8, 7, 6, 5, 4}};
    const int32_t index[3] = {0, 1, 2}, reversed[3] = {2, 1, 0};
    const uint64_t salts[3] = {10, 20, 30}, salts_reversed[3] = {30, 20, 10};
    cpa_test_device_open(1, &device, &stream);
    uint64_t sum = hash_of(rows, index, salts);
    CU_ASSERT_EQUAL(hash_of(rows, reversed, salts_reversed), sum);
    CU_ASSERT_NOT_EQUAL(hash_of(rows, reversed, salts), sum);
    for (int bit = 0; bit < 16; bit++) {
        rows[2][4] ^= (uint16_t)(1 << bit);
        CU_ASSERT_NOT_EQUAL(hash_of(rows, index, salts), sum);
        rows[2][4] ^= (uint16_t)(1 << bit);
    }
    cpa_test_device_close(device, stream);
}

/* Adds the first of these rows of each of `layers` layers to the digest. */
static void hash_layers(const uint16_t *src, const int32_t *index, const uint64_t *salts, int32_t layers, int32_t first,
                        uint64_t *sum, uint8_t *marks) {
    const cpa_hash_rows_args args = {.rows = 1,
                                     .src = src + 12 * first,
                                     .layers = layers,
                                     .layer_bytes = 24,
                                     .layer_marks = 2,
                                     .row_bytes = 12,
                                     .row_index = index,
                                     .salts = salts,
                                     .salt = 5 + (uint64_t)first,
                                     .sum = sum,
                                     .nonfinite = marks + 2 * first,
                                     .dtype = CPA_F16};
    CU_ASSERT_EQUAL(device->operators->hash_rows(&args, stream), CPA_OK);
}

static void layers_are_hashed_as_each_by_itself(void) {
    const uint16_t rows[3][2][6] = {{{1, 2, 3}}, {{4, 0x7c00, 6}}, {{7, 8, 9}}};
    const int32_t zero = 0;
    const uint64_t salt = 77, nothing[2] = {0, 0};
    const uint8_t unmarked[6] = {0};
    uint64_t sums[2];
    uint8_t got[2][6];
    cpa_test_device_open(1, &device, &stream);
    uint16_t *src = cpa_test_upload(stream, rows, sizeof rows);
    int32_t *index = cpa_test_upload(stream, &zero, sizeof zero);
    uint64_t *salts = cpa_test_upload(stream, &salt, sizeof salt), *sum = cpa_test_upload(stream, nothing, 16);
    uint8_t *marks[2] = {cpa_test_upload(stream, unmarked, 6), cpa_test_upload(stream, unmarked, 6)};
    hash_layers(src, index, salts, 3, 0, &sum[0], marks[0]);
    for (int32_t layer = 0; layer < 3; layer++) hash_layers(src, index, salts, 1, layer, &sum[1], marks[1]);
    cpa_test_download(stream, sums, sum, sizeof sums);
    CU_ASSERT_EQUAL(sums[0], sums[1]);
    for (int i = 0; i < 2; i++) {
        cpa_test_download(stream, got[i], marks[i], sizeof got[i]);
        for (int at = 0; at < 6; at++) CU_ASSERT_EQUAL(got[i][at], at == 2);
        cpa_test_free(stream, marks[i]);
    }
    cpa_test_free(stream, sum);
    cpa_test_free(stream, salts);
    cpa_test_free(stream, index);
    cpa_test_free(stream, src);
    cpa_test_device_close(device, stream);
}

static void tokens_that_were_drawn_take_their_places(void) {
    enum { MANY = 1000 };
    uint32_t known[MANY], ids[2 * MANY], got[MANY];
    int32_t sources[MANY], wrong = 0;
    cpa_test_device_open(1, &device, &stream);
    for (int i = 0; i < MANY; i++) known[i] = (uint32_t)i, sources[i] = i % 3 ? (i * 7 + 1) % MANY : -1;
    for (int i = 0; i < 2 * MANY; i++) ids[i] = 0xf0000000u + (uint32_t)i;
    const cpa_take_tokens_args args = {.rows = MANY,
                                       .sources = cpa_test_upload(stream, sources, sizeof sources),
                                       .ids = cpa_test_upload(stream, ids, sizeof ids),
                                       .id_stride = 2,
                                       .tokens = cpa_test_upload(stream, known, sizeof known)};
    CU_ASSERT_EQUAL(device->operators->take_tokens(&args, stream), CPA_OK);
    cpa_test_download(stream, got, args.tokens, sizeof got);
    for (int i = 0; i < MANY; i++) wrong += got[i] != (sources[i] < 0 ? known[i] : ids[2 * sources[i]]);
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_free(stream, (void *)(uintptr_t)args.sources);
    cpa_test_free(stream, (void *)(uintptr_t)args.ids);
    cpa_test_free(stream, args.tokens);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"rows do not depend on threads or grouping", rows_do_not_depend_on_threads_or_grouping},
    {"every input of the generator matters", every_input_of_the_generator_matters},
    {"scores are peaky at the sinks, near the query, and far", scores_are_peaky_at_the_sinks_near_the_query_and_far},
    {"hashes see every bit and place, but not the order of rows",
     hashes_see_every_bit_and_place_but_not_the_order_of_rows},
    {"layers are hashed as each by itself", layers_are_hashed_as_each_by_itself},
    {"tokens that were drawn take their places", tokens_that_were_drawn_take_their_places},
};
CPA_DEVICE_TEST_MAIN("synthesize", tests)
