/* The rule between pass-KV and pass-Q for tests that are about something else. */
#ifndef CPA_TESTS_PLANNER_FIXTURE_H
#define CPA_TESTS_PLANNER_FIXTURE_H

#include "src/planner.h"

static inline cpa_planner cpa_test_planner(int32_t ranks) {
    return (cpa_planner){.cp_size = ranks,
                         .q_heads = 8,
                         .kv_heads = 2,
                         .k_dim = 64,
                         .v_dim = 64,
                         .element_bytes = 2,
                         .flops = 1e10,
                         .bandwidth = 1e9};
}

#endif
