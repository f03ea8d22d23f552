#include <math.h>
#include <stdint.h>

#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/attend/state.h"
#include "kernels/host/device/host.h"

/* Rows that take a row of the matrix together. */
enum { ROWS_PER_ITEM = 8 };

/* An item is some rows of one head. */
static void project(void *ctx, int64_t item, int32_t thread) {
    const cpa_project_states_args *args = ctx;
    const int64_t head = item % args->heads, first = item / args->heads * ROWS_PER_ITEM;
    const int64_t end = cpa_min64(first + ROWS_PER_ITEM, args->rows), element = cpa_dtype_bytes(args->dtype);
    const char *matrix = (const char *)args->matrix + head * args->v_dim * args->out_dim * element;
    float column[CPA_MAX_HEAD_DIM];
    (void)thread;
    for (int64_t row = first; row < end; row++) {
        args->to.lse[row * args->to.lse_row_stride + head] = args->from.lse[row * args->from.lse_row_stride + head];
        memset(args->to.o + row * args->to.o_row_stride + head * args->out_dim, 0,
               (size_t)args->out_dim * sizeof(float));
    }
    for (int32_t d = 0; d < args->v_dim; d++) {
        cpa_widen(column, matrix + d * args->out_dim * element, args->dtype, args->out_dim);
        for (int64_t row = first; row < end; row++) {
            if (cpa_state_lse(args->from.lse[row * args->from.lse_row_stride + head]) == -INFINITY) continue;
            const float o = args->from.o[row * args->from.o_row_stride + head * args->v_dim + d];
            float *restrict to = args->to.o + row * args->to.o_row_stride + head * args->out_dim;
            for (int32_t i = 0; i < args->out_dim; i++) to[i] += o * column[i];
        }
    }
}

cpa_status cpa_host_project_states(const cpa_project_states_args *args, cpa_stream *stream) {
    cpa_project_states_args job = *args;
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM * args->heads, project, &job);
    return CPA_OK;
}
