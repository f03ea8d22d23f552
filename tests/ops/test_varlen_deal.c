/* Segments dealt to ranks: the longest first, each to the rank with least to do; cut where that ends sooner. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/varlen.h>

#include "tests/fixtures/unit.h"

enum { MOST = 64 };

static int64_t starts[MOST + 1];

static cpa_varlen_batch batch_of(const int64_t *lengths, int64_t n) {
    for (int64_t i = 0; i < n; i++) starts[i + 1] = starts[i] + lengths[i];
    return (cpa_varlen_batch){.size = sizeof(cpa_varlen_batch),
                              .q_heads = 16,
                              .kv_heads = 16,
                              .k_dim = 64,
                              .v_dim = 64,
                              .n_segments = n,
                              .q_starts = starts};
}

static cpa_varlen_deal_args over(int32_t ranks, double flops, double bandwidth) {
    return (cpa_varlen_deal_args){.size = sizeof(cpa_varlen_deal_args),
                                  .ranks = ranks,
                                  .dtype = CPA_BF16,
                                  .flops = flops,
                                  .bandwidth = bandwidth};
}

static void longest_first(void) {
    const int64_t lengths[] = {10, 90, 20, 80, 0, 70, 30}; /* pairs: 100, 8100, 400, 6400, 0, 4900, 900 */
    const int32_t want[] = {2, 0, 2, 1, 2, 2, 2};
    const cpa_varlen_batch batch = batch_of(lengths, 7);
    const cpa_varlen_deal_args args = over(3, 0, 0);
    int32_t owners[7], again[7];
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(owners, want, sizeof want), 0);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, again, NULL), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(owners, again, sizeof owners), 0);
}

/* Images of one size go round, in their order. */
static void equal_segments(void) {
    int64_t lengths[MOST];
    int32_t owners[MOST];
    for (int i = 0; i < MOST; i++) lengths[i] = 577;
    const cpa_varlen_batch batch = batch_of(lengths, MOST);
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
        const cpa_varlen_deal_args args = over(ranks, 5e14, 3e11);
        CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_OK);
        for (int i = 0; i < MOST && MOST % ranks == 0; i++) CU_ASSERT_EQUAL(owners[i], i % ranks);
    }
}

static void cut_where_that_ends_sooner(void) {
    const int64_t lengths[] = {16384, 577, 577, 577, 577};
    const cpa_varlen_batch batch = batch_of(lengths, 5);
    int32_t owners[5];
    cpa_varlen_deal_args args = over(4, 5e14, 3e11);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_OK);
    CU_ASSERT_EQUAL(owners[0], CPA_VARLEN_CUT);
    for (int i = 1; i < 5; i++) CU_ASSERT_EQUAL(owners[i], i - 1);
    args.bandwidth = 1e9; /* 50 ms for what takes 2 ms */
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_OK);
    CU_ASSERT_EQUAL(owners[0], 0);
    for (int i = 1; i < 5; i++) CPA_ASSERT_ORDER(owners[i], >, 0);
    args = over(1, 5e14, 3e11);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_OK);
    for (int i = 0; i < 5; i++) CU_ASSERT_EQUAL(owners[i], 0);
}

/* Parts of all ranks make up each segment. */
static void parts(void) {
    const int64_t lengths[] = {10, 3, 0, 129};
    const int32_t owners[] = {CPA_VARLEN_CUT, 2, CPA_VARLEN_CUT, 0};
    const cpa_varlen_batch batch = batch_of(lengths, 4);
    for (int64_t s = 0; s < 4; s++) {
        int64_t rows = 0, keys = 0;
        for (int32_t rank = 0; rank < 4; rank++) {
            const cpa_varlen_part part = cpa_varlen_part_of(&batch, owners[s], s, 4, rank);
            if (part.q_count > 0) CU_ASSERT_EQUAL(part.q_first, rows);
            rows += part.q_count, keys += part.k_count;
        }
        CU_ASSERT_EQUAL(rows, lengths[s]);
        CU_ASSERT_EQUAL(keys, lengths[s]);
    }
}

static void refused(void) {
    const int64_t lengths[] = {10, 3};
    const cpa_varlen_batch batch = batch_of(lengths, 2);
    cpa_varlen_batch wrong = batch;
    cpa_error err = {0};
    int32_t owners[2];
    cpa_varlen_deal_args args = over(0, 0, 0);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "varlen deal: ranks is 0, expected 1..16384");
    args = over(2, NAN, 1);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_INVALID);
    args = over(2, -1, 1);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_INVALID);
    args = over(2, 1, 1);
    args.dtype = (cpa_dtype)9;
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, owners, NULL), CPA_INVALID);
    args = over(2, 1, 1);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, &args, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_varlen_deal(NULL, &args, owners, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_varlen_deal(&batch, NULL, owners, NULL), CPA_INVALID);
    wrong.k_dim = 0;
    CU_ASSERT_EQUAL(cpa_varlen_deal(&wrong, &args, owners, NULL), CPA_INVALID);
    wrong = batch;
    wrong.n_segments = 0;
    CU_ASSERT_EQUAL(cpa_varlen_deal(&wrong, &args, NULL, NULL), CPA_OK);
}

static const cpa_test tests[] = {{"longest first", longest_first},
                                 {"equal segments", equal_segments},
                                 {"cut where that ends sooner", cut_where_that_ends_sooner},
                                 {"parts", parts},
                                 {"refused", refused}};
CPA_TEST_MAIN("varlen deal", tests)
