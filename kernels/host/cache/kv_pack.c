/* kv_pack: tokens of paged sequences into consecutive blocks of a staging view. */
#include "kernels/host/device/host.h"

typedef struct pack_job {
    cpa_kv_view src, dst;
    const int32_t *block_tables;
    cpa_kv_range range;
} pack_job;

static void pack_block(void *ctx, int64_t item, int32_t thread) {
    const pack_job *job = ctx;
    int64_t block_size = job->src.block_size, left = job->range.count - item * block_size;
    int64_t entry = job->range.table + job->range.first / block_size + item;
    (void)thread;
    cpa_host_copy_tokens(&job->dst, job->range.dst_block + item, &job->src, job->block_tables[entry],
                         left < block_size ? left : block_size);
}

cpa_status cpa_host_kv_pack(const cpa_kv_pack_args *args, cpa_stream *stream) {
    pack_job job = {cpa_kv_view_resolve(args->src), cpa_kv_view_resolve(args->dst), args->block_tables, {0}};
    for (int64_t i = 0; i < args->n_ranges; i++) {
        job.range = args->ranges[i];
        cpa_host_run(stream, (job.range.count + job.src.block_size - 1) / job.src.block_size, pack_block, &job);
    }
    return CPA_OK;
}
