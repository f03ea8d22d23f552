/* Programmatic dependent launch on compute capability 9.0: a kernel whose CTAs may be placed while the one before it in
 * the stream still runs, which hides what a launch costs. Later devices run the code for 8.0, which does not wait:
 * there every launch is an ordinary one. */
#ifndef CPA_BASE_DEPENDENT_CUH
#define CPA_BASE_DEPENDENT_CUH

#include <cuda_runtime.h>

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

/* Launches a kernel of one argument whose threads all come to dependent_wait; early: the device is of 9.0. A kernel of
 * many CTAs is better not placed before one that waits for other devices: they would fill the multiprocessors
 * meanwhile. */
template <typename Args>
cudaError_t launch_dependent(void (*kernel)(Args), dim3 grid, int threads, const Args &args, bool early,
                             cudaStream_t stream, size_t shared_bytes = 0) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args);
}

#endif
