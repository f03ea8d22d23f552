/* merge: against float64, bit for bit against merging one by one, and the empty, NaN and infinite states. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "src/check/reference.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROWS = 37, HEADS = 3, WIDTH = 20, STATES = 5, O_STRIDE = HEADS * WIDTH + HEADS + 1, OUT_STRIDE = HEADS * WIDTH };

/* STATES partial states whose rows hold O and LSE side by side; some are empty with NaN in their O. The host keeps what
 * the device has. */
typedef struct fixture {
    cpa_device *device;
    cpa_stream *stream;
    float *memory[STATES], *device_memory[STATES];
    cpa_partial states[STATES], device_states[STATES];
} fixture;

static float uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 33) / 0x1p30 - 1);
}

static cpa_partial state_of(float *memory) {
    return (cpa_partial){
        .o = memory, .o_row_stride = O_STRIDE, .lse = memory + HEADS * WIDTH, .lse_row_stride = O_STRIDE};
}

enum { STATE_BYTES = ROWS * O_STRIDE * sizeof(float) };

static void fixture_init(fixture *f) {
    uint64_t random = 11;
    cpa_test_device_open(2, &f->device, &f->stream);
    for (int s = 0; s < STATES; s++) {
        float *m = f->memory[s] = cpa_test_poisoned(ROWS * O_STRIDE, sizeof(float));
        f->states[s] = state_of(m);
        for (int r = 0; r < ROWS; r++) {
            for (int h = 0; h < HEADS; h++) {
                int empty = (r + s) % 4 == 0 || r == 5;
                f->states[s].lse[r * O_STRIDE + h] = empty ? -INFINITY : 40 * uniform(&random);
                for (int d = 0; !empty && d < WIDTH; d++) m[r * O_STRIDE + h * WIDTH + d] = uniform(&random);
            }
        }
        f->device_memory[s] = cpa_test_upload(f->stream, m, STATE_BYTES);
        f->device_states[s] = state_of(f->device_memory[s]);
    }
}

static void fixture_destroy(fixture *f) {
    for (int s = 0; s < STATES; s++) {
        cpa_test_free(f->stream, f->device_memory[s]);
        free(f->memory[s]);
    }
    cpa_test_device_close(f->device, f->stream);
}

/* Merges with out and out_lse (which may be NULL) in host memory, both contiguous. */
static void merge(const fixture *f, cpa_merge_args args) {
    int64_t out_bytes = args.rows * HEADS * WIDTH * cpa_dtype_bytes(args.out_dtype);
    int64_t lse_bytes = args.rows * HEADS * (int64_t)sizeof(float);
    void *out = args.out;
    float *lse = args.out_lse;
    args.out = cpa_test_upload(f->stream, out, out_bytes);
    if (lse) args.out_lse = cpa_test_upload(f->stream, lse, lse_bytes);
    CU_ASSERT_EQUAL(cpa_merge(&args, f->stream), CPA_OK);
    cpa_test_download(f->stream, out, args.out, out_bytes);
    if (lse) cpa_test_download(f->stream, lse, args.out_lse, lse_bytes);
    cpa_test_free(f->stream, args.out_lse);
    cpa_test_free(f->stream, args.out);
}

static cpa_merge_args merge_args(const cpa_partial *states, int32_t n, cpa_dtype dtype, void *out, float *out_lse) {
    return (cpa_merge_args){.size = sizeof(cpa_merge_args),
                            .rows = ROWS,
                            .heads = HEADS,
                            .v_dim = WIDTH,
                            .states = states,
                            .n_states = n,
                            .out_dtype = dtype,
                            .out = out,
                            .out_lse = out_lse};
}

/* m = max lse, w = exp(lse - m), O = sum w O / sum w, in float64. */
static void reference(const fixture *f, int row, int head, double *o, double *lse) {
    double max = -INFINITY, sum = 0;
    for (int d = 0; d < WIDTH; d++) o[d] = 0;
    for (int s = 0; s < STATES; s++) max = fmax(max, (double)f->states[s].lse[row * O_STRIDE + head]);
    for (int s = 0; s < STATES; s++) {
        double part = (double)f->states[s].lse[row * O_STRIDE + head];
        if (part == -INFINITY) continue;
        double weight = exp(part - max);
        sum += weight;
        for (int d = 0; d < WIDTH; d++) o[d] += weight * (double)f->memory[s][row * O_STRIDE + head * WIDTH + d];
    }
    for (int d = 0; d < WIDTH; d++) o[d] = sum > 0 ? o[d] / sum : 0;
    *lse = sum > 0 ? max + log(sum) : -INFINITY;
}

