/* synthesize and hash_rows: reproducible whatever the threads and the grouping of rows, and peaky as promised. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/synthesize.h"
#include "kernels/kernels.h"
#include "tests/unit.h"

enum { ROWS = 400, HEADS = 4, KV_HEADS = 2, DIM = 64 };

static cpa_device *device;
static cpa_stream *stream;

static void open_device(int32_t threads) {
    cpa_device_options options = {.size = sizeof options, .threads = threads};
    CU_ASSERT_EQUAL(cpa_device_open(&options, &device, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_create(device, &stream, NULL), CPA_OK);
}

static void close_device(void) {
    cpa_stream_destroy(stream);
    cpa_device_close(device);
}

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

static void rows_do_not_depend_on_threads_or_grouping(void) {
    static float one[ROWS * HEADS * DIM], three[ROWS * HEADS * DIM], alone[ROWS * DIM];
    for (int t = CPA_SYNTH_Q; t <= CPA_SYNTH_V; t++) {
        cpa_synth_args args = args_of((cpa_synth_tensor)t, one);
        open_device(1);
        CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
        close_device();
        open_device(3);
        args.out = three;
        args.rows = 150;
        CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
        args.out = three + 150 * args.heads * DIM;
        args.rows = ROWS - 150;
        args.tokens += 150;
        args.positions += 150;
        CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
        close_device();
        CU_ASSERT(memcmp(one, three, (size_t)(ROWS * args.heads * DIM) * sizeof *one) == 0);
        args = args_of((cpa_synth_tensor)t, alone);
        cpa_synthesize_head(&args, 1);
        for (int i = 0; i < ROWS; i++) {
            CU_ASSERT(memcmp(alone + i * DIM, one + (i * args.heads + 1) * DIM, DIM * sizeof *one) == 0);
        }
    }
}

static void every_input_of_the_generator_matters(void) {
    static float base[ROWS * HEADS * DIM], other[ROWS * HEADS * DIM];
    open_device(1);
    cpa_synth_args args = args_of(CPA_SYNTH_Q, base);
    CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
    for (int change = 0; change < 4; change++) {
        args = args_of(CPA_SYNTH_Q, other);
        if (change == 0) args.seed++;
        if (change == 1) args.layer++;
        if (change == 2) tokens[7]++;
        if (change == 3) positions[7]++;
        CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
        for (int h = 0; h < HEADS; h++) {
            CU_ASSERT(memcmp(base + (7 * HEADS + h) * DIM, other + (7 * HEADS + h) * DIM, DIM * sizeof *base) != 0);
        }
    }
    close_device();
}

/* The softmax of the last query: how much weight its 8 heaviest keys have, and whether they lie at the sinks, near and far. */
static void scores_are_peaky_at_the_sinks_near_the_query_and_far(void) {
    static float q[ROWS * HEADS * DIM], k[ROWS * KV_HEADS * DIM];
    open_device(1);
    cpa_synth_args args = args_of(CPA_SYNTH_Q, q);
    CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
    args = args_of(CPA_SYNTH_K, k);
    CU_ASSERT_EQUAL(device->kernels->synthesize(&args, stream), CPA_OK);
    close_device();
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
    CU_ASSERT(sink / sums[0] > rest / sums[2] + 3);
    CU_ASSERT(near / sums[1] > rest / sums[2] + 3);
    CU_ASSERT(far_peaks > queries / 20);
    CU_ASSERT(peak < 60);
}

static void hashes_see_every_bit_and_place_but_not_the_order_of_rows(void) {
    uint16_t rows[3][6] = {{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6}, {9, 8, 7, 6, 5, 4}};
    int32_t index[3] = {0, 1, 2}, reversed[3] = {2, 1, 0};
    uint64_t salts[3] = {10, 20, 30}, salts_reversed[3] = {30, 20, 10}, sum = 0, again = 0, other = 0;
    open_device(1);
    cpa_hash_rows_args args = {
        .rows = 3, .src = rows, .row_bytes = 12, .row_index = index, .salts = salts, .sum = &sum};
    CU_ASSERT_EQUAL(device->kernels->hash_rows(&args, stream), CPA_OK);
    args.row_index = reversed;
    args.salts = salts_reversed;
    args.sum = &again;
    CU_ASSERT_EQUAL(device->kernels->hash_rows(&args, stream), CPA_OK);
    CU_ASSERT_EQUAL(sum, again);
    args.salts = salts;
    args.sum = &other;
    CU_ASSERT_EQUAL(device->kernels->hash_rows(&args, stream), CPA_OK);
    CU_ASSERT_NOT_EQUAL(sum, other);
    for (int bit = 0; bit < 16; bit++) {
        rows[2][4] ^= (uint16_t)(1 << bit);
        args.row_index = index;
        other = 0;
        CU_ASSERT_EQUAL(device->kernels->hash_rows(&args, stream), CPA_OK);
        CU_ASSERT_NOT_EQUAL(sum, other);
        rows[2][4] ^= (uint16_t)(1 << bit);
    }
    close_device();
}

static const cpa_test tests[] = {
    {"rows do not depend on threads or grouping", rows_do_not_depend_on_threads_or_grouping},
    {"every input of the generator matters", every_input_of_the_generator_matters},
    {"scores are peaky at the sinks, near the query, and far", scores_are_peaky_at_the_sinks_near_the_query_and_far},
    {"hashes see every bit and place, but not the order of rows",
     hashes_see_every_bit_and_place_but_not_the_order_of_rows},
};
CPA_TEST_MAIN("synthesize", tests)
