#ifndef CPA_CUDA_LAUNCH_BOUNDS_CUH
#define CPA_CUDA_LAUNCH_BOUNDS_CUH

/* CTAs that a multiprocessor is to hold, for __launch_bounds__: before 9.0 ptxas, left to itself, spills to hold more. */
constexpr int ctas_before_9(int ctas) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return ctas;
#else
    (void)ctas;
    return 0;
#endif
}

#endif
