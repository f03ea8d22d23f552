/* The contract between the library and a back end: the head of its devices and streams, what a device can do, and the
 * table of its memory, streams and events. Graphs are in graph.h, operators in operators.h and those beside attention
 * in nn.h, what the self-test asks for in self_test.h; host/ and cuda/ each fill all of them.
 *
 * Arguments are checked before a table is called (src/ops: attend.c, kv.c, nn.c, nn_sample.c, device.c and the checks
 * that they share, check_args.c and nn_check.c); a back end may rely on that and reports only what it alone can know:
 * CPA_UNSUPPORTED, CPA_NO_MEMORY, CPA_DEVICE. What is given a stream and fails writes its message to stream->error.
 * Nothing that is enqueued on a stream allocates or synchronises, except where its comment says so. Every entry of a
 * table is set: what a device cannot do is said by its capabilities. */
#ifndef CPA_KERNELS_DEVICE_H
#define CPA_KERNELS_DEVICE_H

#include <cpattn/device.h>

#include "base/progress.h"

typedef struct cpa_device_table cpa_device_table;
typedef struct cpa_graph_table cpa_graph_table;
typedef struct cpa_operator_table cpa_operator_table;
typedef struct cpa_nn_table cpa_nn_table;
typedef struct cpa_self_test_table cpa_self_test_table;

/* What a device can do. Said by the back end when it opens the device, and constant from then on. */
typedef struct cpa_device_caps {
    int asynchronous;     /* operations are enqueued and run behind the call; else they have run when it returns */
    int bit_exact;        /* a row of attend has the same bits whatever is beside it and wherever it is resumed */
    int has_graphs;       /* the graph table may be called */
    int own_memory;       /* the host reads and writes its memory by `copy` alone */
    int has_reference;    /* the self-test's reference_open may be called; its library may still be missing */
    int64_t shared_bytes; /* shared memory that a CTA may have; 0: the device has no CTAs */
    /* How many local keys a resumed attend may be cut at, and give the bits of one that is not cut; 1 without
     * bit_exact. */
    int64_t split_tokens;
} cpa_device_caps;

/* The head of every back end's device; the back end embeds it first. */
struct cpa_device {
    cpa_backend backend;
    const cpa_device_table *table;
    const cpa_graph_table *graphs; /* with caps.has_graphs */
    const cpa_operator_table *operators;
    const cpa_nn_table *nn;
    const cpa_self_test_table *self_test;
    cpa_device_caps caps;
    char description[160];
    int debug_checks; /* cpa_device_options.debug_checks; src/ops sets it */
    /* Where `alloc` takes its memory from, as src/ops sets it; functions NULL: the back end's own memory. */
    cpa_allocator memory;
};

/* The head of every back end's stream. */
struct cpa_stream {
    cpa_device *device;
    void *native; /* a cudaStream_t on a CUDA device, NULL on the host; what transports order their exchanges by */
    cpa_error error;
    /* What moves beside its work: operations that run inside their call look at it every millisecond or so. */
    cpa_progress progress;
    /* Rows that attends have left to plain kernels since the stream was created, those of captured attends too. */
    int64_t plain_rows;
};

/* Numbered points in the time of a device's streams. */
typedef struct cpa_events cpa_events;

struct cpa_device_table {
    void (*close)(cpa_device *device);

    /* Host memory that copies to and from the device move asynchronously. Freeing NULL does nothing. */
    cpa_status (*alloc_host)(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
    void (*free_host)(cpa_device *device, void *memory);

    /* Memory of the device. */
    cpa_status (*alloc)(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
    void (*free)(cpa_device *device, void *memory); /* frees memory of the device; may wait for all that is enqueued */
    /* Frees memory that enqueued work may still use, without waiting: what is retired here, and what plans that grew
     * have retired, is freed by `release`, or by an allocation that would fail otherwise. */
    void (*retire)(cpa_device *device, void *memory);
    void (*release)(cpa_device *device);

    /* Streams. copy moves bytes between any two of host and device memory and is asynchronous where the device is; the
     * memory must stay until then. */
    cpa_status (*stream_create)(cpa_device *device, cpa_stream **out, cpa_error *err);
    /* Over a stream of the caller's, which stays when this one is destroyed. */
    cpa_status (*stream_wrap)(cpa_device *device, void *native, cpa_stream **out, cpa_error *err);
    void (*stream_destroy)(cpa_stream *stream);
    /* Whether what is enqueued is captured in a graph of the caller's, which the graph table knows nothing of. */
    int (*stream_is_captured)(const cpa_stream *stream);
    cpa_status (*stream_sync)(cpa_stream *stream);
    cpa_status (*copy)(void *dst, const void *src, int64_t bytes, cpa_stream *stream);
    /* Copies `rows` rows of row_bytes each, which lie a pitch (in bytes) apart. */
    cpa_status (*copy_rows)(void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch, int64_t row_bytes,
                            int64_t rows, cpa_stream *stream);

    /* Events. event_record sets number `index` (0, 1, ...) to the moment at which what was enqueued on the stream
     * before it is done; set again, it moves. It allocates the first time that an index is used. In a graph each launch
     * sets it. event_seconds is the time from one event to another on the clock of the device (the host: of the
     * caller); both must have been reached, which they are once their streams are idle. event_reached: whether one that
     * was set is; 1 for one that was never set. */
    cpa_status (*events_create)(cpa_device *device, cpa_events **out, cpa_error *err);
    void (*events_destroy)(cpa_events *events);
    cpa_status (*event_record)(cpa_events *events, int32_t index, cpa_stream *stream);
    cpa_status (*event_seconds)(const cpa_events *events, int32_t from, int32_t to, double *seconds, cpa_error *err);
    int (*event_reached)(const cpa_events *events, int32_t index);
};

/* What is asked of a back end before a device is open. */
typedef struct cpa_backend_table {
    const char *name;
    cpa_backend backend;
    /* The devices that this process sees; 0 without a driver. */
    int32_t (*device_count)(void);
    /* Bytes that are free on a device; -1 where it shares the host's memory. */
    int64_t (*free_memory)(int32_t ordinal);
    /* The PCI address of a device, CPA_PCI_ADDRESS_BYTES; empty where it has none or it is unknown. */
    void (*pci_address)(int32_t ordinal, char *out);
    /* Opens the device; allocates. */
    cpa_status (*open)(const cpa_device_options *options, cpa_device **out, cpa_error *err);
} cpa_backend_table;

/* The host back end: any CPU, fp32, bf16 and fp16, any head size up to CPA_MAX_HEAD_DIM. */
extern const cpa_backend_table cpa_backend_host;

/* The CUDA back end, in builds that define CPA_HAVE_CUDA. */
extern const cpa_backend_table cpa_backend_cuda;

#endif
