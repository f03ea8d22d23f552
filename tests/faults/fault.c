#include "tests/faults/fault.h"

#include <string.h>

cpa_fault cpa_fault_armed = CPA_FAULT_NONE, cpa_fault_named = CPA_FAULT_NONE;

cpa_fault cpa_fault_by_name(const char *name) {
    static const char *const names[CPA_FAULT_COUNT] = {
        "none",
        "dropped-shard",
        "stale-block",
        "off-by-one-mask",
        "base2-lse",
        "swapped-kv-head",
        "wrong-scale",
        "stale-hash",
        "uncounted-owner",
        "leaked-block",
        "early-reuse",
        "lost-sequence",
        "damaged-swap",
        "starved-waiter",
        "failed-rank",
        "nan-key",
        "uneven-unit",
        "early-hash",
        "adjusted-length",
        "flat-tree",
        "deep-prefix",
        "lost-rules",
        "rows-for-runs",
        "swapped-halves",
        "wrong-tile",
        "late-values",
        "wrong-choice",
        "stopped-last",
        "stopped-in-mpi",
    };
    int fault = 0;
    while (fault < CPA_FAULT_COUNT && strcmp(name, names[fault]) != 0) fault++;
    return (cpa_fault)fault;
}
