#include "src/context/row_exchange.h"

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context_internal.h"

/* The rows of this rank for itself do not travel. */
static cpa_status exchange_rows(cpa_context *c, const cpa_row_exchange_args *given, cpa_stream *stream) {
    cpa_context_ops *ops = &c->ops;
    cpa_row_exchange_args args;
    int32_t n = 0;
    CPA_TRY(cpa_context_check_whole(c));
    CPA_TRY(CPA_STRUCT_TAKE("exchange", given, cpa_row_exchange_args, receive, &args, &ops->error));
    const char *send = args.send;
    char *receive = args.receive;
    for (int32_t r = 0; r < ops->map.cp_size; r++) {
        const int64_t out = args.send_rows[r] * args.row_bytes, in = args.receive_rows[r] * args.row_bytes;
        if (r == ops->rank) {
            if (out > 0) CPA_TRY(cpa_context_check(ops, ops->device->table->copy(receive, send, out, stream), stream));
        } else {
            ops->messages[n++] = (cpa_message){r, send, out, receive, in};
            ops->stats.row_bytes_sent += out;
        }
        if (!args.to_all) send += out;
        receive += in;
    }
    return cpa_context_exchange_between(c, n, CPA_SPAN_EXCHANGE_ROWS, stream);
}

static cpa_status exchange(void *ctx, const cpa_row_exchange_args *args, cpa_stream *stream) {
    cpa_context *c = ctx;
    const cpa_status status = exchange_rows(c, args, stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(&stream->error, status, "rows: %s", c->ops.error.message);
}

cpa_row_exchange cpa_context_row_exchange(cpa_context *c) {
    return (cpa_row_exchange){.size = sizeof(cpa_row_exchange),
                              .ctx = c,
                              .rank = c->ops.rank,
                              .ranks = c->ops.map.cp_size,
                              .exchange = exchange};
}
