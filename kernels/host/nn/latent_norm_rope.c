/* latent_norm_rope: rows of latents, normed and rotated, and into their pages; and the rotated parts of queries. */
#include "kernels/host/cache/row_writer.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/row_norm.h"
#include "kernels/host/nn/turn.h"

typedef struct latent_job {
    const cpa_latent_norm_rope_args *args;
    cpa_row_norm norm;
    cpa_rotate_args queries; /* what rotate would be asked for; looked at where there are queries */
    cpa_row_writer writer;   /* set where rows go to a cache */
} latent_job;

static void make_latent(const latent_job *job, int64_t row) {
    const cpa_latent_norm_rope_args *a = job->args;
    const cpa_attention_shape *s = &a->shape;
    const int64_t bytes = cpa_dtype_bytes(s->dtype);
    const char *x = (const char *)a->x + row * a->x_stride * bytes;
    float latent[CPA_MAX_HEAD_DIM]; /* in dtype */
    char *key = (char *)latent + s->v_dim * bytes;
    cpa_row_norm_plain(&job->norm, x, s->v_dim, (char *)latent);
    cpa_turn_row(&a->rope, a->positions, a->rows, row, x + s->v_dim * bytes, key, s->dtype, s->k_dim - s->v_dim);
    if (a->out) memcpy((char *)a->out + row * a->out_stride * bytes, latent, (size_t)(s->k_dim * bytes));
    if (a->slot_mapping && a->slot_mapping[row] >= 0)
        cpa_row_writer_put(&job->writer, CPA_KEYS, a->slot_mapping[row], 0, latent,
                           a->nonfinite ? &a->nonfinite[row] : NULL);
}

static void make_row(void *ctx, int64_t row, int32_t thread) {
    const latent_job *job = ctx;
    (void)thread;
    make_latent(job, row);
    if (job->args->q) cpa_turn_heads(&job->queries, row);
}

cpa_status cpa_host_latent_norm_rope(const cpa_latent_norm_rope_args *args, cpa_stream *stream) {
    const cpa_attention_shape *s = &args->shape;
    latent_job job = {.args = args,
                      .norm = {s->dtype, s->dtype, args->weight, (double)args->weight_offset, (double)args->eps},
                      .queries = cpa_latent_queries(args)};
    if (args->slot_mapping) {
        job.writer = cpa_row_writer_of(&args->kv, s->dtype);
        CPA_TRY(cpa_row_writer_check("latent_norm_rope", &job.writer, args->slot_mapping, args->rows, &stream->error));
    }
    cpa_host_run(stream, args->rows, make_row, &job);
    return CPA_OK;
}
