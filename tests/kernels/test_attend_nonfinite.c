/* attend where scores, keys or values are not finite, against the float64 reference, which has the same rule: a score
 * of NaN or +inf makes a row NaN, whatever splits, pieces and calls its keys come in; -inf weighs nothing; what a row
 * does not see does not reach it. And where scores are large. On every path of attend that the device has. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/host/device/host.h"
#include "kernels/self_test.h"
#include "src/check/reference.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_attend_case base_case(int base) {
    cpa_attend_case shape = CPA_ATTEND_BASE[base];
    shape.length = 600;
    return shape;
}

/* Rows of 600 keys that fill tiles; and the last four of so many that a device splits them over its multiprocessors, or
 * of three splits of the host's. */
enum { N_PARTS = 2 };
static void take_part(cpa_attend_case *shape, int part) {
    shape->length = part == 0 ? 600 : cpa_test_promises_bits() ? 3000 : 9000;
    shape->start = part == 0 ? 0 : shape->length - 4;
}

/* What is put into a key or a query. */
typedef enum poison { NAN_KEY, INF_KEY, HUGE_KEY, NAN_QUERY, INF_QUERY, POISONS } poison;

static float element_of(poison kind) {
    return kind == NAN_KEY || kind == NAN_QUERY ? NAN : kind == HUGE_KEY ? 3e38f : INFINITY;
}

/* Puts an element into the key of a token, all heads. */
static void spoil_key(cpa_attend_fixture *f, int64_t token, float element) {
    for (int32_t head = 0; head < f->shape.kv_heads; head++)
        f->sequence.k[(token * f->shape.kv_heads + head) * f->shape.k_dim] = element;
}

static void spoil_value(cpa_attend_fixture *f, int64_t token, float element) {
    for (int32_t head = 0; head < f->shape.kv_heads; head++)
        f->sequence.v[(token * f->shape.kv_heads + head) * f->shape.v_dim + 3] = element;
}

/* Stores the token of the sequence, in one shard, again. */
static void store_token(cpa_attend_fixture *f, int64_t token) {
    const cpa_attend_case *shape = &f->shape;
    const int32_t slot = cpa_owner_rank(f->map, (cpa_placement){CPA_SHARDED, 0}, token);
    const int64_t local = cpa_shard_len(f->map, slot, token);
    const int64_t block = f->tables[f->table[slot] + local / shape->block_size];
    for (int32_t head = 0; head < shape->kv_heads; head++) {
        const int64_t row = token * shape->kv_heads + head;
        cpa_kv_fixture_store(&f->kv, block, local % shape->block_size, head, f->sequence.k + row * shape->k_dim,
                             f->sequence.v + row * shape->v_dim);
    }
}

/* The element `d` of the queries of a row, all heads; the same of every row where there is none. */
static void set_query(cpa_attend_fixture *f, int64_t row, int32_t d, float element) {
    const cpa_attend_case *shape = &f->shape;
    for (int64_t r = row < 0 ? 0 : row; r < (row < 0 ? f->rows : row + 1); r++) {
        for (int32_t head = 0; head < shape->q_heads; head++)
            cpa_narrow(
                (char *)f->q + ((r * shape->q_heads + head) * shape->k_dim + d) * cpa_dtype_bytes(shape->q_dtype),
                &element, shape->q_dtype, 1);
    }
}

static void upload(cpa_attend_fixture *f) {
    const int64_t bytes = f->rows * f->shape.q_heads * f->shape.k_dim * cpa_dtype_bytes(f->shape.q_dtype);
    cpa_test_free(f->stream, f->device_q);
    cpa_kv_view_free(&f->device_kv, f->stream);
    f->device_kv = cpa_kv_fixture_upload(&f->kv, f->stream);
    f->device_q = cpa_test_upload(f->stream, f->q, bytes);
}

