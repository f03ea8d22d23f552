/* GCC vector code for inner loops. A file that has included isa_portable.h, isa_avx2.h or isa_avx512.h, which define
 *     ISA_LANES                floats in a vector
 *     ISA_CELL                 side of the squares that are transposed
 *     isa_fma(a, b, c)         a * b + c
 *     isa_load(from, dtype)    ISA_LANES elements as a vector of floats
 *     isa_transpose(to, stride, rows, dtype, d)
 *                              elements [d, d + ISA_CELL) of rows [ISA_CELL]: element d + i of row j as a float to
 *                              to[i * stride + j]
 * and includes this one gets vectors of floats in memory of any alignment. */
#ifndef CPA_HOST_ISA_VECTOR_H
#define CPA_HOST_ISA_VECTOR_H

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(ISA_LANES * 4)));
/* The same in memory that is aligned only as floats are. */
typedef float loose_vec __attribute__((vector_size(ISA_LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *from) {
    return *(const loose_vec *)from;
}

INLINE void store(float *to, vec value) {
    *(loose_vec *)to = value;
}

INLINE vec broadcast(float value) {
    return value - (vec){0};
}

#endif
