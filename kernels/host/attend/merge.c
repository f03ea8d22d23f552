/* merge: partial states of the same rows over disjoint keys, as the left fold of the two-state merge. */
#include "base/convert.h"
#include "kernels/host/attend/state.h"
#include "kernels/host/device/host.h"

enum { ROWS_PER_ITEM = 16 };

typedef struct merge_job {
    const cpa_merge_args *args;
    int64_t out_row_stride, out_lse_row_stride;
} merge_job;

static int64_t row_of(const cpa_merge_args *args, int32_t state, int64_t row) {
    const int32_t *map = args->row_maps ? args->row_maps[state] : NULL;
    return map ? map[row] : row;
}

static void merge_head(const merge_job *job, int64_t row, int32_t head) {
    const cpa_merge_args *args = job->args;
    float o[CPA_MAX_HEAD_DIM] = {0}, lse = -INFINITY;
    for (int32_t i = 0; i < args->n_states; i++) {
        cpa_partial state = cpa_partial_resolve(args->states[i], args->heads, args->v_dim);
        int64_t from = row_of(args, i, row);
        if (from < 0) continue;
        float lse_b = state.lse[from * state.lse_row_stride + head];
        if (args->foreign_lse && isnan(lse_b)) continue;
        cpa_state_fold(o, &lse, state.o + from * state.o_row_stride + (int64_t)head * args->v_dim, lse_b, args->v_dim);
    }
    int64_t at = row * job->out_row_stride + (int64_t)head * args->v_dim;
    cpa_narrow((char *)args->out + at * cpa_dtype_bytes(args->out_dtype), o, args->out_dtype, args->v_dim);
    if (args->out_lse) args->out_lse[row * job->out_lse_row_stride + head] = lse;
}

static void merge_rows(void *ctx, int64_t item, int32_t thread) {
    const merge_job *job = ctx;
    int64_t end = (item + 1) * ROWS_PER_ITEM;
    (void)thread;
    if (end > job->args->rows) end = job->args->rows;
    for (int64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        for (int32_t head = 0; head < job->args->heads; head++) merge_head(job, row, head);
    }
}

cpa_status cpa_host_merge(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream) {
    (void)awaited; /* transports of host memory hand nothing over */
    merge_job job = {args, args->out_row_stride, args->out_lse_row_stride};
    if (!job.out_row_stride) job.out_row_stride = (int64_t)args->heads * args->v_dim;
    if (!job.out_lse_row_stride) job.out_lse_row_stride = args->heads;
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, merge_rows, &job);
    return CPA_OK;
}
