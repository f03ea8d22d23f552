/* linear: a panel of outputs for a tile of rows is an item of work; neighbouring items share their weights. */
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/linear_tile.h"
#include "kernels/host/nn/nn.h"

typedef struct linear_job {
    const cpa_linear_args *args;
    cpa_linear_multiply *multiply;
    int64_t tiles;  /* tiles of rows */
    int64_t panels; /* panels of weights */
} linear_job;

/* For the instruction set that attend uses. */
static cpa_linear_multiply *pick(const cpa_host_device *device) {
#ifdef __x86_64__
#ifndef CPA_WITHOUT_AVX512
    if (device->isa == &cpa_attend_avx512) return cpa_linear_avx512;
#endif
    if (device->isa == &cpa_attend_avx2) return cpa_linear_avx2;
#endif
    (void)device;
    return cpa_linear_portable;
}

/* Product `index` of a batch, alone. */
static cpa_linear_args one_of(const cpa_linear_args *a, int64_t index) {
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    cpa_linear_args one = *a;
    one.x = (const char *)a->x + index * a->x_batch_stride * bytes;
    one.weight = (const char *)a->weight + index * a->weight_batch_stride * bytes;
    one.out = (char *)a->out + index * a->out_batch_stride * cpa_dtype_bytes(a->out_dtype);
    return one;
}

/* Outputs [first, first + tile->outputs) of a row, lane `lane` of the tile: bias, rounding. */
static void store_row(const cpa_linear_args *a, const cpa_linear_tile *tile, int lane, int64_t row, int64_t first) {
    const int64_t bytes = cpa_dtype_bytes(a->dtype), out_bytes = cpa_dtype_bytes(a->out_dtype);
    float sums[CPA_LINEAR_OUTPUTS], bias[CPA_LINEAR_OUTPUTS] = {0};
    if (a->bias) cpa_widen(bias, (const char *)a->bias + first * bytes, a->dtype, tile->outputs);
    for (int64_t o = 0; o < tile->outputs; o++) sums[o] = tile->sums[o * CPA_LINEAR_ROWS + lane] + bias[o];
    cpa_narrow((char *)a->out + (row * a->out_stride + first) * out_bytes, sums, a->out_dtype, tile->outputs);
}

static void multiply_panel(void *ctx, int64_t item, int32_t thread) {
    const linear_job *job = ctx;
    const cpa_linear_args one = one_of(job->args, item / (job->tiles * job->panels)), *a = &one;
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    const int64_t first = item / job->tiles % job->panels * CPA_LINEAR_OUTPUTS,
                  row = item % job->tiles * CPA_LINEAR_ROWS;
    const int64_t rows = cpa_min64(CPA_LINEAR_ROWS, a->rows - row);
    float sums[CPA_LINEAR_OUTPUTS * CPA_LINEAR_ROWS];
    cpa_linear_tile tile = {
        .dtype = a->dtype,
        .inputs = a->inputs,
        .rows = (int)rows,
        .weight = (const char *)a->weight + first * a->weight_stride * bytes,
        .weight_stride = a->weight_stride * bytes,
        .outputs = cpa_min64(CPA_LINEAR_OUTPUTS, a->outputs - first),
        .sums = sums,
    };
    (void)thread;
    for (int64_t i = 0; i < CPA_LINEAR_ROWS; i++)
        tile.x[i] = (const char *)a->x + (row + cpa_min64(i, rows - 1)) * a->x_stride * bytes;
    job->multiply(&tile);
    for (int lane = 0; lane < rows; lane++) store_row(a, &tile, lane, row + lane, first);
}

cpa_status cpa_host_linear(const cpa_linear_args *args, cpa_stream *stream) {
    const int64_t panels = (args->outputs + CPA_LINEAR_OUTPUTS - 1) / CPA_LINEAR_OUTPUTS;
    const linear_job job = {args, pick(cpa_host_device_of(stream)),
                            (args->rows + CPA_LINEAR_ROWS - 1) / CPA_LINEAR_ROWS, panels};
    cpa_host_run(stream, args->batch * panels * job.tiles, multiply_panel, (void *)(uintptr_t)&job);
    return CPA_OK;
}
