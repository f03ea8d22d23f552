/* Programmatic dependent launch (compute capability 9.0 and later): a kernel whose CTAs may be placed while the one
 * before it in the stream still runs, which hides what a launch costs. */
#ifndef CPA_CUDA_DEPENDENT_CUH
#define CPA_CUDA_DEPENDENT_CUH

#include "kernels/cuda/cuda.h"

/* In the kernel before: from here on the next one may be placed. */
__device__ inline void dependent_allow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* In the dependent kernel: waits until the one before is done and its writes can be seen. */
__device__ inline void dependent_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Launches a kernel of one argument that begins with dependent_wait; an ordinary launch on earlier devices. */
template <typename Args>
cudaError_t launch_dependent(void (*kernel)(Args), dim3 grid, int threads, const Args &args, cpa_stream *stream) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.stream = cpa_cuda_handle(stream);
    config.attrs = &attribute;
    config.numAttrs = cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args);
}

#endif
