/* kv_gather: tokens of paged sequences into rows of tensors. */
#include "base/min_max.h"
#include "kernels/host/cache/row_reader.h"

enum { ROWS_PER_ITEM = 64 };

typedef struct gather_job {
    const cpa_kv_gather_args *args;
    cpa_kv_view kv;
    cpa_kv_pool from[2], to[2];
    cpa_kv_span span;
} gather_job;

static void gather_row(const gather_job *job, int64_t row) {
    const cpa_kv_gather_args *a = job->args;
    const int64_t token = job->span.first + row, block_size = job->kv.block_size, offset = token % block_size;
    const int64_t block = a->block_tables[job->span.table + token / block_size];
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const cpa_kv_pool *from = &job->from[part], *to = &job->to[part];
        char *place = to->memory + (job->span.dst_row + row) * to->token_stride;
        for (int32_t head = 0; head < job->kv.kv_heads; head++, place += to->head_stride) {
            float wide[CPA_MAX_HEAD_DIM];
            if (a->dst_dtype == job->kv.dtype) {
                const char *at = from->memory + block * from->block_stride + offset * from->token_stride;
                cpa_runs_gather(place, at + head * from->head_stride, from->run_bytes, from->run_stride,
                                from->row_bytes);
                continue;
            }
            cpa_row_read(&job->kv, from, block, offset, head, wide);
            cpa_narrow(place, wide, a->dst_dtype, from->dim);
        }
    }
}

static void gather_rows(void *ctx, int64_t item, int32_t thread) {
    const gather_job *job = ctx;
    const int64_t end = cpa_min64((item + 1) * ROWS_PER_ITEM, job->span.count);
    (void)thread;
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) gather_row(job, row);
}

cpa_status cpa_host_kv_gather(const cpa_kv_gather_args *args, const cpa_kv_view *rows, cpa_stream *stream) {
    gather_job job = {.args = args, .kv = cpa_kv_view_resolve(args->src)};
    for (cpa_kv_part part = CPA_KEYS; part <= CPA_VALUES; part++) {
        job.from[part] = cpa_kv_pool_of(&job.kv, part);
        job.to[part] = cpa_kv_pool_of(rows, part);
    }
    for (int64_t i = 0; i < args->n_spans; i++) {
        job.span = args->spans[i];
        cpa_host_run(stream, (job.span.count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, gather_rows, &job);
    }
    return CPA_OK;
}
