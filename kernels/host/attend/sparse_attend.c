/* sparse_attend: rows over keys that their lists name (cpattn/sparse.h).
 *
 * An item is a row and up to HEADS query heads of a KV head. Its keys are taken in the order of its lists, in runs of
 * KEYS that are widened once for all of the heads; the softmax is online over the keys (Milakov and Gimelshein,
 * arXiv:1805.02867), in states of SPLIT keys, which are folded as those of attend are (state.h). Every sum has one
 * order, and no item knows of another: the bits of a row are its own. */
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/attend/attend_score.h"
#include "kernels/host/attend/state.h"
#include "kernels/host/cache/row_reader.h"

enum { HEADS = 8, KEYS = 16, SPLIT = 1024, LANES = 16 };

typedef struct sparse_job {
    const cpa_sparse_attend_args *args;
    int32_t group, parts; /* query heads of a KV head, and parts of HEADS of them */
    int32_t k_dim, v_dim;
    cpa_kv_pool keys[CPA_SPARSE_MOST_SCOPES], values[CPA_SPARSE_MOST_SCOPES];
} sparse_job;

/* A head's softmax over the keys of a split so far: O is not divided by the sum yet. */
typedef struct head_state {
    float q[CPA_MAX_HEAD_DIM], o[CPA_MAX_HEAD_DIM], max, sum;
} head_state;

/* What an item has: its heads, the fold of its splits so far, and the run of keys that is taken next. */
typedef struct sparse_rows {
    int64_t row;
    int32_t kv_head, first_head, n_heads;
    head_state heads[HEADS];
    float o[HEADS][CPA_MAX_HEAD_DIM], lse[HEADS], top[HEADS]; /* top: the largest score */
    float k[KEYS][CPA_MAX_HEAD_DIM], v[KEYS][CPA_MAX_HEAD_DIM];
    int32_t n_keys, in_split;
} sparse_rows;

/* A sum of LANES sums, which a compiler makes vectors of. */
static float dot(const float *restrict a, const float *restrict b, int32_t n) {
    float sum[LANES] = {0};
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int32_t lane = 0; lane < LANES; lane++) sum[lane] += a[i + lane] * b[i + lane];
    for (int32_t lane = 0; i < n; i++, lane++) sum[lane] += a[i] * b[i];
    for (int32_t width = LANES / 2; width > 0; width /= 2)
        for (int32_t lane = 0; lane < width; lane++) sum[lane] += sum[lane + width];
    return sum[0];
}

static void clear_split(const sparse_job *job, sparse_rows *rows) {
    for (int32_t h = 0; h < rows->n_heads; h++) {
        head_state *head = &rows->heads[h];
        head->max = CPA_LOWEST_EXPONENT * (float)M_LN2;
        head->sum = 0;
        memset(head->o, 0, (size_t)job->v_dim * sizeof *head->o);
    }
    rows->in_split = 0;
}

static void load_heads(const sparse_job *job, sparse_rows *rows) {
    const cpa_sparse_attend_args *a = job->args;
    const int64_t bytes = cpa_dtype_bytes(a->q_dtype);
    for (int32_t h = 0; h < rows->n_heads; h++) {
        const int64_t head = rows->first_head + h;
        cpa_widen(rows->heads[h].q, (const char *)a->q + (rows->row * a->q_row_stride + head * job->k_dim) * bytes,
                  a->q_dtype, job->k_dim);
        rows->top[h] = rows->lse[h] = -INFINITY;
        memset(rows->o[h], 0, (size_t)job->v_dim * sizeof *rows->o[h]);
        if (!a->resume) continue;
        const float lse = cpa_state_lse(a->state.lse[rows->row * a->state.lse_row_stride + head]);
        const float *o = a->state.o + rows->row * a->state.o_row_stride + head * job->v_dim;
        cpa_state_fold(rows->o[h], &rows->lse[h], o, lse, job->v_dim);
    }
}

/* One key of a head. A score of -inf weighs nothing, whatever the value holds; NaN and +inf make the sum NaN. */
static void take_key(const sparse_job *job, head_state *head, float *top, const float *k, const float *v) {
    const float score = dot(head->q, k, job->k_dim) * job->args->scale;
    if (score == -INFINITY) return;
    *top = isnan(score) || score > *top ? score : *top;
    const float max = score > head->max ? score : head->max, keep = expf(head->max - max), p = expf(score - max);
    head->max = max;
    head->sum = head->sum * keep + p;
    for (int32_t d = 0; d < job->v_dim; d++) head->o[d] = head->o[d] * keep + p * v[d];
}

static void end_split(const sparse_job *job, sparse_rows *rows) {
    for (int32_t h = 0; h < rows->n_heads; h++) {
        head_state *head = &rows->heads[h];
        if (head->sum == 0) continue;
        for (int32_t d = 0; d < job->v_dim; d++) head->o[d] /= head->sum;
        cpa_state_fold(rows->o[h], &rows->lse[h], head->o, head->max + logf(head->sum), job->v_dim);
    }
    clear_split(job, rows);
}

