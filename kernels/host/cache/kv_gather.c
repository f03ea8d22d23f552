/* kv_gather: tokens of paged sequences into rows of tensors. */
#include "kernels/host/cache/row_reader.h"
#include "kernels/host/cache/span_rows.h"

typedef struct gather_job {
    const cpa_kv_gather_args *args;
    cpa_kv_view kv;
    cpa_kv_pool from[2], to[2];
} gather_job;

static void gather_row(const void *ctx, cpa_span_row row) {
    const gather_job *job = ctx;
    const cpa_dtype dtype = job->args->dst_dtype;
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const cpa_kv_pool *from = &job->from[part], *to = &job->to[part];
        char *place = to->memory + row.dst_row * to->token_stride;
        for (int32_t head = 0; head < job->kv.kv_heads; head++, place += to->head_stride) {
            float wide[CPA_MAX_HEAD_DIM];
            if (dtype == job->kv.dtype) {
                const char *at = from->memory + row.block * from->block_stride + row.offset * from->token_stride;
                cpa_runs_gather(place, at + head * from->head_stride, from->run_bytes, from->run_stride,
                                from->row_bytes);
                continue;
            }
            cpa_row_read(&job->kv, from, row.block, row.offset, head, wide);
            cpa_narrow(place, wide, dtype, from->dim);
        }
    }
}

cpa_status cpa_host_kv_gather(const cpa_kv_gather_args *args, const cpa_kv_view *rows, cpa_stream *stream) {
    gather_job job = {.args = args, .kv = cpa_kv_view_resolve(args->src)};
    const cpa_span_rows of = {args->block_tables, args->src.block_size, args->spans, args->n_spans};
    for (cpa_kv_part part = CPA_KEYS; part <= CPA_VALUES; part++) {
        job.from[part] = cpa_kv_pool_of(&job.kv, part);
        job.to[part] = cpa_kv_pool_of(rows, part);
    }
    cpa_host_for_span_rows(stream, &of, gather_row, &job);
    return CPA_OK;
}
