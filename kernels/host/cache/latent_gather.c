/* latent_gather: rows of paged latents into rows of a tensor. */
#include "kernels/host/cache/row_reader.h"
#include "kernels/host/cache/span_rows.h"

typedef struct gather_job {
    const cpa_latent_gather_args *args;
    cpa_kv_view kv;
    cpa_kv_pool pool;
} gather_job;

static void gather_row(const void *ctx, cpa_span_row row) {
    const gather_job *job = ctx;
    const cpa_latent_gather_args *a = job->args;
    const int64_t unit = a->raw ? 1 : cpa_dtype_bytes(a->dst_dtype);
    char *to = (char *)a->dst + row.dst_row * a->dst_row_stride * unit;
    const char *from = job->pool.memory + row.block * job->pool.block_stride + row.offset * job->pool.token_stride;
    if (a->raw || a->dst_dtype == job->kv.dtype) {
        memcpy(to, from, (size_t)job->pool.row_bytes);
    } else {
        float wide[CPA_MAX_HEAD_DIM];
        cpa_row_read(&job->kv, &job->pool, row.block, row.offset, 0, wide);
        cpa_narrow(to, wide, a->dst_dtype, job->pool.dim);
    }
}

cpa_status cpa_host_latent_gather(const cpa_latent_gather_args *args, cpa_stream *stream) {
    gather_job job = {.args = args, .kv = cpa_kv_view_resolve(args->src)};
    const cpa_span_rows of = {args->block_tables, args->src.block_size, args->spans, args->n_spans};
    job.pool = cpa_kv_pool_of(&job.kv, CPA_KEYS);
    cpa_host_for_span_rows(stream, &of, gather_row, &job);
    return CPA_OK;
}