static void take_run(const sparse_job *job, sparse_rows *rows) {
    for (int32_t h = 0; h < rows->n_heads; h++)
        for (int32_t i = 0; i < rows->n_keys; i++)
            take_key(job, &rows->heads[h], &rows->top[h], rows->k[i],
                     job->args->scopes[0].kv.v_in_k ? rows->k[i] : rows->v[i]);
    rows->in_split += rows->n_keys;
    rows->n_keys = 0;
    if (rows->in_split == SPLIT) end_split(job, rows);
}

/* The keys of a list. */
static void take_scope(const sparse_job *job, sparse_rows *rows, int32_t s) {
    const cpa_sparse_scope *scope = &job->args->scopes[s];
    const cpa_kv_view *kv = &scope->kv;
    const int64_t slots = kv->num_blocks * kv->block_size;
    const int32_t *list = scope->slots + rows->row * scope->row_stride + rows->kv_head * scope->head_stride;
    const int32_t count = scope->counts ? (int32_t)cpa_min64(scope->counts[rows->row], scope->width) : scope->width;
    for (int32_t i = 0; i < count; i++) {
        if (list[i] < 0) continue;
        for (int64_t slot = (int64_t)list[i] * scope->unit, end = slot + scope->unit; slot < end; slot++) {
            if (slot >= slots) break;
            const int64_t block = slot / kv->block_size, offset = slot % kv->block_size;
            cpa_row_read(kv, &job->keys[s], block, offset, rows->kv_head, rows->k[rows->n_keys]);
            if (!kv->v_in_k) cpa_row_read(kv, &job->values[s], block, offset, rows->kv_head, rows->v[rows->n_keys]);
            if (++rows->n_keys == KEYS) take_run(job, rows);
        }
    }
}

static void store_head(const sparse_job *job, const sparse_rows *rows, int32_t h) {
    const cpa_sparse_attend_args *a = job->args;
    const int64_t head = rows->first_head + h, element = cpa_dtype_bytes(a->q_dtype);
    const float lse = rows->lse[h];
    if (a->state.o)
        memcpy(a->state.o + rows->row * a->state.o_row_stride + head * job->v_dim, rows->o[h],
               (size_t)job->v_dim * sizeof(float));
    if (a->state.lse) a->state.lse[rows->row * a->state.lse_row_stride + head] = lse;
    if (a->max_logits) a->max_logits[rows->row * a->q_heads + head] = rows->top[h];
    if (!a->out) return;
    const float factor = a->sink_logits ? cpa_attend_sink_factor(lse, a->sink_logits[head]) : 1;
    float scaled[CPA_MAX_HEAD_DIM];
    for (int32_t d = 0; d < job->v_dim; d++) scaled[d] = rows->o[h][d] * factor;
    cpa_narrow((char *)a->out + (rows->row * a->out_row_stride + head * job->v_dim) * element, scaled, a->q_dtype,
               job->v_dim);
}

static void attend_rows(void *ctx, int64_t item, int32_t thread) {
    const sparse_job *job = ctx;
    const int32_t kv_heads = job->args->scopes[0].kv.kv_heads, first = (int32_t)(item % job->parts) * HEADS;
    const int64_t of_row = item / job->parts;
    sparse_rows rows; /* as large as it is, not cleared */
    (void)thread;
    rows.row = of_row / kv_heads, rows.kv_head = (int32_t)(of_row % kv_heads), rows.n_keys = 0;
    rows.first_head = rows.kv_head * job->group + first;
    rows.n_heads = (int32_t)cpa_min64(HEADS, job->group - first);
    load_heads(job, &rows);
    clear_split(job, &rows);
    for (int32_t s = 0; s < job->args->n_scopes; s++) take_scope(job, &rows, s);
    take_run(job, &rows);
    end_split(job, &rows);
    for (int32_t h = 0; h < rows.n_heads; h++) store_head(job, &rows, h);
}

cpa_status cpa_host_sparse_attend(const cpa_sparse_attend_args *args, cpa_stream *stream) {
    const cpa_kv_view *kv = &args->scopes[0].kv;
    sparse_job job = {.args = args, .group = args->q_heads / kv->kv_heads, .k_dim = kv->k_dim, .v_dim = kv->v_dim};
    job.parts = (job.group + HEADS - 1) / HEADS;
    for (int32_t s = 0; s < args->n_scopes; s++) {
        job.keys[s] = cpa_kv_pool_of(&args->scopes[s].kv, CPA_KEYS);
        if (!kv->v_in_k) job.values[s] = cpa_kv_pool_of(&args->scopes[s].kv, CPA_VALUES);
    }
    cpa_host_run(stream, args->rows * kv->kv_heads * job.parts, attend_rows, &job);
    return CPA_OK;
}
