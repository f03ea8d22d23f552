/* index_write: index keys to their slots. */
#include "base/check.h"
#include "kernels/host/device/host.h"
#include "kernels/host/indexer/index_row.h"
#include "kernels/host/nn/nn.h"
#include "kernels/kv_view.h"

typedef struct write_job {
    const cpa_index_write_args *args;
    cpa_kv_pool pool;
    int64_t block_size;
} write_job;

static void write_key(void *ctx, int64_t token, int32_t thread) {
    const write_job *job = ctx;
    const cpa_index_write_args *a = job->args;
    const int64_t slot = a->slot_mapping[token], offset = slot % job->block_size;
    const int32_t dim = job->pool.dim;
    float x[CPA_INDEX_MOST_DIM];
    (void)thread;
    if (slot < 0) return;
    cpa_widen(x, (const char *)a->k + token * a->k_row_stride * cpa_dtype_bytes(a->dtype), a->dtype, dim);
    if (a->gamma) cpa_index_norm(x, dim, a->gamma, a->beta, a->eps);
    cpa_index_finish(x, dim, &a->rope, a->positions, a->tokens, token, a->cache.hadamard, a->cache.kv.dtype);
    char *block = job->pool.memory + slot / job->block_size * job->pool.block_stride;
    char *row = block + offset * job->pool.token_stride;
    if (a->cache.kv.dtype != CPA_FP8_E4M3) {
        cpa_narrow(row, x, a->cache.kv.dtype, dim);
    } else {
        float *scales = (float *)(void *)(block + job->pool.scales_at);
        scales[offset] = cpa_index_codes((uint8_t *)row, x, dim, a->floor, a->scales_pow2);
    }
}

cpa_status cpa_host_index_write(const cpa_index_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->cache.kv);
    write_job job = {args, cpa_kv_pool_of(&kv, CPA_KEYS), kv.block_size};
    for (int64_t i = 0; i < args->tokens; i++) {
        if (args->slot_mapping[i] >= kv.num_blocks * kv.block_size)
            return cpa_fail(&stream->error, CPA_INVALID, "index_write: slot_mapping[%lld] is %lld, expected -1..%lld",
                            (long long)i, (long long)args->slot_mapping[i],
                            (long long)(kv.num_blocks * kv.block_size) - 1);
    }
    cpa_host_run(stream, args->tokens, write_key, &job);
    return CPA_OK;
}
