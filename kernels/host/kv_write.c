/* kv_write: new keys and values into their pages, by slot mapping. */
#include "base/check.h"
#include "kernels/host/convert.h"
#include "kernels/host/host.h"

enum { TOKENS_PER_ITEM = 64 };

typedef struct write_job {
    const cpa_kv_write_args *args;
    cpa_kv_view kv;
} write_job;

static void write_token(const write_job *job, int64_t token) {
    const cpa_kv_view *kv = &job->kv;
    int64_t slot = job->args->slot_mapping[token];
    if (slot < 0) return;
    int64_t block = slot / kv->block_size, offset = slot % kv->block_size;
    int64_t from = cpa_dtype_bytes(job->args->dtype), to = cpa_dtype_bytes(kv->dtype);
    for (int32_t head = 0; head < kv->kv_heads; head++) {
        int64_t k_at = block * kv->k_block_stride + offset * kv->k_token_stride + head * kv->k_head_stride;
        int64_t v_at = block * kv->v_block_stride + offset * kv->v_token_stride + head * kv->v_head_stride;
        const char *k = (const char *)job->args->k + (token * kv->kv_heads + head) * kv->k_dim * from;
        const char *v = (const char *)job->args->v + (token * kv->kv_heads + head) * kv->v_dim * from;
        cpa_convert((char *)kv->k + k_at * to, kv->dtype, k, job->args->dtype, kv->k_dim);
        cpa_convert((char *)kv->v + v_at * to, kv->dtype, v, job->args->dtype, kv->v_dim);
    }
}

static void write_tokens(void *ctx, int64_t item, int32_t thread) {
    const write_job *job = ctx;
    int64_t end = (item + 1) * TOKENS_PER_ITEM;
    (void)thread;
    if (end > job->args->tokens) end = job->args->tokens;
    for (int64_t token = item * TOKENS_PER_ITEM; token < end; token++) write_token(job, token);
}

cpa_status cpa_host_kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    write_job job = {args, cpa_kv_view_resolve(args->kv)};
    int64_t slots = job.kv.num_blocks * job.kv.block_size;
    for (int64_t i = 0; i < args->tokens; i++) {
        if (args->slot_mapping[i] < -1 || args->slot_mapping[i] >= slots)
            return cpa_fail(&stream->error, CPA_INVALID, "kv_write: slot_mapping[%lld] is %lld, expected -1..%lld",
                            (long long)i, (long long)args->slot_mapping[i], (long long)slots - 1);
    }
    cpa_host_run(stream, (args->tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, write_tokens, &job);
    return CPA_OK;
}