/* Spoils tokens and rows by kind: the first key, two neighbours within, the last but one; or queries of every 7th row.
 * Queries have both signs in the first element, so that a spoilt key scores +inf for some rows and -inf for others. */
static void spoil(cpa_attend_fixture *f, poison kind) {
    const int64_t tokens[] = {1, f->shape.length / 2, f->shape.length / 2 + 1, f->shape.length - 2};
    for (int64_t row = 0; row < f->rows; row++) set_query(f, row, 0, row % 3 ? -2.0f : 2.0f);
    if (kind >= NAN_QUERY) {
        for (int64_t row = 0; row < f->rows; row += 7) set_query(f, row, 2, element_of(kind));
        return;
    }
    for (int i = 0; i < 4; i++) {
        spoil_key(f, tokens[i], element_of(kind));
        store_token(f, tokens[i]);
    }
}

/* Makes attend take the path `index`: on the host, an instruction set that this CPU has. NULL past the last. */
static const char *take_path(const cpa_attend_fixture *f, int32_t index) {
    if (!cpa_test_promises_bits()) return f->device->self_test->attend_path(f->device, index);
    for (int i = 0; cpa_attend_isas[i]; i++) {
        if (!cpa_attend_isas[i]->supported() || index-- > 0) continue;
        cpa_host_use_isa((cpa_host_device *)f->device, cpa_attend_isas[i]);
        return cpa_attend_isas[i]->name;
    }
    return NULL;
}

static int is_plain(const cpa_attend_fixture *f, const char *path) {
    return cpa_test_promises_bits() || f->shape.q_dtype == CPA_F32 || strstr(path, "simple") != NULL;
}

/* One fixture on every path of the device; `items` cuts the keys into so many resumed calls. Returns wrong rows. */
static int64_t wrong_rows(cpa_attend_fixture *f, int calls, int only_plain) {
    const char *path;
    int64_t wrong = 0;
    for (int32_t p = 0; (path = take_path(f, p)); p++) {
        cpa_attend_result result;
        if (only_plain && !is_plain(f, path)) continue;
        cpa_attend_result_init(&result, f);
        for (int i = 0; i < calls; i++) {
            const int64_t unit = 1024, tiles = (f->k_tokens[0] + unit - 1) / unit;
            const int64_t begin = i * tiles / calls * unit, end = (i + 1) * tiles / calls * unit;
            const cpa_attend_item item =
                cpa_attend_fixture_item(f, 0, 0, f->rows, 0, begin, end < f->k_tokens[0] ? end : f->k_tokens[0]);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(f, &item, 1, i > 0, &result), CPA_OK);
        }
        if (calls > 1) cpa_narrow(result.out, result.o, f->shape.q_dtype, result.o_bytes / (int64_t)sizeof *result.o);
        const int64_t failed = cpa_attend_fixture_check(f, 0, f->rows > 100 ? 7 : 1, &result, NULL);
        if (failed) printf("\n    %lld wrong on path %s, %d calls", (long long)failed, path, calls);
        wrong += failed;
        cpa_attend_result_destroy(&result);
    }
    (void)take_path(f, 0);
    return wrong;
}

static void scores_that_are_not_finite_make_their_rows_nan(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int part = 0; part < N_PARTS; part++) {
            for (int kind = 0; kind < POISONS; kind++) {
                cpa_attend_case shape = base_case(base);
                cpa_attend_fixture f;
                /* Codes are finite; fp16 holds no huge key. */
                if (cpa_dtype_is_quantised(shape.kv_dtype) && kind < NAN_QUERY) continue;
                if (shape.kv_dtype == CPA_F16 && kind == HUGE_KEY) continue;
                if (cpa_test_promises_bits() && (base + part + kind) % 2) continue; /* daily a half of them */
                take_part(&shape, part);
                cpa_attend_fixture_init(&f, &shape, 1);
                spoil(&f, (poison)kind);
                upload(&f);
                const int64_t wrong = wrong_rows(&f, 1, 0) + (part ? wrong_rows(&f, 3, 0) : 0);
                if (wrong) printf(" (base %d, part %d, poison %d)", base, part, kind);
                CU_ASSERT_EQUAL(wrong, 0);
                cpa_attend_fixture_destroy(&f);
            }
        }
    }
}

