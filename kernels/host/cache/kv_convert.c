/* kv_convert: blocks from one layout, dtype and way to scale to another. */
#include "kernels/host/cache/row_writer.h"

typedef struct convert_job {
    cpa_kv_view src, dst;
    cpa_row_writer writer; /* writes fp32 rows into dst */
    const int64_t (*pairs)[2];
    int same; /* rows have the same bytes in both */
} convert_job;

/* The key or the value of one token and head as fp32. */
static void read_row(const cpa_kv_view *kv, const cpa_kv_pool *pool, int64_t block, int64_t offset, int32_t head,
                     float *out) {
    const char *at = pool->memory + block * pool->block_stride;
    const uint32_t *words = (const uint32_t *)(const void *)(at + pool->scales_at);
    char row[CPA_MAX_HEAD_DIM * sizeof(float)];
    cpa_runs_gather(row, at + offset * pool->token_stride + head * pool->head_stride, pool->run_bytes, pool->run_stride,
                    pool->row_bytes);
    if (cpa_dtype_is_quantised(kv->dtype))
        cpa_dequantise(out, row, kv->dtype, cpa_kv_head_scale(pool, head),
                       pool->scale_bytes ? words[head * (int64_t)kv->block_size + offset] : 0, pool->dim);
    else
        cpa_widen(out, row, kv->dtype, pool->dim);
}

static void convert_block(void *ctx, int64_t item, int32_t thread) {
    const convert_job *job = ctx;
    const int64_t from = job->pairs[item][0], to = job->pairs[item][1], block_size = job->src.block_size;
    (void)thread;
    if (job->same) {
        cpa_host_copy_tokens(&job->dst, to, &job->src, from, block_size);
        return;
    }
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const cpa_kv_pool pool = cpa_kv_pool_of(&job->src, (cpa_kv_part)part);
        for (int64_t i = 0; i < block_size * job->src.kv_heads; i++) {
            const int32_t head = (int32_t)(i % job->src.kv_heads);
            float row[CPA_MAX_HEAD_DIM];
            read_row(&job->src, &pool, from, i / job->src.kv_heads, head, row);
            cpa_row_writer_put(&job->writer, (cpa_kv_part)part, to * block_size + i / job->src.kv_heads, head, row,
                               NULL);
        }
    }
}

cpa_status cpa_host_kv_convert(const cpa_kv_convert_args *args, cpa_stream *stream) {
    convert_job job = {.src = cpa_kv_view_resolve(args->src),
                       .dst = cpa_kv_view_resolve(args->dst),
                       .writer = cpa_row_writer_of(&args->dst, CPA_F32),
                       .pairs = args->pairs};
    job.same = cpa_kv_same_form(&job.src, &job.dst);
    cpa_host_run(stream, args->n_pairs, convert_block, &job);
    return CPA_OK;
}
