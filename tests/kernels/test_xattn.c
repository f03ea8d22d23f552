/* XAttention's estimate (cpattn/xattn.h) beside float64 over tokens: groups, scores, statistics and sums, the mask of
 * any chunks of queries and keys and of shards, and the memory that is asked for. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/unit.h"
#include "tests/fixtures/xattn_fixture.h"

static cpa_device *device;
static cpa_stream *stream;

static int whole_grid;

static cpa_xattn_case case_of(int32_t stride, int32_t block, int32_t q_heads, int32_t kv_heads, int32_t dim,
                              cpa_dtype dtype, int64_t tokens) {
    return (cpa_xattn_case){.shape = {.stride = stride,
                                      .block = block,
                                      .q_heads = q_heads,
                                      .kv_heads = kv_heads,
                                      .dim = dim,
                                      .dtype = dtype,
                                      .causal = 1},
                            .tokens = tokens,
                            .kv_dtype = dtype,
                            .block_size = 16};
}

/* Ragged ends within a group and within a block, one group, and less than a block. */
static const cpa_xattn_case CASES[] = {
    {{8, 128, 4, 2, 64, CPA_BF16, 1, 0, {0}}, 1003, CPA_BF16, 16, 0, {0, 0}},
    {{16, 128, 2, 1, 128, CPA_BF16, 1, 0, {0}}, 2055, CPA_BF16, 64, 1, {0, 0}},
    {{4, 128, 3, 3, 32, CPA_F16, 1, 0, {0}}, 1151, CPA_F16, 32, 0, {0, 0}},
    {{8, 0, 2, 2, 72, CPA_BF16, 0, 0, {0}}, 700, CPA_BF16, 8, 0, {0, 0}},
    {{8, 64, 6, 2, 128, CPA_BF16, 1, 0.02f, {0}}, 3000, CPA_FP8_E4M3, 16, 0, {0, 0}},
    {{4, 64, 2, 1, 40, CPA_F32, 1, 0, {0}}, 515, CPA_F32, 1, 0, {0, 0}},
    {{16, 128, 2, 2, 256, CPA_F16, 1, 0, {0}}, 900, CPA_INT8, 16, 0, {0, 0}},
    {{12, 96, 2, 1, 64, CPA_BF16, 1, 0, {0}}, 777, CPA_BF16, 16, 0, {0, 0}},
    {{8, 128, 1, 1, 64, CPA_BF16, 1, 0, {0}}, 5, CPA_BF16, 16, 0, {0, 0}},
    {{1, 32, 2, 1, 64, CPA_F32, 1, 0, {0}}, 130, CPA_F32, 16, 0, {0, 0}},
    {{8, 128, 4, 2, 128, CPA_BF16, 1, 0, {0}}, 1003, CPA_TQ_4BIT, 16, 0, {0, 0}},
    {{4, 128, 2, 1, 64, CPA_F16, 1, 0, {0}}, 707, CPA_TQ_3BIT, 32, 1, {0, 0}},
    {{8, 64, 2, 2, 256, CPA_BF16, 1, 0, {0}}, 500, CPA_TQ_K3V4, 16, 0, {0, 0}},
    {{16, 128, 2, 2, 32, CPA_BF16, 1, 0, {0}}, 515, CPA_TQ_K8V4, 16, 0, {0, 0}},
};
enum { N_CASES = sizeof CASES / sizeof *CASES };

/* Of n numbers, those that are off by more than `bound` (1 + their size). */
static int64_t count_off(const float *got, const double *wanted, int64_t n, double bound) {
    int64_t off = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - wanted[i]);
        const int right = wanted[i] == -INFINITY ? got[i] == -INFINITY : d <= bound * (1 + fabs(wanted[i]));
        if (!right && off < 3) printf("  %lld: %g, expected %g\n", (long long)i, (double)got[i], wanted[i]);
        off += !right;
    }
    return off;
}

