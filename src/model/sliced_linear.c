#include "src/model/sliced_linear.h"

#include <cpattn/ops.h>

#include "base/check.h"

int64_t cpa_slice_unit(int64_t width, int32_t ranks) {
    static const int64_t units[] = {64, 16, 8, 4, 1};
    for (int i = 0; i < (int)(sizeof units / sizeof *units); i++)
        if (width % units[i] == 0 && width / units[i] >= ranks) return units[i];
    return 0;
}

int64_t cpa_slice_most(int64_t width, int32_t ranks) {
    const int64_t unit = cpa_slice_unit(width, ranks);
    return unit ? (width / unit + ranks - 1) / ranks * unit : width;
}

cpa_slice cpa_slice_of_units(int64_t units, int64_t unit, int32_t ranks, int32_t rank) {
    const int64_t begin = unit * cpa_slice_begin(units, ranks, rank);
    return (cpa_slice){begin, unit * cpa_slice_begin(units, ranks, rank + 1) - begin};
}

cpa_slice cpa_slice_of(int64_t width, int32_t ranks, int32_t rank) {
    const int64_t unit = cpa_slice_unit(width, ranks);
    return cpa_slice_of_units(width / unit, unit, ranks, rank);
}

cpa_status cpa_sliced_outputs(const cpa_slices *slices, const cpa_linear_args *whole, int is_own, void *part,
                              cpa_stream *stream) {
    const cpa_slice own = cpa_slice_of(whole->outputs, slices->ranks, slices->rank);
    const int64_t first = is_own ? 0 : own.begin;
    const int64_t bytes = cpa_dtype_bytes(whole->dtype), out_bytes = cpa_dtype_bytes(whole->out_dtype);
    cpa_linear_args args = *whole;
    args.outputs = (int32_t)own.count;
    args.weight = (const char *)whole->weight + first * whole->inputs * bytes;
    if (whole->bias) args.bias = (const char *)whole->bias + first * bytes;
    args.out = whole->rows == 1 ? (char *)whole->out + own.begin * out_bytes : part;
    CPA_TRY(cpa_linear(&args, stream));
    const cpa_slice_gather gather = {.size = sizeof gather,
                                     .rows = whole->rows,
                                     .width = whole->outputs,
                                     .unit = cpa_slice_unit(whole->outputs, slices->ranks),
                                     .dtype = whole->out_dtype,
                                     .part = args.out,
                                     .out = whole->out};
    return slices->gather(slices->ctx, &gather, stream);
}

cpa_status cpa_sliced_inputs(const cpa_slices *slices, const cpa_linear_args *whole, cpa_slice own, int is_own,
                             void *part, cpa_stream *stream) {
    cpa_linear_args args = *whole;
    args.inputs = (int32_t)own.count;
    args.out_dtype = CPA_F32;
    if (!is_own) args.weight = (const char *)whole->weight + own.begin * cpa_dtype_bytes(whole->dtype);
    args.weight_stride = is_own ? own.count : whole->inputs;
    args.bias = NULL;
    args.out = part;
    CPA_TRY(cpa_linear(&args, stream));
    const cpa_slice_sum sum = {.size = sizeof sum,
                               .rows = whole->rows,
                               .width = whole->outputs,
                               .dtype = whole->dtype,
                               .part = part,
                               .bias = whole->bias,
                               .out = whole->out};
    return slices->sum(slices->ctx, &sum, stream);
}
