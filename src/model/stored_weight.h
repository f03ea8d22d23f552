/* A tensor of weights as numbers, in either form that checkpoints have: elements of a plain dtype, or codes of
 * F8_E4M3 with a scale for each block of 128 x 128 (DeepSeek-AI, arXiv:2412.19437, section 3.3), where w = code * scale
 * and the scales are a tensor beside it, NAME_scale_inv, [ceil(rows / 128), ceil(columns / 128)] in fp32. */
#ifndef CPA_MODEL_STORED_WEIGHT_H
#define CPA_MODEL_STORED_WEIGHT_H

#include "src/model/safetensors.h"

enum { CPA_STORED_WEIGHT_BLOCK = 128 }; /* rows, and columns, that share a scale */

typedef struct cpa_stored_weight {
    const cpa_tensor *tensor;
    const cpa_tensor *scales; /* NULL: the elements are plain */
} cpa_stored_weight;

/* CPA_INVALID names a tensor that is missing, or scales that are missing, of another shape, or not above 0;
 * CPA_UNSUPPORTED another dtype. *out is set only on success, and ends with the files. */
cpa_status cpa_stored_weight_find(const cpa_safetensors *files, const char *name, cpa_stored_weight *out,
                                  cpa_error *err);

/* out = the elements [first, first + n), counted row after row. Any threads at once. */
void cpa_stored_weight_read(const cpa_stored_weight *weight, int64_t first, int64_t n, float *out);

#endif
