/* Reserved attend plans: every argument is checked here that lies on the host. What lies on the device is checked where
 * it is read. */
#include "src/ops/attend_reserve.h"

#include "base/struct_size.h"
#include "kernels/attend_update.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_shape.h"

cpa_status cpa_check_reservation(const char *where, cpa_attend_reservation *r, cpa_error *err) {
    REQUIRE(err, r->sequences >= 1 && r->sequences <= INT32_MAX, "%s: reserved for %lld sequences, expected 1..%d",
            where, (long long)r->sequences, INT32_MAX);
    REQUIRE(err, r->tokens >= 1 && r->tokens <= CPA_MOST_TOKENS,
            "%s: reserved for %lld tokens a sequence, expected 1 to 2^44", where, (long long)r->tokens);
    REQUIRE(err, r->rows >= 1 && r->rows <= r->tokens,
            "%s: reserved for %d rows a sequence, expected 1..%lld, its tokens", where, r->rows, (long long)r->tokens);
    REQUIRE(err, r->total_rows >= 0 && r->total_rows <= CPA_MOST_TOKENS,
            "%s: reserved for %lld rows in all, expected 0 to 2^44", where, (long long)r->total_rows);
    if (r->total_rows == 0 || r->total_rows > r->sequences * r->rows) r->total_rows = r->sequences * r->rows;
    REQUIRE(err, r->num_blocks >= 1 && r->num_blocks <= INT32_MAX,
            "%s: reserved for caches of %lld blocks, expected 1..%d", where, (long long)r->num_blocks, INT32_MAX);
    const int64_t keys = cpa_shard_len(r->map, 0, r->tokens); /* no shard has more */
    r->table_stride = (keys + r->block_size - 1) / r->block_size;
    REQUIRE(err, r->sequences <= CPA_MOST_TOKENS / r->table_stride,
            "%s: reserved for %lld sequences of %lld table entries, expected at most 2^44 in all", where,
            (long long)r->sequences, (long long)r->table_stride);
    return CPA_OK;
}

cpa_status cpa_attend_plan_reserve(cpa_attend_plan *plan, const cpa_attend_limits *given, cpa_error *err) {
    cpa_attend_limits limits;
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("attend plan", given, cpa_attend_limits, num_blocks, &limits, err));
    CPA_TRY(cpa_check_attend("attend plan", plan->device, &limits.shape, NULL, err));
    CPA_TRY(cpa_check_block_size("attend plan", limits.block_size, err));
    cpa_attend_reservation reservation = {
        .shape = limits.shape,
        .block_size = limits.block_size,
        .rows = limits.rows,
        .sequences = limits.sequences,
        .tokens = limits.tokens,
        .num_blocks = limits.num_blocks,
        .total_rows = limits.total_rows,
        .map = {1, limits.block_size},
    };
    CPA_TRY(cpa_check_reservation("attend plan", &reservation, err));
    REQUIRE(err, plan->reservation.sequences == 0, "attend plan: the plan is reserved already");
    REQUIRE(err, !plan->is_set, "attend plan: the plan is set already, expected a new one");
    CPA_TRY(plan->device->operators->plan_reserve(plan, &reservation, err));
    plan->rows = reservation.total_rows;
    plan->max_block = limits.num_blocks - 1;
    plan->is_set = 1;
    return CPA_OK;
}

/* The arrays of pages one behind the other. */
static cpa_status check_indptr(const char *where, const cpa_attend_update_args *args, cpa_error *err) {
    REQUIRE(err, !args->kv_indptr || (!args->lengths && args->table_stride == 0),
            "%s: kv_indptr and %s are both set, expected one", where, args->lengths ? "lengths" : "table_stride");
    REQUIRE(err, args->kv_indptr || (!args->last_page_len && args->n_indices == 0), "%s: %s is set without kv_indptr",
            where, args->last_page_len ? "last_page_len" : "n_indices");
    REQUIRE(err, args->n_indices >= 0 && args->n_indices <= CPA_MOST_TOKENS,
            "%s: n_indices is %lld, expected 0 to 2^44", where, (long long)args->n_indices);
    CPA_TRY(cpa_check_aligned(where, "qo_indptr", args->qo_indptr, sizeof(int32_t), err));
    CPA_TRY(cpa_check_aligned(where, "kv_indptr", args->kv_indptr, sizeof(int32_t), err));
    return cpa_check_aligned(where, "last_page_len", args->last_page_len, sizeof(int32_t), err);
}

