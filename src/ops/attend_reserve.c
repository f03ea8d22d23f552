/* Reserved attend plans: every argument is checked here that lies on the host. What lies on the device is checked where
 * it is read. */
#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_shape.h"

static cpa_status check_limits(const cpa_device *device, const cpa_attend_limits *limits, cpa_error *err) {
    CPA_TRY(cpa_check_attend("attend plan", device, &limits->shape, NULL, err));
    CPA_TRY(cpa_check_block_size("attend plan", limits->block_size, err));
    REQUIRE(err, limits->sequences >= 1 && limits->sequences <= INT32_MAX,
            "attend plan: reserved for %lld sequences, expected 1..%d", (long long)limits->sequences, INT32_MAX);
    REQUIRE(err, limits->tokens >= 1 && limits->tokens <= CPA_MOST_TOKENS,
            "attend plan: reserved for %lld tokens a sequence, expected 1 to 2^44", (long long)limits->tokens);
    REQUIRE(err, limits->rows >= 1 && limits->rows <= limits->tokens,
            "attend plan: reserved for %d rows a sequence, expected 1..%lld, its tokens", limits->rows,
            (long long)limits->tokens);
    REQUIRE(err, limits->num_blocks >= 1 && limits->num_blocks <= INT32_MAX,
            "attend plan: reserved for caches of %lld blocks, expected 1..%d", (long long)limits->num_blocks,
            INT32_MAX);
    const int64_t entries = (limits->tokens + limits->block_size - 1) / limits->block_size;
    REQUIRE(err, limits->sequences <= CPA_MOST_TOKENS / entries,
            "attend plan: reserved for %lld sequences of %lld table entries, expected at most 2^44 in all",
            (long long)limits->sequences, (long long)entries);
    return CPA_OK;
}

cpa_status cpa_attend_plan_reserve(cpa_attend_plan *plan, const cpa_attend_limits *given, cpa_error *err) {
    cpa_attend_limits limits;
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("attend plan", given, cpa_attend_limits, num_blocks, &limits, err));
    CPA_TRY(check_limits(plan->device, &limits, err));
    REQUIRE(err, plan->reservation.sequences == 0, "attend plan: the plan is reserved already");
    REQUIRE(err, !plan->is_set, "attend plan: the plan is set already, expected a new one");
    const cpa_attend_reservation reservation = {
        .shape = limits.shape,
        .block_size = limits.block_size,
        .rows = limits.rows,
        .sequences = limits.sequences,
        .tokens = limits.tokens,
        .table_stride = (limits.tokens + limits.block_size - 1) / limits.block_size,
        .num_blocks = limits.num_blocks,
        .map = {1, limits.block_size},
    };
    CPA_TRY(plan->device->operators->plan_reserve(plan, &reservation, err));
    plan->rows = limits.sequences * limits.rows;
    plan->max_block = limits.num_blocks - 1;
    plan->is_set = 1;
    return CPA_OK;
}

static cpa_status check_update(const cpa_attend_plan *plan, const cpa_attend_update_args *args,
                               const cpa_stream *stream, cpa_error *err) {
    const cpa_attend_reservation *r = &plan->reservation;
    REQUIRE(err, plan->device == stream->device, "attend plan: the plan and the stream belong to different devices");
    REQUIRE(err, r->sequences > 0, "attend plan: an update of a plan that is not reserved");
    REQUIRE(err, args->sequences >= 0 && args->sequences <= r->sequences,
            "attend plan: an update of %lld sequences, expected 0..%lld", (long long)args->sequences,
            (long long)r->sequences);
    REQUIRE(err, args->length_bytes == 0 || args->length_bytes == 4 || args->length_bytes == 8,
            "attend plan: length_bytes is %d, expected 4 or 8", args->length_bytes);
    REQUIRE(err, args->table_stride == 0 || args->table_stride >= r->table_stride,
            "attend plan: table_stride is %lld, expected at least the %lld entries that are reserved",
            (long long)args->table_stride, (long long)r->table_stride);
    REQUIRE(err, args->sequences == 0 || args->table_stride <= CPA_MOST_TOKENS / args->sequences,
            "attend plan: table_stride is %lld, expected at most 2^44 entries in all", (long long)args->table_stride);
    REQUIRE(err, args->sequences == 0 || (args->lengths && args->block_tables), "attend plan: %s is NULL",
            args->lengths ? "block_tables" : "lengths");
    CPA_TRY(cpa_check_aligned("attend plan", "lengths", args->lengths, args->length_bytes == 8 ? 8 : 4, err));
    return cpa_check_aligned("attend plan", "block_tables", args->block_tables, sizeof(int32_t), err);
}

cpa_status cpa_attend_plan_update(cpa_attend_plan *plan, const cpa_attend_update_args *given, cpa_stream *stream) {
    cpa_attend_update_args args;
    if (!stream) return CPA_INVALID;
    REQUIRE(&stream->error, plan, "attend plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("attend plan", given, cpa_attend_update_args, block_tables, &args, &stream->error));
    CPA_TRY(check_update(plan, &args, stream, &stream->error));
    const cpa_attend_update update = {
        .sequences = args.sequences,
        .lengths = args.lengths,
        .length_bytes = args.length_bytes ? args.length_bytes : 4,
        .block_tables = args.block_tables,
        .table_stride = args.table_stride ? args.table_stride : plan->reservation.table_stride,
    };
    cpa_status status = plan->device->operators->plan_update(plan, &update, stream);
    plan->is_set = status == CPA_OK;
    if (status == CPA_OK) plan->rows = args.sequences * plan->reservation.rows;
    return status;
}
