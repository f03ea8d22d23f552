/* Products of rows with a matrix of weights, or with that of an expert: what linear and expert_linear share. */
#ifndef CPA_HOST_LINEAR_PRODUCT_H
#define CPA_HOST_LINEAR_PRODUCT_H

#include "kernels/host/device/host.h"
#include "kernels/host/nn/linear_tile.h"

typedef struct cpa_linear_product {
    cpa_linear_multiply *multiply;
    cpa_dtype dtype, out_dtype; /* dtype of x, bias and weights without scales; dtype of the result */
    int64_t inputs, outputs;
    const void *weight;
    int64_t weight_stride, expert_stride; /* elements; a code is one */
    const void *bias;                     /* NULL: none */
    const float *scales;                  /* [scale_rows, scale_columns] of each expert; NULL: weights are of dtype */
    int64_t scale_rows, scale_columns;
} cpa_linear_product;

/* For the instruction set that attend uses. */
cpa_linear_multiply *cpa_linear_pick(const cpa_host_device *device);

/* The product with the weights of an expert, given that of expert 0. */
cpa_linear_product cpa_linear_product_of_expert(const cpa_linear_product *first, int32_t expert);

/* Outputs [panel * CPA_LINEAR_OUTPUTS, ...) of 1 to CPA_LINEAR_ROWS rows; out[i] is where those of row x[i] begin. */
void cpa_linear_multiply_panel(const cpa_linear_product *product, int64_t panel, const char *const *x, char *const *out,
                               int rows);

#endif
