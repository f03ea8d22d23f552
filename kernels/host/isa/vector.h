/* GCC vector code for inner loops. A file that has included isa_portable.h, isa_avx2.h or isa_avx512.h, which define
 *     ISA_LANES                floats in a vector
 *     ISA_CELL                 side of the squares that are transposed
 *     isa_fma(a, b, c)         a * b + c
 *     isa_load(from, dtype)    ISA_LANES elements as a vector of floats
 *     isa_transpose(to, stride, rows, dtype, d)
 *                              elements [d, d + ISA_CELL) of rows [ISA_CELL]: element d + i of row j as a float to
 *                              to[i * stride + j]
 * and, where its instructions are faster than vector.h's own,
 *     isa_max(a, b)            b where it is larger than a, and else a
 *     isa_max_of(a)            the largest element, if none is NaN
 *     isa_sum_of(a)            the sum of element i and i + ISA_LANES / 2, and so on with the halves
 *     isa_zero_below(a, x, least)
 *                              a, but 0 where x is below `least`
 * and includes this one gets vectors of floats in memory of any alignment. */
#ifndef CPA_HOST_ISA_VECTOR_H
#define CPA_HOST_ISA_VECTOR_H

#include <string.h>

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

typedef int32_t ivec __attribute__((vector_size(ISA_LANES * 4)));

#ifndef isa_max
INLINE vec isa_max(vec a, vec b) {
    ivec larger = b > a;
    return (vec)(((ivec)b & larger) | ((ivec)a & ~larger));
}

INLINE float isa_max_of(vec value) {
    float max = value[0];
    for (int i = 1; i < ISA_LANES; i++) max = value[i] > max ? value[i] : max;
    return max;
}

INLINE float isa_sum_of(vec value) {
    float part[ISA_LANES];
    memcpy(part, &value, sizeof part);
    for (int width = ISA_LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    }
    return part[0];
}

INLINE vec isa_zero_below(vec value, vec x, float least) {
    ivec below = x < least;
    return (vec)((ivec)value & ~below);
}
#endif

#endif
