/* kv_write: new keys and values into their pages, by slot mapping. */
#include "base/check.h"
#include "kernels/host/cache/quantise.h"
#include "kernels/host/device/host.h"

enum { TOKENS_PER_ITEM = 64 };

typedef struct write_job {
    const cpa_kv_write_args *args;
    cpa_kv_view kv;
    cpa_kv_pool pools[2]; /* keys, values */
} write_job;

/* One row of keys or of values; `offset` is that of its token in the block. */
static void write_row(const write_job *job, const cpa_kv_pool *pool, int64_t block, int64_t offset, int32_t head,
                      const char *src) {
    char *start = pool->memory + block * pool->block_stride;
    char *row = start + offset * pool->token_stride + head * pool->head_stride;
    if (!cpa_dtype_is_quantised(job->kv.dtype)) {
        cpa_convert(row, job->kv.dtype, src, job->args->dtype, pool->dim);
        return;
    }
    float wide[CPA_MAX_HEAD_DIM];
    cpa_widen(wide, src, job->args->dtype, pool->dim);
    uint32_t word = cpa_quantise(row, wide, job->kv.dtype, pool->tensor_scale, pool->dim);
    if (!pool->scale_bytes) return;
    uint32_t *words = (uint32_t *)(void *)(start + pool->scales_at);
    words[head * (int64_t)job->kv.block_size + offset] = word;
}

/* Whether all of n elements are numbers. */
static int is_finite(const char *src, cpa_dtype dtype, int64_t n) {
    float wide[CPA_MAX_HEAD_DIM];
    int nonfinite = 0;
    cpa_widen(wide, src, dtype, n);
    for (int64_t i = 0; i < n; i++) nonfinite |= (cpa_float_bits(wide[i]) & 0x7f800000) == 0x7f800000;
    return !nonfinite;
}

static void write_token(const write_job *job, int64_t token) {
    const cpa_kv_view *kv = &job->kv;
    const int64_t slot = job->args->slot_mapping[token], element = cpa_dtype_bytes(job->args->dtype);
    if (slot < 0) return;
    const int64_t block = slot / kv->block_size, offset = slot % kv->block_size;
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const cpa_kv_pool *pool = &job->pools[part];
        const char *src = part == CPA_KEYS ? job->args->k : job->args->v;
        src += token * kv->kv_heads * pool->dim * element;
        for (int32_t head = 0; head < kv->kv_heads; head++, src += pool->dim * element) {
            write_row(job, pool, block, offset, head, src);
            if (job->args->nonfinite && !is_finite(src, job->args->dtype, pool->dim)) job->args->nonfinite[token] = 1;
        }
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
    write_job job = {.args = args, .kv = cpa_kv_view_resolve(args->kv)};
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) job.pools[part] = cpa_kv_pool_of(&job.kv, (cpa_kv_part)part);
    int64_t slots = job.kv.num_blocks * job.kv.block_size;
    for (int64_t i = 0; i < args->tokens; i++) {
        if (args->slot_mapping[i] < -1 || args->slot_mapping[i] >= slots)
            return cpa_fail(&stream->error, CPA_INVALID, "kv_write: slot_mapping[%lld] is %lld, expected -1..%lld",
                            (long long)i, (long long)args->slot_mapping[i], (long long)slots - 1);
    }
    cpa_host_run(stream, (args->tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, write_tokens, &job);
    return CPA_OK;
}
