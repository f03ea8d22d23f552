/* kv_write: new keys and values into their pages, by slot mapping. */
#include "base/min_max.h"
#include "kernels/host/cache/row_writer.h"

enum { TOKENS_PER_ITEM = 64 };

typedef struct write_job {
    const cpa_kv_write_args *args;
    cpa_row_writer writer;
    int64_t row_bytes[2], head_bytes[2]; /* from token to token and from head to head, of keys and of values */
} write_job;

static void write_token(const write_job *job, int64_t token) {
    const cpa_kv_write_args *args = job->args;
    const int64_t slot = args->slot_mapping[token];
    if (slot < 0) return;
    for (int part = CPA_KEYS; part < cpa_kv_parts(&args->kv); part++) {
        const char *src = part == CPA_KEYS ? args->k : args->v;
        src += token * job->row_bytes[part];
        for (int32_t head = 0; head < args->kv.kv_heads; head++, src += job->head_bytes[part])
            cpa_row_writer_put(&job->writer, (cpa_kv_part)part, slot, head, src,
                               args->nonfinite ? &args->nonfinite[token] : NULL);
    }
}

static void write_tokens(void *ctx, int64_t item, int32_t thread) {
    const write_job *job = ctx;
    const int64_t end = cpa_min64((item + 1) * TOKENS_PER_ITEM, job->args->tokens);
    (void)thread;
    for (int64_t token = item * TOKENS_PER_ITEM; token < end; token++) write_token(job, token);
}

cpa_status cpa_host_kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    const int64_t element = cpa_dtype_bytes(args->dtype), heads = args->kv.kv_heads;
    write_job job = {
        .args = args,
        .writer = cpa_row_writer_of(&args->kv, args->dtype),
        .row_bytes = {(args->k_row_stride ? args->k_row_stride : heads * args->kv.k_dim) * element,
                      (args->v_row_stride ? args->v_row_stride : heads * args->kv.v_dim) * element},
        .head_bytes = {(args->k_head_stride ? args->k_head_stride : args->kv.k_dim) * element,
                       (args->v_head_stride ? args->v_head_stride : args->kv.v_dim) * element},
    };
    CPA_TRY(cpa_row_writer_check("kv_write", &job.writer, args->slot_mapping, args->tokens, &stream->error));
    cpa_host_run(stream, (args->tokens + TOKENS_PER_ITEM - 1) / TOKENS_PER_ITEM, write_tokens, &job);
    return CPA_OK;
}
