/* The inner loops of attend for AVX-512. */
#include "kernels/host/isa/isa_avx512.h"

#define ISA_ROWS 12

#include "kernels/host/attend/attend_vector.h"

/* behind it */
#include "kernels/host/attend/attend_twelve_rows.h"

static int supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
}

const cpa_attend_isa cpa_attend_avx512 = {
    .name = "AVX-512",
    .rows = ISA_ROWS,
    .lanes = PANEL,
    .supported = supported,
    .pack = pack_tile,
    .attend = attend_group,
};
