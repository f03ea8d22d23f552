/* Products of which each rank computes a slice, of the outputs or of the inputs; all ranks have the whole outcome. A
 * slice is a view of the whole matrix, or all that lies on the rank. */
#ifndef CPA_MODEL_SLICED_LINEAR_H
#define CPA_MODEL_SLICED_LINEAR_H

#include <cpattn/model.h>
#include <cpattn/nn.h>

/* Elements that a slice is a multiple of where that leaves none empty, so that its rows stay aligned; 0: there are
 * fewer than ranks. */
int64_t cpa_slice_unit(int64_t width, int32_t ranks);
/* The most that a rank has of a width. */
int64_t cpa_slice_most(int64_t width, int32_t ranks);

/* What a rank has of a width. */
typedef struct cpa_slice {
    int64_t begin, count;
} cpa_slice;
cpa_slice cpa_slice_of(int64_t width, int32_t ranks, int32_t rank);
/* What it has of so many units of a width each, such as heads, of which it has whole ones. */
cpa_slice cpa_slice_of_units(int64_t units, int64_t unit, int32_t ranks, int32_t rank);

/* `whole` is the product as one rank would compute it, out [rows, outputs] contiguous; with is_own its weight and bias
 * are the slice alone. Outputs are sliced; `part` has room for the rows of the own ones, in the dtype of out. */
cpa_status cpa_sliced_outputs(const cpa_slices *slices, const cpa_linear_args *whole, int is_own, void *part,
                              cpa_stream *stream);
/* Inputs are sliced: whole->x has the own ones alone, `own`, of whole->inputs, and with is_own the weight too; the bias
 * is whole. `part` has room for [rows, outputs] in fp32. The sum is rounded to whole->dtype, that of out. */
cpa_status cpa_sliced_inputs(const cpa_slices *slices, const cpa_linear_args *whole, cpa_slice own, int is_own,
                             void *part, cpa_stream *stream);

#endif
