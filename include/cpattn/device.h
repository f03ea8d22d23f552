/* Devices and streams: where operators run. */
#ifndef CPATTN_DEVICE_H
#define CPATTN_DEVICE_H

#include <cpattn/status.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A device of one process: its memory, its threads or multiprocessors. Thread-safe: several threads may create streams
 * and plans on one device. */
typedef struct cpa_device cpa_device;

/* An ordered queue of work on a device. The host back end runs an operation before the call returns; device back ends
 * return at once. A stream is used by one thread at a time. */
typedef struct cpa_stream cpa_stream;

typedef enum cpa_backend { CPA_BACKEND_HOST = 0, CPA_BACKEND_CUDA } cpa_backend;

/* Memory of a device from the caller, such as a framework's pool, in place of the back end's own: all of it but what
 * peers map and page-locked host memory. alloc gives `bytes` bytes of that device's memory, aligned to 256 bytes (64 on
 * the host), or NULL. free gets what alloc gave, when nothing uses it any more: the library waits for the device first.
 * Both may be called by any thread that uses the device. CPA_TRANSPORT_PEER needs memory that comes from cudaMalloc. */
typedef struct cpa_allocator {
    void *(*alloc)(void *ctx, int64_t bytes);
    void (*free)(void *ctx, void *memory);
    void *ctx;
} cpa_allocator;

typedef struct cpa_device_options {
    size_t size;
    cpa_backend backend;
    int32_t threads;     /* host: worker threads, the caller's included; 0 = one */
    const int32_t *cpus; /* host: operating-system CPU numbers to bind the threads to, in turn; NULL = do not bind */
    int32_t n_cpus;
    int32_t ordinal;      /* cuda: which of the devices that the process sees */
    int32_t debug_checks; /* 1: operators check also what lies on the device, which they wait for: to find a mistake */
    cpa_allocator memory; /* where memory of the device comes from; both functions NULL: from the back end */
    int64_t reserved[8];  /* zero */
} cpa_device_options;

/* How many devices of a back end this process sees: 1 for the host, 0 for CUDA without a driver or in a build without
 * it. Thread-safe. */
CPA_API int32_t cpa_device_count(cpa_backend backend);

/* Bytes that are free on a device that has memory of its own; -1 for the host, whose memory the system tells.
 * Thread-safe. */
CPA_API int64_t cpa_device_free_memory(cpa_backend backend, int32_t ordinal);

/* Writes the PCI address of a device, such as "0000:3b:00.0", in lower case; an empty text where there is none or it is
 * not known. Thread-safe. */
#define CPA_PCI_ADDRESS_BYTES 24
CPA_API void cpa_device_pci_address(cpa_backend backend, int32_t ordinal, char out[CPA_PCI_ADDRESS_BYTES]);

/* Opens a device; *out is set only on success and is closed by cpa_device_close after its streams and plans are gone.
 */
CPA_API cpa_status cpa_device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err);
CPA_API void cpa_device_close(cpa_device *device);

/* One line naming the device, its instruction set and its threads; empty for NULL. Owned by the device. */
CPA_API const char *cpa_device_description(const cpa_device *device);

/* Device memory, aligned to at least 64 bytes. Freeing NULL does nothing. */
CPA_API cpa_status cpa_device_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
CPA_API void cpa_device_free(cpa_device *device, void *memory);

CPA_API cpa_status cpa_stream_create(cpa_device *device, cpa_stream **out, cpa_error *err);
/* Waits for what is enqueued. NULL does nothing. */
CPA_API void cpa_stream_destroy(cpa_stream *stream);

/* A stream of the library over an existing one of the device: a cudaStream_t, as a pointer, not NULL (cudaStreamLegacy
 * and cudaStreamPerThread name the default streams). Operations run in order with whatever else the caller enqueues
 * there. The caller's stream must outlive this one, which leaves it as it is when it is destroyed. A graph of the
 * caller's captures would hold what a plan says at that moment: attend refuses it with CPA_UNSUPPORTED unless the plan
 * or the step is reserved (cpa_attend_plan_reserve, cpa_context_reserve). CPA_UNSUPPORTED on the host back end. */
CPA_API cpa_status cpa_stream_wrap(cpa_device *device, void *native, cpa_stream **out, cpa_error *err);

/* The cudaStream_t of a stream on a CUDA device, as a pointer: what is enqueued there runs in order with the operations
 * of the library, so that a cpa_model can launch its kernels. Owned by the stream. NULL on the host back end, and for
 * NULL. */
CPA_API void *cpa_stream_native(const cpa_stream *stream);

/* Waits until everything enqueued so far is done; returns the first failure of the stream. Where layers of a context
 * are among that, by the thread of the context: failures of other ranks that they wait for are returned too. */
CPA_API cpa_status cpa_stream_sync(cpa_stream *stream);

/* The message of the last operation that failed on this stream; empty if none did. Owned by the stream. */
CPA_API const char *cpa_stream_error(const cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
