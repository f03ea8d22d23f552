/* topk and topk_merge: every argument is checked here and strides are filled in, then the table of the back end runs. */
#include <cpattn/topk.h>

#include "base/struct_size.h"
#include "kernels/nn.h"
#include "kernels/topk.h"
#include "src/ops/nn_check.h"

/* Entries that are forced, which have room in k. */
static cpa_status check_forced(const char *where, int32_t k, int32_t first, int32_t last, cpa_error *err) {
    CPA_TRY(cpa_nn_check_count(where, "k", k, 1, CPA_MOST_TOPK, err));
    REQUIRE(err, first >= 0 && last >= 0 && first <= k && last <= k - first,
            "%s: forced_first is %d and forced_last %d, expected none negative and together at most k, %d", where,
            first, last, k);
    return CPA_OK;
}

static cpa_status check_places(const cpa_topk_args *a, cpa_error *err) {
    const char *where = "topk";
    REQUIRE(err, !a->shards || !a->tables, "%s: shards and tables are both set, expected one of them or none", where);
    REQUIRE(err, !a->tails || (!a->scores && !a->tables), "%s: tails and %s are both set, expected one of them", where,
            a->scores ? "scores" : "tables");
    REQUIRE(err, !a->table_rows || a->tables, "%s: table_rows is set, but tables is NULL", where);
    REQUIRE(err, !a->lengths || a->shards, "%s: lengths is set, but shards is NULL", where);
    REQUIRE(err, !a->shards || a->lengths || a->forced_last == 0,
            "%s: forced_last is %d in shards, but lengths is NULL, expected those of the sequences", where,
            a->forced_last);
    CPA_TRY(cpa_check_aligned(where, "tables", a->tables, sizeof *a->tables, err));
    CPA_TRY(cpa_check_rows(where, "table_stride", a->rows, a->table_stride, 0, sizeof *a->tables, err));
    if (a->shards) CPA_TRY(cpa_check_map(where, a->map, err));
    return a->tables ? cpa_check_block_size(where, a->block_size, err) : CPA_OK;
}

static cpa_status check_topk(cpa_topk_args *a, cpa_error *err) {
    const char *where = "topk";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_TOPK_MOST_COLUMNS, err));
    CPA_TRY(check_forced(where, a->k, a->forced_first, a->forced_last, err));
    const cpa_nn_tensor tensors[] = {
        {"logits", "logits_stride", a->logits, &a->logits_stride, a->rows, a->width, 4, 0},
        {"first", NULL, a->first, NULL, a->rows, 1, 4, 1},
        {"end", NULL, a->end, NULL, a->rows, 1, 4, 1},
        {"indices", "indices_stride", a->indices, &a->indices_stride, a->rows, cpa_topk_list_width(a->k, a->tails), 4,
         0},
        {"counts", NULL, a->counts, NULL, a->rows, 1, 4, 1},
        {"scores", "scores_stride", a->scores, &a->scores_stride, a->rows, a->k, 4, 1},
        {"shards", NULL, a->shards, NULL, a->rows, 1, 4, 1},
        {"lengths", NULL, a->lengths, NULL, a->rows, 1, 4, 1},
        {"table_rows", NULL, a->table_rows, NULL, a->rows, 1, 4, 1},
        {"out_rows", NULL, a->out_rows, NULL, a->rows, 1, 4, 1},
        {"tails", NULL, a->tails, NULL, a->rows, 1, 4, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return check_places(a, err);
}

cpa_status cpa_topk(const cpa_topk_args *given, cpa_stream *stream) {
    cpa_topk_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("topk", given, cpa_topk_args, indices, &args, &stream->error));
    CPA_TRY(check_topk(&args, &stream->error));
    return args.rows ? stream->device->nn->topk(&args, stream) : CPA_OK;
}

static cpa_status check_merge(cpa_topk_merge_args *a, cpa_error *err) {
    const char *where = "topk_merge";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "n", a->n, 1, CPA_MERGE_MAX_STATES, err));
    CPA_TRY(cpa_nn_check_count(where, "width", a->width, 1, CPA_MOST_TOPK, err));
    CPA_TRY(check_forced(where, a->k, a->forced_first, a->forced_last, err));
    REQUIRE(err, a->lengths || a->forced_last == 0 || a->rows == 0,
            "%s: forced_last is %d, but lengths is NULL, expected those of the sequences", where, a->forced_last);
    const cpa_nn_tensor tensors[] = {
        {"scores", "row_stride", a->scores, &a->row_stride, a->rows, a->width, 4, 0},
        {"indices", "row_stride", a->indices, &a->row_stride, a->rows, a->width, 4, 0},
        {"out", "out_stride", a->out, &a->out_stride, a->rows, cpa_topk_list_width(a->k, a->tails), 4, 0},
        {"tails", NULL, a->tails, NULL, a->rows, 1, 4, 1},
        {"counts", NULL, a->counts, NULL, a->rows, 1, 4, 1},
        {"lengths", NULL, a->lengths, NULL, a->rows, 1, 4, 1},
        {"out_rows", NULL, a->out_rows, NULL, a->rows, 1, 4, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    if (a->list_stride == 0) a->list_stride = a->rows * a->row_stride;
    return cpa_check_rows(where, "list_stride", a->n, a->list_stride, 0, 4, err);
}

cpa_status cpa_topk_merge(const cpa_topk_merge_args *given, cpa_stream *stream) {
    cpa_topk_merge_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("topk_merge", given, cpa_topk_merge_args, out, &args, &stream->error));
    CPA_TRY(check_merge(&args, &stream->error));
    return args.rows ? stream->device->nn->topk_merge(&args, stream) : CPA_OK;
}
