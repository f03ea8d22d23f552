#include "kernels/key_workspace.h"

#include "base/min_max.h"

cpa_key_workspace cpa_key_workspace_open(cpa_device *device, int64_t bytes, int64_t least) {
    for (;; bytes = cpa_max64(bytes / 2, least)) {
        void *memory;
        cpa_error err;
        if (device->table->alloc(device, bytes, &memory, &err) == CPA_OK) return (cpa_key_workspace){memory, bytes};
        if (bytes <= least) return (cpa_key_workspace){NULL, 0};
    }
}
