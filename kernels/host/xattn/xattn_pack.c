/* xattn_pack_q and xattn_pack_k: a group of a head is one item. */
#include <string.h>

#include "base/check.h"
#include "kernels/host/cache/row_reader.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/xattn.h"

static char *group_at(const cpa_xattn_shape *shape, void *out, int64_t head_stride, int32_t head, int64_t group) {
    return (char *)out + (head * head_stride + group * cpa_xattn_width(shape)) * cpa_dtype_bytes(shape->dtype);
}

static void pack_queries(void *ctx, int64_t group, int32_t thread) {
    const cpa_xattn_pack_q_args *a = ctx;
    const cpa_xattn_shape *shape = &a->shape;
    const int64_t bytes = cpa_dtype_bytes(shape->dtype), row = shape->dim * bytes;
    const int64_t head_stride = cpa_xattn_groups(shape, a->tokens) * cpa_xattn_width(shape);
    (void)thread;
    for (int32_t head = 0; head < shape->q_heads; head++) {
        char *out = group_at(shape, a->out, head_stride, head, group);
        for (int32_t s = 0; s < shape->stride; s++, out += row) {
            const int64_t token = group * shape->stride + shape->stride - 1 - s;
            if (token < a->tokens)
                memcpy(out, (const char *)a->q + (token * a->q_row_stride + head * a->q_head_stride) * bytes,
                       (size_t)row);
            else
                memset(out, 0, (size_t)row);
        }
    }
}

cpa_status cpa_host_xattn_pack_q(const cpa_xattn_pack_q_args *args, cpa_stream *stream) {
    cpa_xattn_pack_q_args copy = *args;
    cpa_host_run(stream, cpa_xattn_groups(&args->shape, args->tokens), pack_queries, &copy);
    return CPA_OK;
}

typedef struct keys_job {
    const cpa_xattn_pack_k_args *args;
    cpa_kv_view kv;
    cpa_kv_pool pool;
} keys_job;

static void pack_keys(void *ctx, int64_t group, int32_t thread) {
    const keys_job *job = ctx;
    const cpa_xattn_pack_k_args *a = job->args;
    const cpa_xattn_shape *shape = &a->shape;
    const int64_t row = shape->dim * cpa_dtype_bytes(shape->dtype);
    float wide[CPA_XATTN_MOST_DIM];
    (void)thread;
    for (int32_t head = 0; head < shape->kv_heads; head++) {
        char *out = group_at(shape, a->out, a->out_stride, head, group);
        for (int32_t s = 0; s < shape->stride; s++, out += row) {
            const int64_t token = group * shape->stride + s;
            if (token >= a->tokens) {
                memset(out, 0, (size_t)row);
                continue;
            }
            cpa_row_read(&job->kv, &job->pool, a->table[token / job->kv.block_size], token % job->kv.block_size, head,
                         wide);
            cpa_narrow(out, wide, shape->dtype, shape->dim);
        }
    }
}

cpa_status cpa_host_xattn_pack_k(const cpa_xattn_pack_k_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    keys_job job = {args, kv, cpa_kv_pool_of(&kv, CPA_KEYS)};
    const int64_t entries = (args->tokens + kv.block_size - 1) / kv.block_size;
    for (int64_t i = 0; i < entries; i++) {
        if (args->table[i] < 0 || args->table[i] >= kv.num_blocks)
            return cpa_fail(&stream->error, CPA_INVALID, "xattn_pack_k: table[%lld] is %d, expected a block, 0 to %lld",
                            (long long)i, args->table[i], (long long)kv.num_blocks - 1);
    }
    cpa_host_run(stream, cpa_xattn_groups(&args->shape, args->tokens), pack_keys, &job);
    return CPA_OK;
}
