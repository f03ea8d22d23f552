/* kv_write: new keys and values into their pages, by slot mapping. */
#include "base/check.h"
#include "kernels/host/cache/quantise.h"
#include "kernels/host/device/host.h"

enum { TOKENS_PER_ITEM = 64 };

typedef struct write_job {
    const cpa_kv_write_args *args;
    cpa_kv_view kv;
} write_job;

/* Where the rows of keys, or of values, of one token go, in bytes. */
typedef struct row_target {
    char *block, *row; /* the token's block, and its row of head 0 */
    int64_t head_stride;
    float tensor_scale;
    int32_t dim;
} row_target;

static void write_row(const write_job *job, const row_target *target, int32_t head, int64_t offset, const char *src) {
    const cpa_kv_view *kv = &job->kv;
    char *row = target->row + head * target->head_stride;
    if (!cpa_dtype_is_quantised(kv->dtype)) {
        cpa_convert(row, kv->dtype, src, job->args->dtype, target->dim);
        return;
    }
    float wide[CPA_MAX_HEAD_DIM];
    cpa_widen(wide, src, job->args->dtype, target->dim);
    uint32_t word = cpa_quantise(row, wide, kv->dtype, target->tensor_scale, target->dim);
    if (!cpa_kv_scale_bytes(kv->dtype, target->tensor_scale)) return;
    uint32_t *words = (uint32_t *)(void *)(target->block + cpa_kv_scales_at(kv, target->dim, target->tensor_scale));
    words[head * (int64_t)kv->block_size + offset] = word;
}

static void write_token(const write_job *job, int64_t token) {
    const cpa_kv_view *kv = &job->kv;
    int64_t slot = job->args->slot_mapping[token];
    if (slot < 0) return;
    int64_t block = slot / kv->block_size, offset = slot % kv->block_size;
    int64_t from = cpa_dtype_bytes(job->args->dtype), to = cpa_dtype_bytes(kv->dtype);
    row_target k = {.block = (char *)kv->k + block * kv->k_block_stride * to,
                    .head_stride = kv->k_head_stride * to,
                    .tensor_scale = kv->k_scale,
                    .dim = kv->k_dim};
    row_target v = {.block = (char *)kv->v + block * kv->v_block_stride * to,
                    .head_stride = kv->v_head_stride * to,
                    .tensor_scale = kv->v_scale,
                    .dim = kv->v_dim};
    k.row = k.block + offset * kv->k_token_stride * to;
    v.row = v.block + offset * kv->v_token_stride * to;
    for (int32_t head = 0; head < kv->kv_heads; head++) {
        int64_t row = token * kv->kv_heads + head;
        write_row(job, &k, head, offset, (const char *)job->args->k + row * kv->k_dim * from);
        write_row(job, &v, head, offset, (const char *)job->args->v + row * kv->v_dim * from);
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
