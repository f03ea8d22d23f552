/* gate / (1 + exp(-gate)); what is rounded to 16 bits afterwards may be off by a few units of the last place of
 * fp32. */
#ifndef CPA_CUDA_NN_SILU_CUH
#define CPA_CUDA_NN_SILU_CUH

template <typename T>
__device__ inline float silu(float gate) {
    return __fdividef(gate, 1 + __expf(-gate));
}
template <>
__device__ inline float silu<float>(float gate) {
    return gate / (1 + expf(-gate));
}

#endif
