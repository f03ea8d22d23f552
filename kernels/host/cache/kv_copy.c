/* kv_copy: whole blocks from pool to pool. */
#include <string.h>

#include "kernels/host/device/host.h"

/* One of the two pools of a view, in bytes. */
typedef struct pool {
    char *memory;
    int64_t block, token, head; /* strides */
    int64_t scales;             /* from the start of a block to its scales */
} pool;

static pool keys_of(const cpa_kv_view *kv) {
    int64_t bytes = cpa_dtype_bytes(kv->dtype);
    return (pool){kv->k, kv->k_block_stride * bytes, kv->k_token_stride * bytes, kv->k_head_stride * bytes,
                  cpa_kv_scales_at(kv, kv->k_dim, kv->k_scale)};
}

static pool values_of(const cpa_kv_view *kv) {
    int64_t bytes = cpa_dtype_bytes(kv->dtype);
    return (pool){kv->v, kv->v_block_stride * bytes, kv->v_token_stride * bytes, kv->v_head_stride * bytes,
                  cpa_kv_scales_at(kv, kv->v_dim, kv->v_scale)};
}

static void copy_rows(char *dst, const pool *to, const char *src, const pool *from, int64_t tokens, int64_t heads,
                      int64_t row_bytes) {
    int dense = to->head == row_bytes && from->head == row_bytes;
    if (dense && to->token == heads * row_bytes && from->token == heads * row_bytes) {
        memcpy(dst, src, (size_t)(tokens * heads * row_bytes));
        return;
    }
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t token = 0; token < tokens; token++)
            memcpy(dst + token * to->token + head * to->head, src + token * from->token + head * from->head,
                   (size_t)row_bytes);
    }
}

/* The first `tokens` tokens of a block of keys or of values, with their scales. */
static void copy_block_of(const pool *to, int64_t dst_block, const pool *from, int64_t src_block, int64_t tokens,
                          const cpa_kv_view *kv, int64_t row_bytes, int64_t scale_bytes) {
    char *dst = to->memory + dst_block * to->block;
    const char *src = from->memory + src_block * from->block;
    copy_rows(dst, to, src, from, tokens, kv->kv_heads, row_bytes);
    for (int64_t head = 0; scale_bytes && head < kv->kv_heads; head++) {
        int64_t at = head * kv->block_size * scale_bytes;
        memcpy(dst + to->scales + at, src + from->scales + at, (size_t)(tokens * scale_bytes));
    }
}

void cpa_host_copy_tokens(const cpa_kv_view *dst, int64_t dst_block, const cpa_kv_view *src, int64_t src_block,
                          int64_t tokens) {
    int64_t bytes = cpa_dtype_bytes(src->dtype);
    pool to = keys_of(dst), from = keys_of(src);
    copy_block_of(&to, dst_block, &from, src_block, tokens, src, src->k_dim * bytes,
                  cpa_kv_scale_bytes(src->dtype, src->k_scale));
    to = values_of(dst), from = values_of(src);
    copy_block_of(&to, dst_block, &from, src_block, tokens, src, src->v_dim * bytes,
                  cpa_kv_scale_bytes(src->dtype, src->v_scale));
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
