/* qk_norm_rope: the queries, keys and values of a product's rows, normed, rotated and into their pages. A head is
 * computed in fp64 and rounded where it is stored. */
#include <math.h>

#include "base/min_max.h"
#include "kernels/host/cache/row_writer.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/turn.h"

enum { ROWS_PER_ITEM = 16 };

typedef struct head_job {
    const cpa_qk_norm_rope_args *args;
    cpa_row_writer writer; /* set where keys and values go to a cache */
} head_job;

/* head[0..dim) = its norm; weight NULL: as it is. */
static void norm_head(double *head, const void *weight, const cpa_qk_norm_rope_args *a) {
    float weights[CPA_MAX_HEAD_DIM];
    const int32_t dim = a->shape.k_dim;
    double squares = 0;
    if (!weight) return;
    cpa_widen(weights, weight, a->shape.dtype, dim);
    for (int32_t i = 0; i < dim; i++) squares += head[i] * head[i];
    const double scale = 1 / sqrt(squares / dim + (double)a->eps);
    for (int32_t i = 0; i < dim; i++) head[i] *= scale * ((double)weights[i] + (double)a->weight_offset);
}

/* A head of queries or keys, normed and rotated, to out. */
static void turn_head(const cpa_qk_norm_rope_args *a, int64_t row, const char *src, const void *weight, void *out) {
    const int32_t dim = a->shape.k_dim;
    float narrow[CPA_MAX_HEAD_DIM];
    double head[CPA_MAX_HEAD_DIM];
    cpa_widen(narrow, src, a->shape.dtype, dim);
    for (int32_t i = 0; i < dim; i++) head[i] = (double)narrow[i];
    norm_head(head, weight, a);
    if (a->rope.table) {
        if (cpa_rope_is_in_table(&a->rope, a->positions, a->rows, row)) {
            cpa_turn_head(head, &a->rope, a->positions, a->rows, row);
        } else {
            for (int32_t i = 0; i < dim; i++) head[i] = NAN;
        }
    }
    for (int32_t i = 0; i < dim; i++) narrow[i] = (float)head[i];
    cpa_narrow(out, narrow, a->shape.dtype, dim);
}

/* The key or value of a row and head to where it is asked for. */
static void store_head(const head_job *job, cpa_kv_part part, int64_t row, int32_t head, const void *src) {
    const cpa_qk_norm_rope_args *a = job->args;
    const int64_t bytes = cpa_dtype_bytes(a->shape.dtype);
    const int64_t dim = part == CPA_KEYS ? a->shape.k_dim : a->shape.v_dim;
    const int64_t stride = part == CPA_KEYS ? a->k_stride : a->v_stride;
    char *out = part == CPA_KEYS ? a->k : a->v;
    if (out) memcpy(out + (row * stride + head * dim) * bytes, src, (size_t)(dim * bytes));
    if (a->slot_mapping && a->slot_mapping[row] >= 0)
        cpa_row_writer_put(&job->writer, part, a->slot_mapping[row], head, src,
                           a->nonfinite ? &a->nonfinite[row] : NULL);
}

static void turn_row(const head_job *job, int64_t row) {
    const cpa_qk_norm_rope_args *a = job->args;
    const cpa_attention_shape *shape = &a->shape;
    const int64_t bytes = cpa_dtype_bytes(shape->dtype), k_bytes = shape->k_dim * bytes;
    const char *src = (const char *)a->qkv + row * a->qkv_stride * bytes;
    char *q = (char *)a->q + row * a->q_stride * bytes;
    float key[CPA_MAX_HEAD_DIM]; /* in dtype */
    for (int32_t head = 0; head < shape->q_heads; head++, src += k_bytes)
        turn_head(a, row, src, a->q_weight, q + head * k_bytes);
    for (int32_t head = 0; head < shape->kv_heads; head++, src += k_bytes) {
        turn_head(a, row, src, a->k_weight, key);
        store_head(job, CPA_KEYS, row, head, key);
    }
    for (int32_t head = 0; head < shape->kv_heads; head++, src += shape->v_dim * bytes)
        store_head(job, CPA_VALUES, row, head, src);
}

static void turn_rows(void *ctx, int64_t item, int32_t thread) {
    const head_job *job = ctx;
    const int64_t end = cpa_min64((item + 1) * ROWS_PER_ITEM, job->args->rows);
    (void)thread;
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) turn_row(job, row);
}

cpa_status cpa_host_qk_norm_rope(const cpa_qk_norm_rope_args *args, cpa_stream *stream) {
    head_job job = {.args = args};
    if (args->slot_mapping && args->shape.kv_heads) {
        job.writer = cpa_row_writer_of(&args->kv, args->shape.dtype);
        CPA_TRY(cpa_row_writer_check("qk_norm_rope", &job.writer, args->slot_mapping, args->rows, &stream->error));
    }
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, turn_rows, &job);
    return CPA_OK;
}
