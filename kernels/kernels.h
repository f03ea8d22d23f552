/* The contract between the library and a device back end: one table of operations, which host/ and cuda/ each fill.
 *
 * The argument structs, their shapes, dtypes, units and aliasing rules are those of the public headers cpattn/device.h
 * and cpattn/ops.h. The library checks every argument before it calls the table (src/ops.c); a back end may rely on
 * that and reports only what it alone can know: CPA_UNSUPPORTED for a shape it has no kernel for, CPA_NO_MEMORY,
 * CPA_DEVICE. An operation that fails writes its message to stream->error. No operation allocates or synchronises,
 * except those whose comment says so. */
#ifndef CPA_KERNELS_H
#define CPA_KERNELS_H

#include <cpattn/device.h>
#include <cpattn/ops.h>

typedef struct cpa_kernel_table cpa_kernel_table;

/* The head of every back end's device; the back end embeds it first. */
struct cpa_device {
    const cpa_kernel_table *kernels;
    char description[160];
};

/* The head of every back end's stream. */
struct cpa_stream {
    cpa_device *device;
    cpa_error error;
    /* A back end whose operations run inside the call (the host) calls poll(poll_ctx), when it is set, at least every
     * millisecond or so of such an operation, from the calling thread: the owner of the stream moves its messages
     * there. */
    void (*poll)(void *poll_ctx);
    void *poll_ctx;
};

/* The head of every back end's attend plan. */
struct cpa_attend_plan {
    cpa_device *device;
    int64_t n_items;
};

/* synthesize: rows of queries, keys or values from a counter-based generator, the same bits on every back end, rank and
 * N. The formula is documented in kernels/host/synthesize.c. */
typedef enum cpa_synth_tensor { CPA_SYNTH_Q = 0, CPA_SYNTH_K, CPA_SYNTH_V } cpa_synth_tensor;
typedef struct cpa_synth_args {
    cpa_synth_tensor tensor;
    uint64_t seed;
    int32_t layer;
    int32_t heads;    /* heads of this tensor */
    int32_t kv_heads; /* query head h follows the directions of KV head h / (heads / kv_heads) */
    int32_t dim;
    int64_t rows;
    const uint32_t *tokens;   /* [rows], device */
    const int64_t *positions; /* [rows], device */
    cpa_dtype dtype;
    void *out; /* [rows, heads, dim], contiguous */
} cpa_synth_args;

struct cpa_kernel_table {
    const char *name;

    /* Opens the device; allocates. */
    cpa_status (*device_open)(const cpa_device_options *options, cpa_device **out, cpa_error *err);
    void (*device_close)(cpa_device *device);
    /* How many local keys a resumed attend may be cut at; 1 where the back end promises no bits. */
    int64_t (*split_tokens)(const cpa_device *device);

    /* Memory and streams. copy moves bytes between any two of host and device memory and is asynchronous where the
     * stream is; the memory must stay until then. */
    cpa_status (*alloc)(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
    void (*free)(cpa_device *device, void *memory);
    cpa_status (*stream_create)(cpa_device *device, cpa_stream **out, cpa_error *err);
    void (*stream_destroy)(cpa_stream *stream);
    cpa_status (*stream_sync)(cpa_stream *stream);
    cpa_status (*copy)(void *dst, const void *src, int64_t bytes, cpa_stream *stream);
    /* Copies row map[i] of src to row i of dst, row_bytes each (gather). map is on the device. */
    cpa_status (*gather_rows)(void *dst, const void *src, const int32_t *map, int64_t rows, int64_t row_bytes,
                              cpa_stream *stream);

    /* Work split once a step; plan_set allocates only when the plan grows. */
    cpa_status (*plan_create)(cpa_device *device, cpa_attend_plan **out, cpa_error *err);
    cpa_status (*plan_set)(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_error *err);
    void (*plan_destroy)(cpa_attend_plan *plan);

    /* The operations. */
    cpa_status (*kv_write)(const cpa_kv_write_args *args, cpa_stream *stream);
    cpa_status (*kv_copy)(const cpa_kv_copy_args *args, cpa_stream *stream);
    cpa_status (*kv_pack)(const cpa_kv_pack_args *args, cpa_stream *stream);
    cpa_status (*attend)(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_stream *stream);
    cpa_status (*merge)(const cpa_merge_args *args, cpa_stream *stream);
    cpa_status (*synthesize)(const cpa_synth_args *args, cpa_stream *stream);
};

/* The host back end: any CPU, fp32, bf16 and fp16, any head size up to CPA_MAX_HEAD_DIM. */
extern const cpa_kernel_table cpa_kernels_host;

#endif
