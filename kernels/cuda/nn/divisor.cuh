/* Many quotients by one number without a division each. With y = 1 / b, rounded, two steps of
 *     q += (x - b q) y
 * in fused multiply-adds from q = x y give x / b, rounded (Markstein, "Computation of elementary functions on the IBM
 * RISC System/6000 processor", 1990), where nothing under- or overflows on the way. */
#ifndef CPA_CUDA_NN_DIVISOR_CUH
#define CPA_CUDA_NN_DIVISOR_CUH

#include <math.h>

/* For codes of 8 bits: quotients have the sign of a division, and its bits where their magnitude is in [2^-20, 2^20].
 * The code is the same for all that is smaller, and for all that is larger. Infinities and NaN stay what they are. */
struct divisor {
    float by, inverse;
    bool refines; /* else a division it is */

    __device__ explicit divisor(float b) {
        by = b;
        inverse = __frcp_rn(b);
        refines = b > 0x1p-60f && b < 0x1p60f;
    }

    __device__ float divide(float x) const {
        if (!refines) return __fdiv_rn(x, by);
        const float first = x * inverse;
        float q = first;
#pragma unroll
        for (int step = 0; step < 2; step++) q = fmaf(fmaf(-by, q, x), inverse, q);
        return fabsf(first) < 0x1p21f ? copysignf(q, x) : first;
    }
};

#endif
