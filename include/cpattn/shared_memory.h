/* Memory of a device that processes of a host share. */
#ifndef CPATTN_SHARED_MEMORY_H
#define CPATTN_SHARED_MEMORY_H

#include <cpattn/device.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of a device that other processes of this host map: by CUDA IPC, and on the host as a file without a name. */
typedef struct cpa_shared_memory cpa_shared_memory;

/* What another process maps it by: plain bytes, which go through a pipe, a file or a message. Who has them and may map
 * (the same user, in namespaces of the same processes) may also write. */
typedef struct cpa_shared_memory_handle {
    uint8_t bytes[128];
} cpa_shared_memory_handle;

/* `bytes` bytes, 1 or more, zero, and not from cpa_device_options.memory; the process that creates them destroys them
 * last: mapped or not, on a CUDA device they are gone then. */
CPA_API cpa_status cpa_shared_memory_create(cpa_device *device, int64_t bytes, cpa_shared_memory **out, cpa_error *err);
/* Maps what another process has created, on a device of the same back end and, of several GPUs, on the same.
 * CPA_INVALID for bytes that are no handle or one of another device, CPA_IO (CUDA: CPA_DEVICE) where that process has
 * gone or may not be looked into; CUDA maps nothing in the process that has created it. */
CPA_API cpa_status cpa_shared_memory_open(cpa_device *device, const cpa_shared_memory_handle *handle,
                                          cpa_shared_memory **out, cpa_error *err);
/* Frees or unmaps it; before its device is closed, and when no stream uses it any more. NULL does nothing. */
CPA_API void cpa_shared_memory_destroy(cpa_shared_memory *memory);
CPA_API void cpa_shared_memory_get_handle(const cpa_shared_memory *memory, cpa_shared_memory_handle *out);
/* Its address on the device in this process; 0 bytes and NULL for NULL. */
CPA_API void *cpa_shared_memory_address(const cpa_shared_memory *memory);
CPA_API int64_t cpa_shared_memory_bytes(const cpa_shared_memory *memory);

#ifdef __cplusplus
}
#endif
#endif