static void merged_states_equal_the_formula_in_every_dtype(void) {
    fixture f;
    fixture_init(&f);
    for (int dtype = CPA_F32; dtype < CPA_DTYPE_COUNT; dtype++) {
        void *out = cpa_test_poisoned(ROWS * OUT_STRIDE, 4);
        float *lse = cpa_test_poisoned(ROWS * HEADS, 4), got[WIDTH];
        merge(&f, merge_args(f.device_states, STATES, (cpa_dtype)dtype, out, lse));
        for (int r = 0; r < ROWS; r++) {
            for (int h = 0; h < HEADS; h++) {
                double want[WIDTH], want_lse;
                reference(&f, r, h, want, &want_lse);
                cpa_reference_widen((char *)out + (r * OUT_STRIDE + h * WIDTH) * cpa_dtype_bytes((cpa_dtype)dtype),
                                    (cpa_dtype)dtype, WIDTH, got);
                double tolerance = dtype == CPA_F32 ? 2e-6 : dtype == CPA_BF16 ? 5e-3 : 6e-4;
                CPA_ASSERT_ORDER(cpa_reference_error(got, want, WIDTH), <=, tolerance);
                double have = (double)lse[r * HEADS + h];
                CU_ASSERT(want_lse == -INFINITY ? have == -INFINITY : fabs(have - want_lse) < 1e-5);
            }
        }
        free(lse);
        free(out);
    }
    fixture_destroy(&f);
}

static void merging_all_at_once_gives_the_bits_of_one_by_one(void) {
    fixture f;
    fixture_init(&f);
    float *at_once = cpa_test_poisoned(ROWS * OUT_STRIDE, 4), *lse_at_once = cpa_test_poisoned(ROWS * HEADS, 4);
    merge(&f, merge_args(f.device_states, STATES, CPA_F32, at_once, lse_at_once));
    for (int s = 1; s < STATES; s++) {
        /* In place: states[0] is the running sum. */
        cpa_partial pair[2] = {f.device_states[0], f.device_states[s]};
        cpa_merge_args step = merge_args(pair, 2, CPA_F32, f.device_states[0].o, f.device_states[0].lse);
        step.out_row_stride = step.out_lse_row_stride = O_STRIDE;
        CU_ASSERT_EQUAL(cpa_merge(&step, f.stream), CPA_OK);
    }
    cpa_test_download(f.stream, f.memory[0], f.device_memory[0], STATE_BYTES);
    for (int r = 0; r < ROWS; r++) {
        CU_ASSERT_EQUAL(memcmp(at_once + r * OUT_STRIDE, f.states[0].o + r * O_STRIDE, OUT_STRIDE * 4), 0);
        CU_ASSERT_EQUAL(memcmp(lse_at_once + r * HEADS, f.states[0].lse + r * O_STRIDE, HEADS * 4), 0);
    }
    free(lse_at_once);
    free(at_once);
    fixture_destroy(&f);
}

static void an_empty_state_changes_no_bit_and_all_empty_is_zero(void) {
    fixture f;
    fixture_init(&f);
    float *out = cpa_test_poisoned(ROWS * OUT_STRIDE, 4);
    /* NaN is empty only as the LSE of someone else's state. */
    static const float empties[] = {-INFINITY, INFINITY, INFINITY, NAN};
    for (int kind = 0; kind < 4; kind++) {
        /* The O of the empty state is NaN everywhere. */
        float *nan = cpa_test_poisoned(ROWS * O_STRIDE, 4);
        for (int i = 0; i < ROWS * HEADS; i++) nan[i / HEADS * O_STRIDE + HEADS * WIDTH + i % HEADS] = empties[kind];
        float *device_nan = cpa_test_upload(f.stream, nan, STATE_BYTES);
        cpa_partial pair[2] = {f.device_states[1], state_of(device_nan)};
        cpa_merge_args args = merge_args(pair, 2, CPA_F32, out, NULL);
        args.foreign_lse = kind >= 2;
        merge(&f, args);
        for (int r = 0; r < ROWS; r++) {
            for (int h = 0; h < HEADS; h++) {
                const float *have = out + r * OUT_STRIDE + h * WIDTH, zeros[WIDTH] = {0};
                const float *want = f.states[1].o + r * O_STRIDE + h * WIDTH;
                if (f.states[1].lse[r * O_STRIDE + h] == -INFINITY) want = zeros;
                CU_ASSERT_EQUAL(memcmp(have, want, sizeof zeros), 0);
            }
        }
        cpa_test_free(f.stream, device_nan);
        free(nan);
    }
    free(out);
    fixture_destroy(&f);
}

