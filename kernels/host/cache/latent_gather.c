/* latent_gather: rows of paged latents into rows of a tensor. */
#include "base/min_max.h"
#include "kernels/host/cache/row_reader.h"

enum { ROWS_PER_ITEM = 64 };

typedef struct gather_job {
    const cpa_latent_gather_args *args;
    cpa_kv_view kv;
    cpa_kv_pool pool;
    cpa_latent_span span;
} gather_job;

static void gather_row(const gather_job *job, int64_t row) {
    const cpa_latent_gather_args *a = job->args;
    const int64_t token = job->span.first + row, block_size = job->kv.block_size, offset = token % block_size;
    const int64_t block = a->block_tables[job->span.table + token / block_size];
    const int64_t unit = a->raw ? 1 : cpa_dtype_bytes(a->dst_dtype);
    char *to = (char *)a->dst + (job->span.dst_row + row) * a->dst_row_stride * unit;
    const char *from = job->pool.memory + block * job->pool.block_stride + offset * job->pool.token_stride;
    if (a->raw || a->dst_dtype == job->kv.dtype) {
        memcpy(to, from, (size_t)job->pool.row_bytes);
    } else {
        float wide[CPA_MAX_HEAD_DIM];
        cpa_row_read(&job->kv, &job->pool, block, offset, 0, wide);
        cpa_narrow(to, wide, a->dst_dtype, job->pool.dim);
    }
}

static void gather_rows(void *ctx, int64_t item, int32_t thread) {
    const gather_job *job = ctx;
    const int64_t end = cpa_min64((item + 1) * ROWS_PER_ITEM, job->span.count);
    (void)thread;
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) gather_row(job, row);
}

cpa_status cpa_host_latent_gather(const cpa_latent_gather_args *args, cpa_stream *stream) {
    gather_job job = {.args = args, .kv = cpa_kv_view_resolve(args->src)};
    job.pool = cpa_kv_pool_of(&job.kv, CPA_KEYS);
    for (int64_t i = 0; i < args->n_spans; i++) {
        job.span = args->spans[i];
        cpa_host_run(stream, (job.span.count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, gather_rows, &job);
    }
    return CPA_OK;
}
