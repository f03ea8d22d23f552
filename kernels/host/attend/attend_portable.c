/* The inner loops of attend in vectors of four, which the compiler turns into
 * what the target has. */
#include "base/convert.h"

#define ISA_LANES 4
#define ISA_ROWS 4
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

#include "kernels/host/attend/attend_vector.h"

static void attend_group(const cpa_attend_tile *tile, const cpa_attend_group *group) {
    switch (group->rows) {
        case 1: attend_rows(1, tile, group); break;
        case 2: attend_rows(2, tile, group); break;
        case 3: attend_rows(3, tile, group); break;
        default: attend_rows(4, tile, group); break;
    }
}

static int supported(void) {
    return 1;
}

const cpa_attend_isa cpa_attend_portable = {
    .name = "portable",
    .rows = ISA_ROWS,
    .lanes = PANEL,
    .supported = supported,
    .pack = pack_tile,
    .attend = attend_group,
};
