/* The inner loops of attend in vectors of four, which the compiler turns into
 * what the target has. */
#include "kernels/host/isa/isa_portable.h"

#define ISA_ROWS 4

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