/* Over the keys of a shard; a NaN key in one of them makes no row of another NaN. */
static void only_the_shard_with_the_key_is_nan(void) {
    for (int base = 0; base < 2; base++) {
        cpa_attend_case shape = base_case(base);
        cpa_attend_fixture f;
        shape.cp_size = 3;
        cpa_attend_fixture_init(&f, &shape, 1);
        spoil_key(&f, 100, NAN);
        store_token(&f, 100);
        upload(&f);
        for (int32_t slot = 0; slot < shape.cp_size; slot++) {
            cpa_attend_result result;
            cpa_attend_result_init(&result, &f);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, slot, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, slot, 5, &result, NULL), 0);
            cpa_attend_result_destroy(&result);
        }
        cpa_attend_fixture_destroy(&f);
    }
}

/* A score of -inf weighs nothing, also where it is the only one, and whatever its value holds. */
static void minus_infinity_weighs_nothing(void) {
    for (int base = 0; base < 3; base++) {
        for (int part = 0; part < N_PARTS; part++) {
            cpa_attend_case shape = base_case(base);
            cpa_attend_fixture f;
            take_part(&shape, part);
            cpa_attend_fixture_init(&f, &shape, 1);
            set_query(&f, -1, 0, 1);
            for (int64_t token = 0; token < shape.length / 2; token++) {
                spoil_key(&f, token, -INFINITY);
                store_token(&f, token);
            }
            upload(&f);
            CU_ASSERT_EQUAL(wrong_rows(&f, 1, 0), 0);
            for (int64_t token = 0; token < shape.length / 2; token += 11) {
                spoil_value(&f, token, token % 2 ? NAN : INFINITY);
                store_token(&f, token);
            }
            upload(&f);
            CU_ASSERT_EQUAL(wrong_rows(&f, 1, 1), 0);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* NaN and infinity in values: the rows that see them have them, the others not a bit of them. */
static void values_that_a_row_does_not_see_do_not_reach_it(void) {
    static const int64_t counts[] = {1, 3, 64, 600};
    for (int base = 0; base < 3; base++) {
        for (int n = 0; n < 4; n++) {
            cpa_attend_case shape = base_case(base);
            cpa_attend_fixture f;
            shape.start = shape.length - counts[n];
            if (n == 1) shape.mask = (cpa_mask){.causal = 1, .sinks = 4, .window = 100};
            cpa_attend_fixture_init(&f, &shape, 1);
            const int64_t tokens[] = {40, 310, 311, shape.length - counts[n] / 2 - 1, shape.length - 1};
            for (int i = 0; i < 5; i++) {
                spoil_value(&f, tokens[i], i % 2 ? NAN : INFINITY);
                store_token(&f, tokens[i]);
            }
            upload(&f);
            CU_ASSERT_EQUAL(wrong_rows(&f, 1, 1), 0);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* On the host: the bits of a row are those that it has where what it does not see is finite. */
static void rows_that_do_not_see_a_poison_keep_their_bits(void) {
    if (!cpa_test_promises_bits()) return;
    for (int base = 0; base < 3; base++) {
        cpa_attend_case shape = base_case(base);
        cpa_attend_fixture f;
        cpa_attend_result clean, spoilt;
        const int64_t token = 333, heads = shape.q_heads, width = heads * shape.v_dim;
        const char *path;
        shape.mask = (cpa_mask){.causal = 1};
        cpa_attend_fixture_init(&f, &shape, 1);
        for (int32_t p = 0; (path = take_path(&f, p)); p++) {
            cpa_attend_result_init(&clean, &f);
            cpa_attend_result_init(&spoilt, &f);
            for (int i = 0; i < 2; i++) {
                const float key = f.sequence.k[0];
                spoil_key(&f, token, i ? NAN : key);
                spoil_value(&f, token, i ? INFINITY : key);
                store_token(&f, token);
                upload(&f);
                CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, i ? &spoilt : &clean), CPA_OK);
            }
            CU_ASSERT_EQUAL(memcmp(clean.o, spoilt.o, (size_t)(token * width) * sizeof(float)), 0);
            CU_ASSERT_EQUAL(memcmp(clean.lse, spoilt.lse, (size_t)(token * heads) * sizeof(float)), 0);
            cpa_attend_result_destroy(&spoilt);
            cpa_attend_result_destroy(&clean);
        }
        cpa_attend_fixture_destroy(&f);
    }
}

/* A call that resumes NaN leaves NaN, whether its rows see keys or none; O need not have been NaN. */
static void a_resumed_nan_stays_nan(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int keys = 0; keys < 2; keys++) {
            cpa_attend_case shape = base_case(base);
            cpa_attend_fixture f;
            cpa_attend_result result;
            shape.start = keys ? 0 : 590;
            cpa_attend_fixture_init(&f, &shape, 1);
            cpa_attend_result_init(&result, &f);
            memset(result.o, 0, (size_t)result.o_bytes);
            const cpa_attend_item item = cpa_attend_fixture_item(&f, 0, 0, f.rows, 0, 0, keys ? f.k_tokens[0] : 0);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, &item, 1, 1, &result), CPA_OK);
            int64_t numbers = 0;
            for (int64_t i = 0; i < result.o_bytes / (int64_t)sizeof *result.o; i++) numbers += !isnan(result.o[i]);
            for (int64_t i = 0; i < result.lse_bytes / (int64_t)sizeof *result.lse; i++)
                numbers += !isnan(result.lse[i]);
            CU_ASSERT_EQUAL(numbers, 0);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* All keys have `k` in their first element and all queries `q`, and 0 elsewhere; values are 1, or -1 from key `turn`
 * on. */
static void make_alike(cpa_attend_fixture *f, float q, float k, int64_t turn) {
    const cpa_attend_case *shape = &f->shape;
    for (int32_t d = 0; d < shape->k_dim; d++) set_query(f, -1, d, d == 0 ? q : 0);
    for (int64_t token = 0; token < shape->length; token++) {
        for (int64_t row = token * shape->kv_heads; row < (token + 1) * shape->kv_heads; row++) {
            for (int32_t d = 0; d < shape->k_dim; d++) f->sequence.k[row * shape->k_dim + d] = d == 0 ? k : 0;
            for (int32_t d = 0; d < shape->v_dim; d++) f->sequence.v[row * shape->v_dim + d] = token < turn ? 1 : -1;
        }
        store_token(f, token);
    }
    upload(f);
}

/* Whether a row is the mean of the values that it sees; an LSE keeps few digits of what is added to large scores.
 * Scores too low make it empty, and NaN those that are too large for tensor cores. */
static int is_even(const cpa_attend_fixture *f, const cpa_attend_result *r, int64_t row, double score, int64_t turn,
                   const char *path) {
    const cpa_attend_case *shape = &f->shape;
    const double exponent = score * M_LOG2E;
    const int is_empty = exponent < CPA_LOWEST_EXPONENT,
              is_nan = exponent >= CPA_HIGHEST_EXPONENT && !is_plain(f, path);
    const double part = cpa_dtype_is_quantised(shape->kv_dtype) ? 1e-3 : 2e-6; /* that scores and LSE are off by */
    double keys = 0, sum = 0;
    for (int64_t key = 0; key < shape->length; key++) {
        if (!cpa_reference_sees(shape->mask, shape->start + row, key)) continue;
        keys++, sum += key < turn ? 1 : -1;
    }
    int even = 1;
    for (int64_t i = row * shape->q_heads; i < (row + 1) * shape->q_heads; i++) {
        const double lse = (double)r->lse[i];
        even &= is_nan ? isnan(lse) : is_empty ? lse == -INFINITY : fabs(lse - score - log(keys)) <= part * fabs(score);
        for (int64_t d = i * shape->v_dim; d < (i + 1) * shape->v_dim; d++) {
            const double o = (double)r->o[d];
            even &= is_nan ? isnan(o) : is_empty ? o == 0 : fabs(o - sum / keys) <= 0.015;
        }
    }
    return even;
}

static int64_t uneven_rows(cpa_attend_fixture *f, double score, int64_t turn) {
    const int64_t stride = f->rows > 100 ? 37 : 1;
    const char *path;
    int64_t uneven = 0;
    for (int32_t p = 0; (path = take_path(f, p)); p++) {
        cpa_attend_result r;
        int64_t failed = 0;
        cpa_attend_result_init(&r, f);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(f, 0, &r), CPA_OK);
        for (int64_t row = 0; row < f->rows; row += stride) failed += !is_even(f, &r, row, score, turn, path);
        if (failed) printf("\n    %lld uneven on path %s, score %g", (long long)failed, path, score);
        uneven += failed;
        cpa_attend_result_destroy(&r);
    }
    (void)take_path(f, 0);
    return uneven;
}

/* Equal scores weigh the same, in whichever tile they come, however large they are. */
static void equal_scores_weigh_the_same(void) {
    enum { N_CLOSE = 4 };
    static const float elements[][2] = {
        {1000, 1000},   {1016, 1016},   {1048, 1048},       {1104, 1104},        /* where exponents round badly */
        {19968, 19968}, {-2048, 19968}, {0x1p50f, 0x1p50f}, {0x1p50f, -0x1p50f}, /* and far out */
    };
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int part = 0; part < N_PARTS; part++) {
            for (size_t i = 0; i < sizeof elements / sizeof *elements; i++) {
                const float q = elements[i][0], k = elements[i][1];
                cpa_attend_case shape = base_case(base);
                cpa_attend_fixture f;
                if (shape.kv_dtype == CPA_F16 && q > 65504) continue;
                if (cpa_test_promises_bits() && i > 0 && i < N_CLOSE) continue; /* one will do */
                shape.length = cpa_test_promises_bits() ? 700 : 9000;
                shape.start = shape.length - (part == 1 ? 4 : cpa_test_promises_bits() ? 100 : 600);
                shape.mask = (cpa_mask){.causal = 1};
                cpa_attend_fixture_init(&f, &shape, 1);
                /* Far out an LSE says nothing of how many keys there are, and pieces join with any weights. */
                const int64_t turn = i < N_CLOSE ? shape.length / 2 : shape.length;
                make_alike(&f, q, k, turn);
                CU_ASSERT_EQUAL(uneven_rows(&f, (double)q * (double)k / sqrt(shape.k_dim), turn), 0);
                cpa_attend_fixture_destroy(&f);
            }
        }
    }
}

static const cpa_test tests[] = {
    {"scores that are not finite make their rows NaN", scores_that_are_not_finite_make_their_rows_nan},
    {"only the shard with the key is NaN", only_the_shard_with_the_key_is_nan},
    {"minus infinity weighs nothing", minus_infinity_weighs_nothing},
    {"values that a row does not see do not reach it", values_that_a_row_does_not_see_do_not_reach_it},
    {"rows that do not see a poison keep their bits", rows_that_do_not_see_a_poison_keep_their_bits},
    {"a resumed NaN stays NaN", a_resumed_nan_stays_nan},
    {"equal scores weigh the same", equal_scores_weigh_the_same},
};

CPA_DEVICE_TEST_MAIN("attend nonfinite", tests)
