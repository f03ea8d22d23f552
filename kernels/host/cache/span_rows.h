/* What gathers tokens out of pages: their rows, shared by the threads of the stream. */
#ifndef CPA_HOST_SPAN_ROWS_H
#define CPA_HOST_SPAN_ROWS_H

#include "kernels/host/device/host.h"

/* Where a token lies, and the row that receives it. */
typedef struct cpa_span_row {
    int64_t block, offset, dst_row;
} cpa_span_row;
typedef void cpa_span_row_fn(const void *ctx, cpa_span_row row);

typedef struct cpa_span_rows {
    const int32_t *block_tables;
    int64_t block_size;
    const cpa_kv_span *spans; /* [n_spans] */
    int64_t n_spans;
} cpa_span_rows;

/* Calls `gather` for each token of the spans, from any thread. */
void cpa_host_for_span_rows(cpa_stream *stream, const cpa_span_rows *rows, cpa_span_row_fn *gather, const void *ctx);

#endif