/* In any place, alone or beside empty states, of few rows and of many, which a device merges by different kernels. */
static void a_nan_lse_makes_its_row_and_head_nan(void) {
    enum { MOST = 9000 };
    static const int32_t counts[] = {ROWS, MOST};
    fixture f;
    fixture_init(&f);
    int32_t *map = malloc(MOST * sizeof *map);
    for (int r = 0; r < MOST; r++) map[r] = r % ROWS;
    int32_t *device_map = cpa_test_upload(f.stream, map, MOST * sizeof *map);
    const int32_t *maps[STATES] = {device_map, device_map, device_map, device_map, device_map};
    float *want = cpa_test_poisoned(MOST * OUT_STRIDE, 4), *want_lse = cpa_test_poisoned(MOST * HEADS, 4);
    float *out = cpa_test_poisoned(MOST * OUT_STRIDE, 4), *lse = cpa_test_poisoned(MOST * HEADS, 4);
    for (int place = 0; place < STATES; place++) {
        for (int n = 0; n < 2; n++) {
            cpa_merge_args args = merge_args(f.device_states, STATES, CPA_F32, want, want_lse);
            args.rows = counts[n];
            args.row_maps = maps;
            merge(&f, args);
            float *spoilt = malloc(STATE_BYTES);
            memcpy(spoilt, f.memory[place], STATE_BYTES);
            for (int r = 0; r < ROWS; r += 5) spoilt[r * O_STRIDE + HEADS * WIDTH + 1] = NAN;
            float *device_spoilt = cpa_test_upload(f.stream, spoilt, STATE_BYTES);
            cpa_partial states[STATES];
            memcpy(states, f.device_states, sizeof states);
            states[place] = state_of(device_spoilt);
            args.states = states;
            args.out = out;
            args.out_lse = lse;
            merge(&f, args);
            int64_t wrong = 0;
            for (int i = 0; i < counts[n] * HEADS; i++) {
                const float *have = out + i * WIDTH;
                if (map[i / HEADS] % 5 || i % HEADS != 1) {
                    wrong += memcmp(have, want + i * WIDTH, WIDTH * sizeof *have) != 0;
                    wrong += memcmp(lse + i, want_lse + i, sizeof *lse) != 0;
                    continue;
                }
                for (int d = 0; d < WIDTH; d++) wrong += !isnan(have[d]);
                wrong += !isnan(lse[i]);
            }
            CU_ASSERT_EQUAL(wrong, 0);
            cpa_test_free(f.stream, device_spoilt);
            free(spoilt);
        }
    }
    free(lse);
    free(out);
    free(want_lse);
    free(want);
    cpa_test_free(f.stream, device_map);
    free(map);
    fixture_destroy(&f);
}

static void row_maps_pick_rows_and_minus_one_is_empty(void) {
    fixture f;
    fixture_init(&f);
    int32_t map[ROWS];
    for (int r = 0; r < ROWS; r++) map[r] = r % 3 == 0 ? -1 : ROWS - 1 - r;
    int32_t *device_map = cpa_test_upload(f.stream, map, sizeof map);
    const int32_t *maps[2] = {NULL, device_map};
    float *out = cpa_test_poisoned(ROWS * OUT_STRIDE, 4), *want = cpa_test_poisoned(OUT_STRIDE, 4);
    cpa_merge_args args = merge_args(f.device_states, 2, CPA_F32, out, NULL);
    args.row_maps = maps;
    merge(&f, args);
    for (int r = 0; r < ROWS; r++) {
        cpa_partial pair[2] = {f.device_states[0], f.device_states[1]};
        pair[0].o += r * O_STRIDE;
        pair[0].lse += r * O_STRIDE;
        if (map[r] >= 0) {
            pair[1].o += map[r] * O_STRIDE;
            pair[1].lse += map[r] * O_STRIDE;
        }
        cpa_merge_args one = merge_args(pair, map[r] >= 0 ? 2 : 1, CPA_F32, want, NULL);
        one.rows = 1;
        merge(&f, one);
        CU_ASSERT_EQUAL(memcmp(out + r * OUT_STRIDE, want, OUT_STRIDE * 4), 0);
    }
    cpa_test_free(f.stream, device_map);
    free(want);
    free(out);
    fixture_destroy(&f);
}

