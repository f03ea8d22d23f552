/* expert_linear: a panel of an expert's outputs for a tile of its rows is an item of work, as in linear, so that a row
 * has the bits that linear gives it; neighbouring items share their weights. */
#include <math.h>

#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/linear_product.h"
#include "kernels/host/nn/nn.h"

typedef struct experts_job {
    const cpa_expert_linear_args *args;
    cpa_linear_product product; /* that of the first expert */
    int64_t panels;
    int32_t begin[CPA_MOST_EXPERTS], end[CPA_MOST_EXPERTS]; /* places of each expert */
    int64_t first_item[CPA_MOST_EXPERTS + 1];
} experts_job;

/* The last expert whose items begin at or before this one. */
static int32_t expert_of(const experts_job *job, int64_t item) {
    int32_t low = 0, high = job->args->experts;
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (job->first_item[middle] <= item) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Row of x of a place; -1: x does not have it. */
static int64_t row_of(const cpa_expert_linear_args *a, int64_t place) {
    const int64_t row = a->tokens ? (int64_t)a->tokens[place] : place;
    return row < a->x_rows ? row : -1;
}

static void fill_with_nan(const cpa_expert_linear_args *a, char *out, int64_t n) {
    const float nan = NAN;
    for (int64_t i = 0; i < n; i++) cpa_narrow(out + i * cpa_dtype_bytes(a->out_dtype), &nan, a->out_dtype, 1);
}

static void multiply_item(void *ctx, int64_t item, int32_t thread) {
    const experts_job *job = ctx;
    const cpa_expert_linear_args *a = job->args;
    const int32_t e = expert_of(job, item);
    const int64_t places = job->end[e] - job->begin[e], tiles = (places + CPA_LINEAR_ROWS - 1) / CPA_LINEAR_ROWS;
    const int64_t panel = (item - job->first_item[e]) / tiles, tile = (item - job->first_item[e]) % tiles;
    const int64_t first = job->begin[e] + tile * CPA_LINEAR_ROWS, column = panel * CPA_LINEAR_OUTPUTS;
    const int rows = (int)cpa_min64(CPA_LINEAR_ROWS, job->end[e] - first);
    const cpa_linear_product product = cpa_linear_product_of_expert(&job->product, e);
    const char *x[CPA_LINEAR_ROWS];
    char *out[CPA_LINEAR_ROWS];
    int n = 0;
    (void)thread;
    for (int64_t place = first; place < first + rows; place++) {
        const int64_t row = row_of(a, place);
        char *to = (char *)a->out + (place * a->out_stride + column) * cpa_dtype_bytes(a->out_dtype);
        if (row < 0) {
            fill_with_nan(a, to, cpa_min64(CPA_LINEAR_OUTPUTS, a->outputs - column));
        } else {
            x[n] = (const char *)a->x + row * a->x_stride * cpa_dtype_bytes(a->dtype);
            out[n++] = to;
        }
    }
    if (n > 0) cpa_linear_multiply_panel(&product, panel, x, out, n);
}

cpa_status cpa_host_expert_linear(const cpa_expert_linear_args *args, cpa_stream *stream) {
    experts_job job = {.args = args, .panels = (args->outputs + CPA_LINEAR_OUTPUTS - 1) / CPA_LINEAR_OUTPUTS};
    job.product = (cpa_linear_product){
        .multiply = cpa_linear_pick(cpa_host_device_of(stream)),
        .dtype = args->dtype,
        .out_dtype = args->out_dtype,
        .inputs = args->inputs,
        .outputs = args->outputs,
        .weight = args->weight,
        .weight_stride = args->weight_stride,
        .expert_stride = args->expert_stride,
        .scales = args->weight_scale,
        .scale_rows = args->weight_scale_rows,
        .scale_columns = args->weight_scale_columns,
    };
    for (int32_t e = 0; e < args->experts; e++) {
        const int64_t begin = cpa_min64(cpa_max64(args->offsets[e], 0), args->rows);
        const int64_t end = cpa_max64(cpa_min64(args->offsets[e + 1], args->rows), begin);
        job.begin[e] = (int32_t)begin, job.end[e] = (int32_t)end;
        job.first_item[e + 1] =
            job.first_item[e] + job.panels * ((end - begin + CPA_LINEAR_ROWS - 1) / CPA_LINEAR_ROWS);
    }
    cpa_host_run(stream, job.first_item[args->experts], multiply_item, &job);
    return CPA_OK;
}
