/* The inner loops of attend for AVX2 with FMA and F16C. */
#include "kernels/host/isa/isa_avx2.h"

#define ISA_ROWS 6

#include "kernels/host/attend/attend_vector.h"

static void attend_group(const cpa_attend_tile *tile, const cpa_attend_group *group) {
    switch (group->rows) {
        case 1: attend_rows(1, tile, group); break;
        case 2: attend_rows(2, tile, group); break;
        case 3: attend_rows(3, tile, group); break;
        case 4: attend_rows(4, tile, group); break;
        case 5: attend_rows(5, tile, group); break;
        default: attend_rows(6, tile, group); break;
    }
}

static int supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const cpa_attend_isa cpa_attend_avx2 = {
    .name = "AVX2",
    .rows = ISA_ROWS,
    .lanes = PANEL,
    .supported = supported,
    .pack = pack_tile,
    .attend = attend_group,
};