cpa_status cpa_take_attend_update(const char *where, const cpa_attend_reservation *r,
                                  const cpa_attend_update_args *given, cpa_attend_update *out, cpa_error *err) {
    cpa_attend_update_args args;
    CPA_TRY(CPA_STRUCT_TAKE(where, given, cpa_attend_update_args, block_tables, &args, err));
    REQUIRE(err, r->sequences > 0, "%s: an update of what is not reserved", where);
    REQUIRE(err, args.sequences >= 0 && args.sequences <= r->sequences,
            "%s: an update of %lld sequences, expected 0..%lld", where, (long long)args.sequences,
            (long long)r->sequences);
    REQUIRE(err, args.qo_indptr || args.sequences * r->rows <= r->total_rows,
            "%s: an update of %lld sequences of %d rows each, expected at most %lld rows in all, or qo_indptr", where,
            (long long)args.sequences, r->rows, (long long)r->total_rows);
    REQUIRE(err, args.length_bytes == 0 || args.length_bytes == 4 || args.length_bytes == 8,
            "%s: length_bytes is %d, expected 4 or 8", where, args.length_bytes);
    REQUIRE(err, args.table_stride == 0 || args.table_stride >= r->table_stride,
            "%s: table_stride is %lld, expected at least the %lld entries that are reserved", where,
            (long long)args.table_stride, (long long)r->table_stride);
    REQUIRE(err, args.sequences == 0 || args.table_stride <= CPA_MOST_TOKENS / args.sequences,
            "%s: table_stride is %lld, expected at most 2^44 entries in all", where, (long long)args.table_stride);
    CPA_TRY(check_indptr(where, &args, err));
    REQUIRE(err, args.sequences == 0 || ((args.lengths || args.kv_indptr) && args.block_tables), "%s: %s is NULL",
            where, args.lengths || args.kv_indptr ? "block_tables" : "lengths");
    CPA_TRY(cpa_check_aligned(where, "lengths", args.lengths, args.length_bytes == 8 ? 8 : 4, err));
    CPA_TRY(cpa_check_aligned(where, "block_tables", args.block_tables, sizeof(int32_t), err));
    CPA_TRY(cpa_check_aligned(where, "first_ranks", args.first_ranks, sizeof(int32_t), err));
    *out = (cpa_attend_update){
        .sequences = args.sequences,
        .lengths = args.lengths,
        .length_bytes = args.length_bytes ? args.length_bytes : 4,
        .block_tables = args.block_tables,
        .table_stride = args.table_stride ? args.table_stride : r->table_stride,
        .first_ranks = args.first_ranks,
        .kv_indptr = args.kv_indptr,
        .last_page_len = args.last_page_len,
        .n_indices = args.n_indices,
        .qo_indptr = args.qo_indptr,
    };
    return CPA_OK;
}

cpa_status cpa_tell_refused(const char *where, const cpa_attend_plan *plan, cpa_error *err) {
    const cpa_attend_reservation *r = &plan->reservation;
    REQUIRE(err, plan->refusal, "%s: it is not reserved, and has no updates", where);
    const cpa_attend_refusal refusal = *plan->refusal;
    const long long s = (long long)refusal.sequence;
    switch (s < 0 ? 0 : refusal.why) {
        case CPA_REFUSED_LENGTH:
            return cpa_fail(
                err, CPA_INVALID,
                "%s: the update refused sequence %lld: its length is negative, below its rows or above %lld", where, s,
                (long long)r->tokens);
        case CPA_REFUSED_ROWS:
            return cpa_fail(
                err, CPA_INVALID,
                "%s: the update refused sequence %lld: it has more than %d rows, or all have more than %lld", where, s,
                r->rows, (long long)r->total_rows);
        case CPA_REFUSED_RANK:
            return cpa_fail(err, CPA_INVALID, "%s: the update refused sequence %lld: its first rank is none of 0..%d",
                            where, s, r->map.cp_size - 1);
        case CPA_REFUSED_TABLE:
            return cpa_fail(err, CPA_INVALID,
                            "%s: the update refused sequence %lld: an entry of its table is no block of 0..%lld", where,
                            s, (long long)r->num_blocks - 1);
        default: return CPA_OK;
    }
}

cpa_status cpa_attend_plan_refused(const cpa_attend_plan *plan, cpa_error *err) {
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    return cpa_tell_refused("attend plan", plan, err);
}

cpa_status cpa_attend_plan_update(cpa_attend_plan *plan, const cpa_attend_update_args *args, cpa_stream *stream) {
    cpa_attend_update update;
    if (!stream) return CPA_INVALID;
    cpa_error *err = &stream->error;
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    REQUIRE(err, plan->device == stream->device, "attend plan: the plan and the stream belong to different devices");
    CPA_TRY(cpa_take_attend_update("attend plan", &plan->reservation, args, &update, err));
    REQUIRE(err, !update.first_ranks, "attend plan: first_ranks are those of context attention, expected NULL");
    cpa_status status = plan->device->operators->plan_update(plan, &update, stream);
    plan->is_set = status == CPA_OK;
    if (status == CPA_OK) plan->rows = cpa_attend_most_rows(&plan->reservation, &update);
    return status;
}
