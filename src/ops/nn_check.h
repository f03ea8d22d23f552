/* Checks that the operators beside attention share. */
#ifndef CPA_OPS_NN_CHECK_H
#define CPA_OPS_NN_CHECK_H

#include <cpattn/nn.h>

#include "src/ops/check_args.h"

/* Elements of a row. */
enum { CPA_NN_MOST_WIDTH = 1 << 24 };

cpa_status cpa_nn_check_count(const char *where, const char *name, int64_t count, int64_t least, int64_t most,
                              cpa_error *err);
cpa_status cpa_nn_check_finite(const char *where, const char *name, float number, float least, cpa_error *err);
/* A field that is 0 or 1. */
cpa_status cpa_nn_check_flag(const char *where, const char *name, int32_t flag, cpa_error *err);

/* A tensor of rows, which may be NULL where it is optional or has no elements. */
typedef struct cpa_nn_tensor {
    const char *name, *stride_name;
    const void *memory;
    int64_t *stride; /* NULL: contiguous; 0 becomes the width */
    int64_t rows, width, element_bytes;
    int optional;
} cpa_nn_tensor;
cpa_status cpa_nn_check_tensor(const char *where, cpa_nn_tensor tensor, cpa_error *err);

/* Whether scales of FP8 weights have one of the two shapes of cpattn/experts.h. */
cpa_status cpa_nn_check_weight_scale(const char *where, int64_t outputs, int64_t inputs, int64_t rows, int64_t columns,
                                     cpa_error *err);

/* `out` may be x where it has the stride of x. */
cpa_status cpa_nn_check_in_place(const char *where, const void *x, int64_t x_stride, const void *out,
                                 int64_t out_stride, cpa_error *err);

#endif
