/* kv_convert: blocks from one layout, dtype and way to scale to another. */
#include "kernels/host/cache/row_reader.h"
#include "kernels/host/cache/row_writer.h"

typedef struct convert_job {
    cpa_kv_view src, dst;
    cpa_row_writer writer; /* writes fp32 rows into dst */
    const int64_t (*pairs)[2];
    int same; /* rows have the same bytes in both */
} convert_job;

static void convert_block(void *ctx, int64_t item, int32_t thread) {
    const convert_job *job = ctx;
    const int64_t from = job->pairs[item][0], to = job->pairs[item][1], block_size = job->src.block_size;
    (void)thread;
    if (job->same) {
        cpa_host_copy_tokens(&job->dst, to, &job->src, from, block_size);
        return;
    }
    for (int part = CPA_KEYS; part < cpa_kv_parts(&job->src); part++) {
        const cpa_kv_pool pool = cpa_kv_pool_of(&job->src, (cpa_kv_part)part);
        for (int64_t i = 0; i < block_size * job->src.kv_heads; i++) {
            const int32_t head = (int32_t)(i % job->src.kv_heads);
            float row[CPA_MAX_HEAD_DIM];
            cpa_row_read(&job->src, &pool, from, i / job->src.kv_heads, head, row);
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
