/* rmsnorm whose rows become codes. */
#ifndef CPA_CUDA_NN_RMSNORM_CODES_H
#define CPA_CUDA_NN_RMSNORM_CODES_H

#include "kernels/cuda/nn/nn.h"

/* Of at most INT32_MAX rows; the device of the stream is selected. */
extern "C" cpa_status cpa_cuda_rmsnorm_codes(const cpa_rmsnorm_args *args, cpa_stream *stream);

#endif
