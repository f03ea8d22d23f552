/* kv_move: tokens from slot to slot. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/host/cache/row_runs.h"
#include "kernels/host/device/host.h"

typedef struct move_job {
    cpa_kv_view src, dst;
    const int64_t (*slots)[2];
    int64_t n;
    char *rows; /* [threads, n], each of the longest row and its scales */
    int64_t row_bytes;
} move_job;

static char *row_at(const cpa_kv_pool *pool, int32_t block_size, int64_t slot, int64_t head) {
    return pool->memory + slot / block_size * pool->block_stride + slot % block_size * pool->token_stride +
           head * pool->head_stride;
}

static char *scale_at(const cpa_kv_pool *pool, int32_t block_size, int64_t slot, int64_t head) {
    return pool->memory + slot / block_size * pool->block_stride + pool->scales_at +
           (head * block_size + slot % block_size) * pool->scale_bytes;
}

static int moves(const move_job *job, int64_t i) {
    const int64_t from = job->slots[i][0], to = job->slots[i][1];
    return from >= 0 && from < job->src.num_blocks * job->src.block_size && to >= 0 &&
           to < job->dst.num_blocks * job->dst.block_size;
}

/* The keys, or the values, of one head: all are read, then all are written. */
static void move_head(void *ctx, int64_t item, int32_t thread) {
    const move_job *job = ctx;
    const cpa_kv_part part = item < job->src.kv_heads ? CPA_KEYS : CPA_VALUES;
    const int64_t head = item % job->src.kv_heads;
    const int32_t block_size = job->src.block_size;
    const cpa_kv_pool from = cpa_kv_pool_of(&job->src, part), to = cpa_kv_pool_of(&job->dst, part);
    char *rows = job->rows + thread * job->n * job->row_bytes;
    for (int64_t i = 0; i < job->n; i++) {
        if (!moves(job, i)) continue;
        char *row = rows + i * job->row_bytes;
        cpa_runs_gather(row, row_at(&from, block_size, job->slots[i][0], head), from.run_bytes, from.run_stride,
                        from.row_bytes);
        memcpy(row + from.row_bytes, scale_at(&from, block_size, job->slots[i][0], head), (size_t)from.scale_bytes);
    }
    for (int64_t i = 0; i < job->n; i++) {
        if (!moves(job, i)) continue;
        const char *row = rows + i * job->row_bytes;
        cpa_runs_scatter(row_at(&to, block_size, job->slots[i][1], head), row, to.run_bytes, to.run_stride,
                         to.row_bytes);
        memcpy(scale_at(&to, block_size, job->slots[i][1], head), row + to.row_bytes, (size_t)to.scale_bytes);
    }
}

cpa_status cpa_host_kv_move(const cpa_kv_move_args *args, cpa_stream *stream) {
    move_job job = {
        .src = cpa_kv_view_resolve(args->src),
        .dst = cpa_kv_view_resolve(args->dst),
        .slots = args->slots,
        .n = args->n,
    };
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const cpa_kv_pool pool = cpa_kv_pool_of(&job.src, (cpa_kv_part)part);
        if (pool.row_bytes + pool.scale_bytes > job.row_bytes) job.row_bytes = pool.row_bytes + pool.scale_bytes;
    }
    job.rows = malloc((size_t)(cpa_host_device_of(stream)->thread_count * job.n * job.row_bytes));
    if (!job.rows) return cpa_fail(&stream->error, CPA_NO_MEMORY, "kv_move: no memory for %lld rows", (long long)job.n);
    cpa_host_run(stream, cpa_kv_parts(&job.src) * (int64_t)job.src.kv_heads, move_head, &job);
    free(job.rows);
    return CPA_OK;
}