/* A device deals the rows to its threads by how many there are. */
static void the_number_of_rows_changes_no_bit(void) {
    fixture f;
    fixture_init(&f);
    enum { MOST = 9000 };
    static const int32_t counts[] = {1, 1500, 3100, MOST};
    int32_t *map = malloc(MOST * sizeof *map);
    for (int r = 0; r < MOST; r++) map[r] = r % ROWS;
    int32_t *device_map = cpa_test_upload(f.stream, map, MOST * sizeof *map);
    const int32_t *maps[STATES] = {device_map, device_map, device_map, device_map, device_map};
    float *want = cpa_test_poisoned(ROWS * OUT_STRIDE, 4), *want_lse = cpa_test_poisoned(ROWS * HEADS, 4);
    for (int32_t n = 2; n <= STATES; n += STATES - 2) {
        merge(&f, merge_args(f.device_states, n, CPA_F32, want, want_lse));
        for (int i = 0; i < 4; i++) {
            float *out = cpa_test_poisoned(MOST * OUT_STRIDE, 4), *lse = cpa_test_poisoned(MOST * HEADS, 4);
            cpa_merge_args args = merge_args(f.device_states, n, CPA_F32, out, lse);
            int64_t wrong = 0;
            args.rows = counts[i];
            args.row_maps = maps;
            merge(&f, args);
            for (int r = 0; r < counts[i]; r++) {
                wrong += memcmp(out + r * OUT_STRIDE, want + map[r] * OUT_STRIDE, OUT_STRIDE * 4) != 0;
                wrong += memcmp(lse + r * HEADS, want_lse + map[r] * HEADS, HEADS * 4) != 0;
            }
            CU_ASSERT_EQUAL(wrong, 0);
            free(lse);
            free(out);
        }
    }
    free(want_lse);
    free(want);
    cpa_test_free(f.stream, device_map);
    free(map);
    fixture_destroy(&f);
}

/* Also more than fit the memory that a kernel has without asking. */
static void so_many_states_as_are_allowed_give_the_bits_of_one_by_one(void) {
    fixture f;
    fixture_init(&f);
    static const int32_t counts[] = {23, 24, CPA_MERGE_MAX_STATES};
    float *at_once = cpa_test_poisoned(ROWS * OUT_STRIDE, 4), *lse = cpa_test_poisoned(ROWS * HEADS, 4);
    float *sum = cpa_test_poisoned(ROWS * O_STRIDE, 4);
    for (int i = 0; i < 3; i++) {
        cpa_partial states[CPA_MERGE_MAX_STATES];
        float *device_sum = cpa_test_upload(f.stream, f.memory[0], STATE_BYTES);
        for (int s = 0; s < counts[i]; s++) states[s] = f.device_states[s % STATES];
        merge(&f, merge_args(states, counts[i], CPA_F32, at_once, lse));
        for (int s = 1; s < counts[i]; s++) {
            const cpa_partial pair[2] = {state_of(device_sum), states[s]};
            cpa_merge_args step = merge_args(pair, 2, CPA_F32, pair[0].o, pair[0].lse);
            step.out_row_stride = step.out_lse_row_stride = O_STRIDE;
            CU_ASSERT_EQUAL(cpa_merge(&step, f.stream), CPA_OK);
        }
        cpa_test_download(f.stream, sum, device_sum, STATE_BYTES);
        for (int r = 0; r < ROWS; r++) {
            CU_ASSERT_EQUAL(memcmp(at_once + r * OUT_STRIDE, sum + r * O_STRIDE, OUT_STRIDE * 4), 0);
            CU_ASSERT_EQUAL(memcmp(lse + r * HEADS, sum + r * O_STRIDE + HEADS * WIDTH, HEADS * 4), 0);
        }
        cpa_test_free(f.stream, device_sum);
    }
    free(sum);
    free(lse);
    free(at_once);
    fixture_destroy(&f);
}

static void wrong_arguments_are_named(void) {
    fixture f;
    fixture_init(&f);
    float out[1];
    cpa_merge_args args = merge_args(f.device_states, 0, CPA_F32, out, NULL);
    CU_ASSERT_EQUAL(cpa_merge(&args, f.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(f.stream), "n_states is 0, expected 1..64"));
    args = merge_args(f.device_states, 1, CPA_F32, NULL, NULL);
    CU_ASSERT_EQUAL(cpa_merge(&args, f.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(f.stream), "out is NULL"));
    args = merge_args(f.device_states, 1, CPA_F32, out, NULL);
    args.foreign_lse = 2;
    CU_ASSERT_EQUAL(cpa_merge(&args, f.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(f.stream), "foreign_lse is 2, expected 0 or 1"));
    fixture_destroy(&f);
}

static const cpa_test tests[] = {
    {"merged states equal the formula in every dtype", merged_states_equal_the_formula_in_every_dtype},
    {"merging all at once gives the bits of one by one", merging_all_at_once_gives_the_bits_of_one_by_one},
    {"an empty state changes no bit, and all empty is zero", an_empty_state_changes_no_bit_and_all_empty_is_zero},
    {"a NaN LSE makes its row and head NaN", a_nan_lse_makes_its_row_and_head_nan},
    {"row maps pick rows, and -1 is empty", row_maps_pick_rows_and_minus_one_is_empty},
    {"the number of rows changes no bit", the_number_of_rows_changes_no_bit},
    {"so many states as are allowed give the bits of one by one",
     so_many_states_as_are_allowed_give_the_bits_of_one_by_one},
    {"wrong arguments are named", wrong_arguments_are_named},
};
CPA_DEVICE_TEST_MAIN("merge", tests)
