/* Parts of a model's tensors that the check reads, brought from the device as floats. */
#ifndef CPA_VERIFY_TENSOR_H
#define CPA_VERIFY_TENSOR_H

#include "src/worker/worker.h"

typedef struct cpa_verify_tensor {
    const void *from; /* place on the device of what is held; NULL: nothing is */
    float *values;
    void *raw; /* the elements as they lie on the device */
    int64_t capacity;
} cpa_verify_tensor;

/* Brings n elements, unless they are held: nothing of a model's tensors changes once it has told of them. Waits for the
 * stream. */
cpa_status cpa_verify_tensor_take(cpa_verify_tensor *tensor, const cpa_worker *worker, const void *from,
                                  cpa_dtype dtype, int64_t n, cpa_error *err);
void cpa_verify_tensor_free(cpa_verify_tensor *tensor);

#endif
