#include "kernels/host/cache/span_rows.h"

#include "base/min_max.h"

enum { ROWS_PER_ITEM = 64 };

typedef struct span_job {
    const cpa_span_rows *rows;
    cpa_kv_span span;
    cpa_span_row_fn *gather;
    const void *ctx;
} span_job;

static void gather_rows(void *ctx, int64_t item, int32_t thread) {
    const span_job *job = ctx;
    const cpa_kv_span *span = &job->span;
    const int64_t end = cpa_min64((item + 1) * ROWS_PER_ITEM, span->count), block_size = job->rows->block_size;
    (void)thread;
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        const int64_t token = span->first + row;
        job->gather(job->ctx, (cpa_span_row){.block = job->rows->block_tables[span->table + token / block_size],
                                             .offset = token % block_size,
                                             .dst_row = span->dst_row + row});
    }
}

void cpa_host_for_span_rows(cpa_stream *stream, const cpa_span_rows *rows, cpa_span_row_fn *gather, const void *ctx) {
    for (int64_t i = 0; i < rows->n_spans; i++) {
        span_job job = {.rows = rows, .span = rows->spans[i], .gather = gather, .ctx = ctx};
        cpa_host_run(stream, (job.span.count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, gather_rows, &job);
    }
}
