/* The public functions of devices, their memory and streams: arguments are checked here, then the table of the back end
 * runs. */
#include <cpattn/device.h>

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"

enum { MAX_THREADS = 4096 };

/* The table of a back end; NULL if this build does not have it. */
static const cpa_backend_table *backend_of(cpa_backend backend) {
#ifdef CPA_HAVE_CUDA
    if (backend == CPA_BACKEND_CUDA) return &cpa_backend_cuda;
#endif
    return backend == CPA_BACKEND_HOST ? &cpa_backend_host : NULL;
}

int32_t cpa_device_count(cpa_backend backend) {
    const cpa_backend_table *table = backend_of(backend);
    return table ? table->device_count() : 0;
}

int64_t cpa_device_free_memory(cpa_backend backend, int32_t ordinal) {
    const cpa_backend_table *table = backend_of(backend);
    return table ? table->free_memory(ordinal) : 0;
}

void cpa_device_pci_address(cpa_backend backend, int32_t ordinal, char out[CPA_PCI_ADDRESS_BYTES]) {
    const cpa_backend_table *table = backend_of(backend);
    if (!out) return;
    out[0] = 0;
    if (table) table->pci_address(ordinal, out);
}

cpa_status cpa_device_open(const cpa_device_options *given, cpa_device **out, cpa_error *err) {
    cpa_device_options options;
    CPA_TRY(CPA_STRUCT_TAKE("device", given, cpa_device_options, backend, &options, err));
    REQUIRE(err, out, "device: out is NULL");
    const cpa_backend_table *table = backend_of(options.backend);
    REQUIRE(err, table, "device: backend is %d, which this build does not have", (int)options.backend);
    REQUIRE(err, options.threads >= 0 && options.threads <= MAX_THREADS, "device: threads is %d, expected 0..%d",
            options.threads, MAX_THREADS);
    REQUIRE(err, options.n_cpus >= 0 && (options.n_cpus == 0 || options.cpus), "device: n_cpus is %d and cpus is %s",
            options.n_cpus, options.cpus ? "set" : "NULL");
    CPA_TRY(cpa_check_aligned("device", "cpus", options.cpus, sizeof *options.cpus, err));
    REQUIRE(err, options.debug_checks == 0 || options.debug_checks == 1, "device: debug_checks is %d, expected 0 or 1",
            options.debug_checks);
    REQUIRE(err, CPA_RESERVED_IS_ZERO(options), "device: the reserved bytes of the options are not zero");
    REQUIRE(err, !options.memory.alloc == !options.memory.free, "device: memory.%s is NULL, expected both or none",
            options.memory.alloc ? "free" : "alloc");
    CPA_TRY(table->open(&options, out, err));
    (*out)->debug_checks = options.debug_checks;
    (*out)->memory = options.memory;
    return CPA_OK;
}

void cpa_device_close(cpa_device *device) {
    if (device) device->table->close(device);
}

const char *cpa_device_description(const cpa_device *device) {
    return device ? device->description : "";
}

cpa_status cpa_device_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err) {
    REQUIRE(err, device && out, "device alloc: %s is NULL", device ? "out" : "device");
    REQUIRE(err, bytes >= 0 && bytes <= CPA_MOST_BYTES, "device alloc: bytes is %lld, expected 0 to 2^60",
            (long long)bytes);
    return device->table->alloc(device, bytes, out, err);
}

void cpa_device_free(cpa_device *device, void *memory) {
    if (device && memory) device->table->free(device, memory);
}

static cpa_status drain(cpa_stream *stream) {
    for (const cpa_progress_hook *hook = stream->progress.first; hook; hook = hook->next)
        if (hook->drain) CPA_TRY(hook->drain(hook->ctx, stream));
    return CPA_OK;
}

cpa_status cpa_stream_create(cpa_device *device, cpa_stream **out, cpa_error *err) {
    REQUIRE(err, device && out, "stream: %s is NULL", device ? "out" : "device");
    return device->table->stream_create(device, out, err);
}

cpa_status cpa_stream_wrap(cpa_device *device, void *native, cpa_stream **out, cpa_error *err) {
    REQUIRE(err, device && native && out, "stream: %s is NULL", !device ? "device" : !native ? "native" : "out");
    return device->table->stream_wrap(device, native, out, err);
}

void cpa_stream_destroy(cpa_stream *stream) {
    if (!stream) return;
    (void)drain(stream); /* the back end waits for the device, and would for ever */
    while (stream->progress.first) cpa_progress_remove(stream->progress.first);
    stream->device->table->stream_destroy(stream);
}

void *cpa_stream_native(const cpa_stream *stream) {
    return stream ? stream->native : NULL;
}

cpa_status cpa_stream_sync(cpa_stream *stream) {
    if (!stream) return CPA_INVALID;
    CPA_TRY(drain(stream));
    return stream->device->table->stream_sync(stream);
}

const char *cpa_stream_error(const cpa_stream *stream) {
    return stream ? stream->error.message : "the stream is NULL";
}
