/* Device memory of one process as another sees it, through CUDA IPC.
 *
 * A handle stands for a whole allocation, so an address travels as (allocation, offset). Handles are made and opened
 * once: an exporter remembers the allocations that it has shown, an importer those that it has mapped. CUDA numbers
 * allocations, and no number comes twice in a process: new memory at an old address is told from the old. */
#ifndef CPA_PEER_MEMORY_H
#define CPA_PEER_MEMORY_H

#include "comm/device/driver.h"

/* Where a rank wants to receive: as it travels. */
typedef struct cpa_peer_address {
    uint64_t allocation; /* the number of the allocation in the exporting process */
    uint64_t base;       /* the address of the allocation in the exporting process */
    uint64_t size;
    int64_t offset;
    int64_t bytes; /* bytes of the message */
    cudaIpcMemHandle_t handle;
} cpa_peer_address;

enum { CPA_PEER_KNOWN = 16 };

typedef struct cpa_peer_exports {
    cpa_peer_address known[CPA_PEER_KNOWN]; /* offset and bytes are not used */
    int64_t n;                              /* exported so far; the last CPA_PEER_KNOWN of them are in `known` */
} cpa_peer_exports;

/* The allocations of one peer that are mapped here. */
typedef struct cpa_peer_imports {
    struct {
        uint64_t allocation, base, size;
        char *mapped; /* NULL: free */
        int64_t used; /* when, in calls */
    } known[CPA_PEER_KNOWN];
    int64_t calls;
} cpa_peer_imports;

/* The address of `bytes` bytes of device memory. CPA_UNSUPPORTED for memory that does not come from cudaMalloc. */
cpa_status cpa_peer_export(cpa_peer_exports *exports, const cpa_driver *driver, const void *memory, int64_t bytes,
                           cpa_peer_address *out, cpa_error *err);

/* The mapped address, or NULL if the allocation is not mapped yet. */
void *cpa_peer_find(cpa_peer_imports *imports, const cpa_peer_address *address);
/* Maps it. This unmaps what the exporter must have freed, and what was used longest ago if there are too many: nothing
 * may be on its way to this peer. */
cpa_status cpa_peer_map(cpa_peer_imports *imports, const cpa_peer_address *address, void **out, cpa_error *err);
void cpa_peer_unmap_all(cpa_peer_imports *imports);

#endif
