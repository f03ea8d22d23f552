/* linear: a panel of outputs for a tile of rows, of one product of the batch, is an item of work; neighbouring items
 * share their weights. */
#include "base/min_max.h"
#include "kernels/host/nn/linear_product.h"
#include "kernels/host/nn/nn.h"

typedef struct linear_job {
    const cpa_linear_args *args;
    cpa_linear_product product;
    int64_t tiles;  /* tiles of rows */
    int64_t panels; /* panels of weights */
} linear_job;

static void multiply_item(void *ctx, int64_t item, int32_t thread) {
    const linear_job *job = ctx;
    const cpa_linear_args *a = job->args;
    const int64_t of_batch = item / (job->panels * job->tiles), panel = item / job->tiles % job->panels;
    const int64_t first = item % job->tiles * CPA_LINEAR_ROWS, column = panel * CPA_LINEAR_OUTPUTS;
    const int64_t x_first = of_batch * a->x_batch_stride, out_first = of_batch * a->out_batch_stride + column;
    const cpa_linear_product product = cpa_linear_product_of_expert(&job->product, (int32_t)of_batch);
    const int rows = (int)cpa_min64(CPA_LINEAR_ROWS, a->rows - first);
    const char *x[CPA_LINEAR_ROWS];
    char *out[CPA_LINEAR_ROWS];
    (void)thread;
    for (int i = 0; i < rows; i++) {
        x[i] = (const char *)a->x + (x_first + (first + i) * a->x_stride) * cpa_dtype_bytes(a->dtype);
        out[i] = (char *)a->out + (out_first + (first + i) * a->out_stride) * cpa_dtype_bytes(a->out_dtype);
    }
    cpa_linear_multiply_panel(&product, panel, x, out, rows);
}

cpa_status cpa_host_linear(const cpa_linear_args *args, cpa_stream *stream) {
    const int64_t panels = (args->outputs + CPA_LINEAR_OUTPUTS - 1) / CPA_LINEAR_OUTPUTS;
    linear_job job = {.args = args, .tiles = (args->rows + CPA_LINEAR_ROWS - 1) / CPA_LINEAR_ROWS, .panels = panels};
    job.product = (cpa_linear_product){
        .multiply = cpa_linear_pick(cpa_host_device_of(stream)),
        .dtype = args->dtype,
        .out_dtype = args->out_dtype,
        .inputs = args->inputs,
        .outputs = args->outputs,
        .weight = args->weight,
        .weight_stride = args->weight_stride,
        .expert_stride = args->weight_batch_stride,
        .bias = args->bias,
        .scales = args->weight_scale,
        .scale_rows = args->weight_scale_rows,
        .scale_columns = args->weight_scale_columns,
    };
    cpa_host_run(stream, cpa_max64(args->batch, 1) * panels * job.tiles, multiply_item, &job);
    return CPA_OK;
}