static int64_t count_wrong_rows(const cpa_xattn_fixture *f, const cpa_xattn_run *run, const cpa_xattn_result *r) {
    const cpa_xattn_shape *shape = &f->what.shape;
    int64_t wrong = 0;
    for (int64_t row = 0; row < shape->q_heads * f->blocks; row++) {
        const double *sums = f->sums + row * f->blocks;
        double kept = 0, total = 0;
        int32_t count = 0;
        for (int64_t j = 0; j < f->blocks; j++) {
            const int has = r->bits[row * r->words + j / 32] >> j % 32 & 1;
            count += has, total += sums[j], kept += has ? sums[j] : 0;
        }
        const int right = cpa_test_is_selection(sums, f->blocks, row % f->blocks, shape->causal, (double)run->tau,
                                                run->recent, 1e-5, r->bits + row * r->words);
        const int counted = r->counts[row] == count && fabs((double)r->kept[row] - kept / total) < 1e-5;
        if ((!right || !counted) && wrong < 3)
            printf("  block row %lld: bits %s, %d blocks of %d, %g kept of %g\n", (long long)row,
                   right ? "right" : "wrong", r->counts[row], count, (double)r->kept[row], kept / total);
        wrong += !right || !counted;
    }
    return wrong;
}

/* All that a run makes, beside float64. Tensor cores keep fewer bits of long sums. A key that was rotated back may be
 * rounded to the other side of what the reference has. */
static void check_run(const cpa_xattn_fixture *f, const cpa_xattn_run *run) {
    const int64_t heads = f->what.shape.q_heads, groups = heads * f->groups;
    const double exact = cpa_test_promises_bits() ? 1e-5 : 3e-5;
    const double bound = cpa_dtype_is_turboquant(f->what.kv_dtype) ? 2e-4 : exact;
    cpa_xattn_result r;
    cpa_xattn_fixture_run(f, run, stream, &r);
    if (run->with_scores) CU_ASSERT_EQUAL(count_off(r.scores, f->z, groups * f->groups, bound), 0);
    CU_ASSERT_EQUAL(count_off(r.max, f->max, groups, bound), 0);
    CU_ASSERT_EQUAL(count_off(r.sum, f->sum, groups, 10 * bound), 0);
    CU_ASSERT_EQUAL(count_off(r.sums, f->sums, heads * f->blocks * f->blocks, bound), 0);
    CU_ASSERT_EQUAL(count_wrong_rows(f, run, &r), 0);
    cpa_xattn_result_free(&r);
}

static void estimates_are_those_of_float64(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_CASES; i++) {
        cpa_xattn_fixture f;
        cpa_xattn_fixture_init(&f, &CASES[i], 1);
        check_run(&f, &(cpa_xattn_run){.with_scores = 1, .tau = 0.9f});
        check_run(&f, &(cpa_xattn_run){.q_chunk = 4 * (CASES[i].shape.block ? CASES[i].shape.block : 128),
                                       .k_chunk = 2 * (CASES[i].shape.block ? CASES[i].shape.block : 128),
                                       .with_scores = 1,
                                       .apart = 1,
                                       .tau = 0.6f,
                                       .recent = CASES[i].shape.causal ? 2 : 0});
        cpa_xattn_fixture_destroy(&f);
    }
    cpa_test_device_close(device, stream);
}

/* The lengths and chunks that chunked XAttention is known by. */
static void any_chunks_give_one_mask(void) {
    static const int64_t lengths[] = {3688, 7888, 15685, 32485, 64891};
    static const int64_t chunks[][2] = {{1024, 1024}, {512, 1024}, {1024, 512}, {512, 512}, {256, 1024}};
    const int n = whole_grid || !cpa_test_promises_bits() ? 5 : 3;
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < n; i++) {
        const cpa_xattn_case what = case_of(4, 128, 1, 1, 16, CPA_BF16, lengths[i]);
        const int64_t unit = i == n - 1 ? 16 : 4; /* up to (16K, 16K) */
        cpa_xattn_fixture f;
        cpa_xattn_result one;
        cpa_xattn_fixture_init(&f, &what, 0);
        cpa_xattn_fixture_run(&f, &(cpa_xattn_run){.tau = 0.9f}, stream, &one);
        CU_ASSERT_EQUAL(count_wrong_rows(&f, &(cpa_xattn_run){.tau = 0.9f}, &one), 0);
        for (int c = 0; c < 5; c++) {
            const cpa_xattn_run run = {.q_chunk = chunks[c][0] * unit, .k_chunk = chunks[c][1] * unit, .tau = 0.9f};
            cpa_xattn_result other;
            cpa_xattn_fixture_run(&f, &run, stream, &other);
            CU_ASSERT_EQUAL(memcmp(one.bits, other.bits, (size_t)(f.blocks * one.words) * sizeof *one.bits), 0);
            double most = 0;
            for (int64_t j = 0; j < f.blocks * f.blocks; j++)
                most = fmax(most, fabs((double)(one.sums[j] - other.sums[j])));
            CPA_ASSERT_ORDER(most, <=, cpa_test_promises_bits() ? 0 : 1e-5);
            cpa_xattn_result_free(&other);
        }
        cpa_xattn_result_free(&one);
        cpa_xattn_fixture_destroy(&f);
    }
    cpa_test_device_close(device, stream);
}

