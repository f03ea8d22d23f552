/* What ranks exchange whose products are sliced: columns that each has computed are gathered, and sums that each has
 * computed a part of are added up. All of it goes from each rank to each other at once, as in decode rows are few. */
#include "src/context/tensor_slices.h"

#include "base/check.h"
#include "src/context/context_internal.h"

/* Starts and ends an exchange: the own part, of `bytes` bytes, to every other rank, and from rank r recv_bytes[r] to
 * received[r]. */
static cpa_status share(cpa_context *c, const void *part, int64_t bytes, void *const *received,
                        const int64_t *recv_bytes, cpa_stream *stream) {
    cpa_context_ops *ops = &c->ops;
    int32_t n = 0;
    for (int32_t peer = 0; peer < ops->map.cp_size; peer++) {
        if (peer == ops->rank) continue;
        ops->messages[n++] = (cpa_message){peer, part, bytes, received[peer], recv_bytes[peer]};
    }
    return cpa_context_exchange_between(c, n, CPA_SPAN_EXCHANGE_SLICES, stream);
}

/* Whose message the stream has. */
static cpa_status outcome(cpa_context *c, cpa_status status, cpa_stream *stream) {
    return status == CPA_OK ? CPA_OK : cpa_fail(&stream->error, status, "slices: %s", c->ops.error.message);
}

/* One row needs no putting together: its parts come to their places. */
static cpa_status gather_columns(cpa_context *c, const cpa_slice_gather *args, cpa_stream *stream) {
    cpa_context_ops *ops = &c->ops;
    const int32_t size = ops->map.cp_size;
    const int64_t element = cpa_dtype_bytes(args->dtype);
    int64_t begins[CPA_MERGE_MAX_STATES + 1], bytes[CPA_MERGE_MAX_STATES], taken = 0;
    const void *parts[CPA_MERGE_MAX_STATES];
    void *received[CPA_MERGE_MAX_STATES];
    CPA_TRY(cpa_context_check_whole(c));
    for (int32_t r = 0; r <= size; r++)
        begins[r] = cpa_slice_begin(args->width / args->unit, size, r) * args->unit * element;
    CPA_TRY(cpa_context_ensure(ops, &c->slices_memory, args->rows > 1 ? args->rows * begins[size] : 1));
    for (int32_t r = 0; r < size; r++) {
        bytes[r] = args->rows * (begins[r + 1] - begins[r]);
        received[r] = args->rows > 1 ? (char *)c->slices_memory.memory + taken : (char *)args->out + begins[r];
        parts[r] = r == ops->rank ? args->part : received[r];
        taken += bytes[r];
    }
    CPA_TRY(share(c, args->part, bytes[ops->rank], received, bytes, stream));
    if (args->rows > 1) {
        const cpa_join_columns_args join = {args->rows, size, parts, begins, args->out};
        return cpa_context_check(ops, ops->device->operators->join_columns(&join, stream), stream);
    }
    if (received[ops->rank] == args->part) return CPA_OK;
    return cpa_context_check(ops, ops->device->table->copy(received[ops->rank], args->part, bytes[ops->rank], stream),
                             stream);
}

static cpa_status sum_parts(cpa_context *c, const cpa_slice_sum *args, cpa_stream *stream) {
    cpa_context_ops *ops = &c->ops;
    const int32_t size = ops->map.cp_size;
    const int64_t part_bytes = args->rows * args->width * (int64_t)sizeof(float);
    int64_t bytes[CPA_MERGE_MAX_STATES];
    const float *parts[CPA_MERGE_MAX_STATES];
    void *received[CPA_MERGE_MAX_STATES];
    CPA_TRY(cpa_context_check_whole(c));
    CPA_TRY(cpa_context_ensure(ops, &c->slices_memory, size * part_bytes));
    for (int32_t r = 0; r < size; r++) {
        bytes[r] = part_bytes;
        received[r] = (char *)c->slices_memory.memory + r * part_bytes;
        parts[r] = r == ops->rank ? args->part : received[r];
    }
    CPA_TRY(share(c, args->part, part_bytes, received, bytes, stream));
    const cpa_sum_parts_args sum = {args->rows, args->width, size, parts, args->bias, args->dtype, args->out};
    return cpa_context_check(ops, ops->device->operators->sum_parts(&sum, stream), stream);
}

static cpa_status gather(void *ctx, const cpa_slice_gather *args, cpa_stream *stream) {
    return args->rows ? outcome(ctx, gather_columns(ctx, args, stream), stream) : CPA_OK;
}

static cpa_status sum(void *ctx, const cpa_slice_sum *args, cpa_stream *stream) {
    return args->rows ? outcome(ctx, sum_parts(ctx, args, stream), stream) : CPA_OK;
}

cpa_slices cpa_context_slices(cpa_context *c) {
    return (cpa_slices){.size = sizeof(cpa_slices),
                        .ctx = c,
                        .rank = c->ops.rank,
                        .ranks = c->ops.map.cp_size,
                        .gather = gather,
                        .sum = sum};
}
