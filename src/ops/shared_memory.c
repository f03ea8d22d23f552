#include "src/ops/shared_memory.h"

#include <stdlib.h>
#include <string.h>

#include "src/ops/check_args.h"

enum { MAGIC = 0x4d415043 /* "CPAM" */ };

_Static_assert(sizeof(cpa_memory_mark) <= sizeof(cpa_shared_memory_handle), "a handle holds a mark");

static const cpa_shared_memory_table *table_of(const cpa_device *device) {
#ifdef CPA_HAVE_CUDA
    if (device->backend == CPA_BACKEND_CUDA) return &cpa_cuda_memory_sharing;
#endif
    (void)device;
    return &cpa_host_memory_sharing;
}

/* Of the caller's streams there may be any, and none need be: zeros are written through one of its own. */
static cpa_status clear(const cpa_shared_memory *memory, cpa_error *err) {
    const cpa_device_table *table = memory->device->table;
    enum { PIECE = 1 << 20 };
    cpa_stream *stream;
    char *zeros = calloc(1, PIECE);
    if (!zeros) return cpa_fail(err, CPA_NO_MEMORY, "shared memory: no memory for zeros");
    cpa_status status = table->stream_create(memory->device, &stream, err);
    if (status != CPA_OK) goto free_zeros;
    for (int64_t at = 0; at < memory->mark.bytes && status == CPA_OK; at += PIECE) {
        const int64_t left = memory->mark.bytes - at;
        status = table->copy((char *)memory->address + at, zeros, left < PIECE ? left : PIECE, stream);
    }
    if (status == CPA_OK) status = table->stream_sync(stream);
    if (status != CPA_OK) status = cpa_fail(err, status, "shared memory: %s", stream->error.message);
    table->stream_destroy(stream);
free_zeros:
    free(zeros);
    return status;
}

cpa_status cpa_shared_memory_create(cpa_device *device, int64_t bytes, cpa_shared_memory **out, cpa_error *err) {
    REQUIRE(err, device && out, "shared memory: %s is NULL", device ? "out" : "device");
    REQUIRE(err, bytes >= 1 && bytes <= CPA_MOST_BYTES, "shared memory: bytes is %lld, expected 1 to 2^60",
            (long long)bytes);
    cpa_shared_memory *memory = calloc(1, sizeof *memory);
    if (!memory) return cpa_fail(err, CPA_NO_MEMORY, "shared memory: no memory");
    memory->device = device;
    memory->is_own = 1;
    memory->mark = (cpa_memory_mark){.magic = MAGIC, .backend = (uint32_t)device->backend, .bytes = bytes};
    cpa_status status = table_of(device)->share(device, &memory->mark, &memory->address, err);
    if (status == CPA_OK) status = clear(memory, err);
    if (status != CPA_OK) {
        cpa_shared_memory_destroy(memory);
        return status;
    }
    *out = memory;
    return CPA_OK;
}

cpa_status cpa_shared_memory_open(cpa_device *device, const cpa_shared_memory_handle *handle, cpa_shared_memory **out,
                                  cpa_error *err) {
    REQUIRE(err, device && handle && out, "shared memory: %s is NULL", !device ? "device" : handle ? "out" : "handle");
    cpa_memory_mark mark;
    memcpy(&mark, handle->bytes, sizeof mark);
    REQUIRE(err, mark.magic == MAGIC && mark.bytes >= 1 && mark.bytes <= CPA_MOST_BYTES,
            "shared memory: the handle begins with %08x and says %lld bytes; expected %08x and 1 to 2^60", mark.magic,
            (long long)mark.bytes, MAGIC);
    REQUIRE(err, mark.backend == (uint32_t)device->backend, "shared memory: it is of back end %u, and the device of %d",
            mark.backend, (int)device->backend);
    cpa_shared_memory *memory = calloc(1, sizeof *memory);
    if (!memory) return cpa_fail(err, CPA_NO_MEMORY, "shared memory: no memory");
    memory->device = device;
    memory->mark = mark;
    const cpa_status status = table_of(device)->map(device, &mark, &memory->address, err);
    if (status != CPA_OK) {
        free(memory);
        return status;
    }
    *out = memory;
    return CPA_OK;
}

void cpa_shared_memory_destroy(cpa_shared_memory *memory) {
    if (!memory) return;
    const cpa_shared_memory_table *table = table_of(memory->device);
    if (memory->address)
        (memory->is_own ? table->unshare : table->unmap)(memory->device, &memory->mark, memory->address);
    free(memory);
}

void cpa_shared_memory_get_handle(const cpa_shared_memory *memory, cpa_shared_memory_handle *out) {
    if (!memory || !out) return;
    memset(out, 0, sizeof *out);
    memcpy(out->bytes, &memory->mark, sizeof memory->mark);
}

void *cpa_shared_memory_address(const cpa_shared_memory *memory) {
    return memory ? memory->address : NULL;
}

int64_t cpa_shared_memory_bytes(const cpa_shared_memory *memory) {
    return memory ? memory->mark.bytes : 0;
}
