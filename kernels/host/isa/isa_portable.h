/* Vectors of four, which the compiler turns into what the target has (vector.h says what each name is). */
#ifndef CPA_HOST_ISA_PORTABLE_H
#define CPA_HOST_ISA_PORTABLE_H

#include "base/convert.h"

#define ISA_LANES 4
#define ISA_CELL 4
#define isa_fma(a, b, c) ((a) * (b) + (c))

typedef float isa_vec __attribute__((vector_size(ISA_LANES * 4)));

static inline isa_vec isa_load(const char *from, cpa_dtype dtype) {
    isa_vec value;
    float wide[ISA_LANES];
    cpa_widen(wide, from, dtype, ISA_LANES);
    memcpy(&value, wide, sizeof value);
    return value;
}

static inline void isa_transpose(float *to, int64_t stride, const char *const *rows, cpa_dtype dtype, int32_t d) {
    for (int j = 0; j < ISA_CELL; j++) {
        float row[ISA_CELL];
        cpa_widen(row, rows[j] + d * cpa_dtype_bytes(dtype), dtype, ISA_CELL);
        for (int i = 0; i < ISA_CELL; i++) to[i * stride + j] = row[i];
    }
}

#endif
