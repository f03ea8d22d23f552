/* kv_copy: whole blocks from pool to pool. */
#include "kernels/host/cache/row_runs.h"
#include "kernels/host/device/host.h"

/* Rows of which one side at least lies in runs. */
static void copy_runs(char *dst, const cpa_kv_pool *to, const char *src, const cpa_kv_pool *from, int64_t tokens,
                      int64_t heads) {
    char row[CPA_MAX_HEAD_DIM * sizeof(float)];
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t token = 0; token < tokens; token++) {
            cpa_runs_gather(row, src + token * from->token_stride + head * from->head_stride, from->run_bytes,
                            from->run_stride, from->row_bytes);
            cpa_runs_scatter(dst + token * to->token_stride + head * to->head_stride, row, to->run_bytes,
                             to->run_stride, to->row_bytes);
        }
    }
}

static void copy_rows(char *dst, const cpa_kv_pool *to, const char *src, const cpa_kv_pool *from, int64_t tokens,
                      int64_t heads, int64_t block_size) {
    const int64_t row_bytes = from->row_bytes;
    int dense = to->head_stride == row_bytes && from->head_stride == row_bytes;
    dense = dense && to->token_stride == heads * row_bytes && from->token_stride == heads * row_bytes;
    if (dense || (from->runs > 1 && to->runs > 1 && tokens == block_size)) {
        memcpy(dst, src, (size_t)(tokens * heads * row_bytes));
        return;
    }
    if (from->runs > 1 || to->runs > 1) {
        copy_runs(dst, to, src, from, tokens, heads);
        return;
    }
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t token = 0; token < tokens; token++)
            memcpy(dst + token * to->token_stride + head * to->head_stride,
                   src + token * from->token_stride + head * from->head_stride, (size_t)row_bytes);
    }
}

/* The first `tokens` tokens of a block of keys or of values, with their scales. */
static void copy_part(const cpa_kv_view *dst_kv, int64_t dst_block, const cpa_kv_view *src_kv, int64_t src_block,
                      int64_t tokens, cpa_kv_part part) {
    const cpa_kv_pool to = cpa_kv_pool_of(dst_kv, part), from = cpa_kv_pool_of(src_kv, part);
    char *dst = to.memory + dst_block * to.block_stride;
    const char *src = from.memory + src_block * from.block_stride;
    copy_rows(dst, &to, src, &from, tokens, src_kv->kv_heads, src_kv->block_size);
    for (int64_t head = 0; from.scale_bytes && head < src_kv->kv_heads; head++) {
        int64_t at = head * src_kv->block_size * from.scale_bytes;
        memcpy(dst + to.scales_at + at, src + from.scales_at + at, (size_t)(tokens * from.scale_bytes));
    }
}

void cpa_host_copy_tokens(const cpa_kv_view *dst, int64_t dst_block, const cpa_kv_view *src, int64_t src_block,
                          int64_t tokens) {
    for (int part = CPA_KEYS; part < cpa_kv_parts(src); part++)
        copy_part(dst, dst_block, src, src_block, tokens, (cpa_kv_part)part);
}

typedef struct copy_job {
    cpa_kv_view src, dst;
    const int64_t (*pairs)[2];
} copy_job;

static void copy_block(void *ctx, int64_t item, int32_t thread) {
    const copy_job *job = ctx;
    (void)thread;
    cpa_host_copy_tokens(&job->dst, job->pairs[item][1], &job->src, job->pairs[item][0], job->src.block_size);
}

cpa_status cpa_host_kv_copy(const cpa_kv_copy_args *args, cpa_stream *stream) {
    copy_job job = {cpa_kv_view_resolve(args->src), cpa_kv_view_resolve(args->dst), args->pairs};
    cpa_host_run(stream, args->n_pairs, copy_block, &job);
    return CPA_OK;
}
