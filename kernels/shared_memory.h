/* The contract between the library and a back end for memory that processes of a host share. It comes from the back end
 * itself, not from a caller's allocator. */
#ifndef CPA_KERNELS_SHARED_MEMORY_H
#define CPA_KERNELS_SHARED_MEMORY_H

#include "kernels/device.h"

/* What other processes of the host map memory by; it travels as bytes. `system` is the operating system's part: a
 * process and its file descriptor, or CUDA's handle. */
typedef struct cpa_memory_mark {
    uint32_t magic, backend;
    int64_t bytes;
    char pci_address[CPA_PCI_ADDRESS_BYTES]; /* of the device; the host: empty */
    union {
        struct {
            int64_t process, descriptor;
            uint64_t file; /* its inode: another file may have the number by now */
        } host;
        uint8_t ipc[64];
    } system;
} cpa_memory_mark;

typedef struct cpa_shared_memory_table {
    /* Allocates memory of mark->bytes, and sets pci_address and `system` of the mark; frees it. */
    cpa_status (*share)(cpa_device *device, cpa_memory_mark *mark, void **out, cpa_error *err);
    void (*unshare)(cpa_device *device, const cpa_memory_mark *mark, void *memory);
    /* Maps what another process shares, and unmaps it. The mark, which came as bytes, is of this back end; whether it
     * is of this device, and of anything, is for map to say. */
    cpa_status (*map)(cpa_device *device, const cpa_memory_mark *mark, void **out, cpa_error *err);
    void (*unmap)(cpa_device *device, const cpa_memory_mark *mark, void *memory);
} cpa_shared_memory_table;

extern const cpa_shared_memory_table cpa_host_memory_sharing;
extern const cpa_shared_memory_table cpa_cuda_memory_sharing; /* in builds that define CPA_HAVE_CUDA */

#endif