static void shards_make_the_mask_of_float64(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int32_t n = 2; n <= 4; n++)
        for (int32_t runs = 1; runs <= 2; runs++) {
            cpa_xattn_case what = case_of(8, 128, 4, 2, 64, CPA_BF16, 3001);
            cpa_xattn_fixture f;
            what.map = (cpa_owner_map){n, 128 * runs};
            cpa_xattn_fixture_init(&f, &what, 1);
            check_run(&f, &(cpa_xattn_run){.q_chunk = 1024, .k_chunk = 512, .with_scores = 1, .tau = 0.9f});
            check_run(&f, &(cpa_xattn_run){.apart = 1, .tau = 0.8f});
            cpa_xattn_fixture_destroy(&f);
        }
    cpa_test_device_close(device, stream);
}

/* A row that is no number is not hidden. */
static void rows_of_nan_keep_all(void) {
    cpa_test_device_open(2, &device, &stream);
    cpa_xattn_case what = case_of(8, 128, 2, 1, 64, CPA_BF16, 1024);
    cpa_xattn_fixture f;
    cpa_xattn_result r;
    cpa_xattn_fixture_init(&f, &what, 0);
    f.q[(600 * 2 + 1) * 64 + 5] = NAN; /* of head 1, block 4 */
    cpa_xattn_fixture_run(&f, &(cpa_xattn_run){.tau = 0.5f}, stream, &r);
    CU_ASSERT_EQUAL(r.bits[8 + 4], 0x1fu);
    CU_ASSERT_EQUAL(r.counts[8 + 4], 5);
    for (int row = 0; row < 16; row++)
        if (row != 8 + 4) CU_ASSERT(cpa_test_is_selection(f.sums + row * 8, 8, row % 8, 1, 0.5, 0, 1e-5, r.bits + row));
    cpa_xattn_result_free(&r);
    cpa_xattn_fixture_destroy(&f);
    cpa_test_device_close(device, stream);
}

/* 64K tokens of 32 heads in groups of 4: 32 GiB of scores, of which 8 MiB of statistics are left, and 128K by chunks of
 * 16K keys an eighth of what is stored whole. */
static void memory_is_that_of_statistics(void) {
    const cpa_xattn_shape shape = {
        .stride = 4, .q_heads = 32, .kv_heads = 8, .dim = 128, .dtype = CPA_BF16, .causal = 1};
    const int64_t k = 1024, gib = k * k * k;
    CU_ASSERT_EQUAL(cpa_xattn_scores_bytes(&shape, 64 * k, 64 * k), 32 * gib);
    CU_ASSERT_EQUAL(cpa_xattn_stats_bytes(&shape, 64 * k), 4 * k * k);
    CU_ASSERT_EQUAL(cpa_xattn_scores_bytes(&shape, 128 * k, 16 * k) * 8,
                    cpa_xattn_scores_bytes(&shape, 128 * k, 128 * k));
    CU_ASSERT_EQUAL(cpa_xattn_sums_bytes(&shape, 64 * k, 64 * k), 32 * k * k);
    CU_ASSERT_EQUAL(cpa_xattn_packed_bytes(&shape, 8, 16 * k), 8 * 16 * k * 128 * 2);
    CU_ASSERT_EQUAL(cpa_xattn_groups(&shape, 5), 2);
    CU_ASSERT_EQUAL(cpa_xattn_blocks(&shape, 129), 2);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"estimates are those of float64", estimates_are_those_of_float64},
        {"any chunks of queries and keys give one mask", any_chunks_give_one_mask},
        {"shards make the mask of float64", shards_make_the_mask_of_float64},
        {"rows of NaN keep all", rows_of_nan_keep_all},
        {"memory is that of statistics", memory_is_that_of_statistics},
    };
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    whole_grid = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "xattn", tests, (int)(sizeof tests / sizeof *tests));
}
