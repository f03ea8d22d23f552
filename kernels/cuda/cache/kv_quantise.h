/* kv_write for quantised caches; the device is current and there are tokens. */
#ifndef CPA_CUDA_KV_QUANTISE_H
#define CPA_CUDA_KV_QUANTISE_H

#include "kernels/device.h"

extern "C" cpa_status cpa_cuda_kv_quantise(const cpa_kv_write_args *args, cpa_stream *stream);

#endif
