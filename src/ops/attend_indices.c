/* The attend plan from the arrays of FlashInfer and SGLang: sequences become the items of a batch. */
#include <stdlib.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/ops/check_args.h"

static cpa_status check_sequence(const cpa_attend_indices *a, int64_t s, cpa_error *err) {
    const long long i = s;
    const int32_t last = a->last_page_len ? a->last_page_len[s] : a->block_size;
    REQUIRE(err, a->kv_indptr[s] >= 0 && a->kv_indptr[s] <= a->kv_indptr[s + 1],
            "attend plan: kv_indptr[%lld] is %d and the next %d, expected none negative and no descent", i,
            a->kv_indptr[s], a->kv_indptr[s + 1]);
    REQUIRE(err, !a->qo_indptr || (a->qo_indptr[s] >= 0 && a->qo_indptr[s] <= a->qo_indptr[s + 1]),
            "attend plan: qo_indptr[%lld] is %d and the next %d, expected none negative and no descent", i,
            a->qo_indptr[s], a->qo_indptr[s + 1]);
    REQUIRE(err, a->kv_indptr[s] == a->kv_indptr[s + 1] || (last >= 1 && last <= a->block_size),
            "attend plan: last_page_len[%lld] is %d, expected 1..%d", i, last, a->block_size);
    REQUIRE(
        err,
        !a->k_first || (a->k_first[s] >= 0 && a->k_first[s] <= CPA_MOST_TOKENS && a->k_first[s] % a->block_size == 0),
        "attend plan: k_first[%lld] is %lld, expected a multiple of block_size, %d, of 0 to 2^44", i,
        (long long)a->k_first[s], a->block_size);
    return CPA_OK;
}

/* A sequence's last tokens over all of its tokens that there are. */
static cpa_status item_of_sequence(const cpa_attend_indices *a, int64_t s, cpa_attend_item *out, cpa_error *err) {
    CPA_TRY(check_sequence(a, s, err));
    const int64_t pages = (int64_t)a->kv_indptr[s + 1] - a->kv_indptr[s];
    const int64_t last = a->last_page_len && pages > 0 ? a->last_page_len[s] : a->block_size;
    const int64_t length = pages > 0 ? (pages - 1) * a->block_size + last : 0;
    const int64_t rows = a->qo_indptr ? (int64_t)a->qo_indptr[s + 1] - a->qo_indptr[s] : 1;
    REQUIRE(err, rows <= length || length == 0,
            "attend plan: sequence %lld has %lld rows and %lld tokens, expected at least as many tokens", (long long)s,
            (long long)rows, (long long)length);
    const int64_t k_first = a->k_first ? a->k_first[s] : 0;
    const cpa_token_set all = {CPA_TOKENS_ALL, 0};
    *out = (cpa_attend_item){.q_row = a->qo_indptr ? a->qo_indptr[s] : s,
                             .q_count = rows,
                             .q_first = k_first + (length > 0 ? length - rows : 0),
                             .k_first = k_first,
                             .k_count = length,
                             .table = a->kv_indptr[s],
                             .q_set = all,
                             .k_set = all};
    return CPA_OK;
}

cpa_status cpa_attend_plan_set_indices(cpa_attend_plan *plan, const cpa_attend_indices *given, cpa_error *err) {
    cpa_attend_indices a;
    cpa_status status = CPA_OK;
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("attend plan", given, cpa_attend_indices, kv_indices, &a, err));
    CPA_TRY(cpa_check_block_size("attend plan", a.block_size, err));
    REQUIRE(err, a.sequences >= 0 && a.sequences <= INT32_MAX, "attend plan: %lld sequences, expected 0..%d",
            (long long)a.sequences, INT32_MAX);
    REQUIRE(err, a.sequences == 0 || a.kv_indptr, "attend plan: kv_indptr is NULL");
    CPA_TRY(cpa_check_aligned("attend plan", "qo_indptr", a.qo_indptr, sizeof(int32_t), err));
    CPA_TRY(cpa_check_aligned("attend plan", "kv_indptr", a.kv_indptr, sizeof(int32_t), err));
    CPA_TRY(cpa_check_aligned("attend plan", "last_page_len", a.last_page_len, sizeof(int32_t), err));
    CPA_TRY(cpa_check_aligned("attend plan", "k_first", a.k_first, sizeof(int64_t), err));
    cpa_attend_item *items = calloc((size_t)a.sequences + 1, sizeof *items);
    if (!items)
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld sequences", (long long)a.sequences);
    for (int64_t s = 0; s < a.sequences; s++) CPA_TRY_GOTO(item_of_sequence(&a, s, &items[s], err), done);
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, a.block_size},
                                    .shape = a.shape,
                                    .block_size = a.block_size,
                                    .items = items,
                                    .n_items = a.sequences,
                                    .block_tables = a.kv_indices,
                                    .n_table_entries = a.sequences > 0 ? a.kv_indptr[a.sequences] : 0,
                                    .block_tables_on_device = a.indices_on_device,
                                    .num_blocks = a.num_blocks};
    status = cpa_attend_plan_set(plan, &batch, err);
done:
    free(items);
    return status;
}
