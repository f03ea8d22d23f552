/* merge: partial states of the same rows over disjoint keys, as the left fold of the two-state merge. */
#include "kernels/host/attend/attend_out.h"
#include "kernels/host/attend/attend_score.h"
#include "kernels/host/attend/state.h"
#include "kernels/host/device/host.h"

enum { ROWS_PER_ITEM = 16 };

typedef struct merge_job {
    const cpa_merge_args *args;
    int64_t out_row_stride;
    int64_t lse_head_stride, out_lse_row_stride, out_lse_head_stride; /* resolved */
} merge_job;

static int64_t row_of(const cpa_merge_args *args, int32_t state, int64_t row) {
    const int32_t *map = args->row_maps ? args->row_maps[state] : NULL;
    return map ? map[row] : row;
}

/* A row of a head of a state. */
typedef struct state_row {
    const char *o;
    const float *lse;
} state_row;

static state_row state_row_of(const merge_job *job, int32_t i, int64_t row, int32_t head) {
    const cpa_merge_args *args = job->args;
    const cpa_partial *state = &args->states[i];
    const int64_t o_row_stride = state->o_row_stride ? state->o_row_stride : (int64_t)args->heads * args->v_dim;
    const int64_t lse_row_stride = args->lse_head_stride   ? 1
                                   : state->lse_row_stride ? state->lse_row_stride
                                                           : args->heads;
    const int64_t at = row * o_row_stride + (int64_t)head * args->v_dim;
    return (state_row){.o = (const char *)state->o + at * cpa_dtype_bytes(args->state_dtype),
                       .lse = state->lse + row * lse_row_stride + head * job->lse_head_stride};
}

static char *out_row_of(const merge_job *job, int64_t row, int32_t head) {
    const int64_t at = row * job->out_row_stride + (int64_t)head * job->args->v_dim;
    return (char *)job->args->out + at * cpa_dtype_bytes(job->args->out_dtype);
}

static void store_o(const merge_job *job, int64_t row, int32_t head, const float *o) {
    const cpa_merge_args *args = job->args;
    cpa_host_store_row(out_row_of(job, row, head), o, args->out_dtype, args->out_scale, args->v_dim);
}

static void store_lse(const merge_job *job, int64_t row, int32_t head, float lse) {
    float *to = job->args->out_lse;
    if (to) to[row * job->out_lse_row_stride + head * job->out_lse_head_stride] = lse;
}

static void merge_head(const merge_job *job, int64_t row, int32_t head) {
    const cpa_merge_args *args = job->args;
    float o[CPA_MAX_HEAD_DIM] = {0}, lse = -INFINITY, wide[CPA_MAX_HEAD_DIM];
    for (int32_t i = 0; i < args->n_states; i++) {
        int64_t from = row_of(args, i, row);
        if (from < 0) continue;
        const state_row state = state_row_of(job, i, from, head);
        const float *part = (const float *)(const void *)state.o;
        float lse_b = args->lse_base2 ? *state.lse * (float)M_LN2 : *state.lse;
        if (args->foreign_lse && isnan(lse_b)) continue;
        if (args->state_dtype != CPA_F32) {
            cpa_widen(wide, state.o, args->state_dtype, args->v_dim);
            part = wide;
        }
        cpa_state_fold(o, &lse, part, lse_b, args->v_dim);
    }
    if (args->sink_logits) {
        const float factor = cpa_attend_sink_factor(lse, args->sink_logits[head]);
        for (int32_t d = 0; d < args->v_dim; d++) o[d] *= factor;
    }
    store_o(job, row, head, o);
    store_lse(job, row, head, args->lse_base2 ? lse * (float)M_LOG2E : lse);
}

/* A row that is that of the last state. */
static void take_head(const merge_job *job, int64_t row, int32_t head) {
    const cpa_merge_args *args = job->args;
    const int64_t from = row_of(args, args->n_states - 1, row);
    float o[CPA_MAX_HEAD_DIM] = {0}, lse = -INFINITY;
    int same = 0;
    if (from >= 0) {
        const state_row state = state_row_of(job, args->n_states - 1, from, head);
        same = args->out_dtype == args->state_dtype;
        lse = *state.lse;
        if (same)
            memmove(out_row_of(job, row, head), state.o, (size_t)(args->v_dim * cpa_dtype_bytes(args->out_dtype)));
        else
            cpa_widen(o, state.o, args->state_dtype, args->v_dim);
    }
    if (!same) store_o(job, row, head, o);
    store_lse(job, row, head, lse);
}

static void merge_rows(void *ctx, int64_t item, int32_t thread) {
    const merge_job *job = ctx;
    const int64_t merged = job->args->rows - job->args->tail_rows;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    (void)thread;
    if (end > job->args->rows) end = job->args->rows;
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        for (int32_t head = 0; head < job->args->heads; head++) {
            if (row < merged)
                merge_head(job, row, head);
            else
                take_head(job, row, head);
        }
    }
}

cpa_status cpa_host_merge(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream) {
    (void)awaited; /* transports of host memory hand nothing over */
    merge_job job = {
        .args = args,
        .out_row_stride = args->out_row_stride ? args->out_row_stride : (int64_t)args->heads * args->v_dim,
        .lse_head_stride = args->lse_head_stride ? args->lse_head_stride : 1,
        .out_lse_head_stride = args->out_lse_head_stride ? args->out_lse_head_stride : 1,
        .out_lse_row_stride = args->out_lse_head_stride  ? 1
                              : args->out_lse_row_stride ? args->out_lse_row_stride
                                                         : args->heads,
    };
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, merge_rows, &job);
    return CPA_OK;
}
