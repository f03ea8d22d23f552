/* The contract between the library and a device back end: one table of operations, which host/ and cuda/ each fill.
 *
 * The argument structs, their shapes, dtypes, units and aliasing rules are those of the public headers cpattn/device.h
 * and cpattn/ops.h. The library checks every argument before it calls the table (src/ops/ops.c); a back end may rely on
 * that and reports only what it alone can know: CPA_UNSUPPORTED for a shape it has no kernel for, CPA_NO_MEMORY,
 * CPA_DEVICE. An operation that fails writes its message to stream->error. No operation allocates or synchronises,
 * except those whose comment says so. */
#ifndef CPA_KERNELS_H
#define CPA_KERNELS_H

#include <cpattn/device.h>
#include <cpattn/ops.h>

#include "base/stored.h"
#include "kernels/kv_view.h"

typedef struct cpa_kernel_table cpa_kernel_table;

/* The head of every back end's device; the back end embeds it first. */
struct cpa_device {
    const cpa_kernel_table *kernels;
    char description[160];
};

/* The head of every back end's stream. */
struct cpa_stream {
    cpa_device *device;
    void *native; /* a cudaStream_t on a CUDA device, NULL on the host; what transports order their exchanges by */
    cpa_error error;
    /* A back end whose operations run inside the call (the host) calls poll(poll_ctx), when it is set, at least every
     * millisecond or so of such an operation, from the calling thread: the owner of the stream moves its messages
     * there. */
    void (*poll)(void *poll_ctx);
    void *poll_ctx;
};

/* Marks: numbered points in the time of a device's streams. */
typedef struct cpa_marks cpa_marks;

/* The work of a stream between graph_begin and graph_end, to be launched again and again. */
typedef struct cpa_graph cpa_graph;

/* The head of every back end's attend plan; plan_set fills it by cpa_attend_plan_describe. */
struct cpa_attend_plan {
    cpa_device *device;
    /* Set by the owner before plan_set, for plans whose attends are captured in graphs: at most so many items of one
     * row each are ever attended. What an attend enqueues then depends on plan_shape alone, and an attend of no item is
     * enqueued too. 0: the plan is as small as its batch allows. */
    int64_t steady_items;
    /* Set by the owner before plan_set and valid in it, for device back ends: by how many floats the rows of an item
     * lie further on in the state than their index says, O and LSE alike. So a kernel can store them into the memory
     * of another device. NULL: none does. */
    const int64_t *state_shifts; /* [n_items of the batch] */
    /* Set by the owner, ready_q before an attend and the others before plan_set: the last so many items have rows among
     * [ready_row, ready_row + ready_rows), whose queries are not in the q of the attend but at ready_q. The attend may
     * write them into q, which has room for them. And it may take these items before the work enqueued right in front
     * of it is over: that work writes nothing of ready_q and of the cache, and touches neither the state nor what the
     * plan has on the device. */
    int64_t ready_items, ready_row, ready_rows;
    const void *ready_q;
    int64_t n_items;
    int32_t q_heads, kv_heads, k_dim, v_dim, block_size;
    int64_t max_block; /* cpa_attend_plan_set: the largest block id among the entries in use; -1 without any */
};

static inline void cpa_attend_plan_describe(cpa_attend_plan *plan, const cpa_attend_batch *batch) {
    plan->n_items = batch->n_items;
    plan->q_heads = batch->q_heads;
    plan->kv_heads = batch->kv_heads;
    plan->k_dim = batch->k_dim;
    plan->v_dim = batch->v_dim;
    plan->block_size = batch->block_size;
}

/* A partial state whose zero strides are replaced by those of contiguous rows. */
static inline cpa_partial cpa_partial_resolve(cpa_partial state, int32_t heads, int32_t v_dim) {
    if (!state.o_row_stride) state.o_row_stride = (int64_t)heads * v_dim;
    if (!state.lse_row_stride) state.lse_row_stride = heads;
    return state;
}

/* synthesize: rows of queries, keys or values from a counter-based generator, the same bits on every back end, rank and
 * N. The formula is documented in kernels/host/rows/synthesize.c. */
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

/* hash_rows: adds to *sum, modulo 2^64, a hash of each listed row of src, salted so that equal rows of different places
 * differ. The same value on every back end: see kernels/host/rows/hash_rows.c. */
typedef struct cpa_hash_rows_args {
    int64_t rows;
    const void *src;
    int64_t row_bytes;        /* a multiple of 2 */
    const int32_t *row_index; /* [rows], device: rows of src; -1: none */
    const uint64_t *salts;    /* [rows], device */
    uint64_t salt;            /* of all rows */
    uint64_t *sum;            /* device */
} cpa_hash_rows_args;

/* reference_attend: attend by whole matrices in fp32, for the self-test: S = Q K^T, masked softmax, O = P V by a BLAS.
 * It knows no pages, shards, tiles or partial states: positions and limits come row by row and key by key. */
typedef struct cpa_reference_blas cpa_reference_blas;
typedef struct cpa_reference_attend_args {
    int64_t rows, keys;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    const float *q;                           /* [rows, q_heads, k_dim], device, as all that follows */
    const float *k;                           /* [keys, kv_heads, k_dim] */
    const float *v;                           /* [keys, kv_heads, v_dim] */
    const int64_t *q_positions, *k_positions; /* [rows], [keys] */
    const int64_t *limits; /* [rows]: a row sees keys of an index below limit_base + limits[row] alone */
    int64_t limit_base;
    cpa_mask mask;
    float scale;
    float *o, *mass; /* [rows, q_heads, v_dim]: sum of p v, sum of p |v|; 0 for a row that sees no key */
    float *lse;      /* [rows, q_heads]; -inf then */
} cpa_reference_attend_args;

struct cpa_kernel_table {
    const char *name;

    /* The devices that this process sees; 0 without a driver. */
    int32_t (*device_count)(void);
    /* Bytes that are free on a device before it is opened; -1 where it shares the host's memory. */
    int64_t (*free_memory)(int32_t ordinal);
    /* The PCI address of a device, CPA_PCI_ADDRESS_BYTES; empty where it is unknown. NULL where devices have none. */
    void (*pci_address)(int32_t ordinal, char *out);
    /* Opens the device; allocates. */
    cpa_status (*device_open)(const cpa_device_options *options, cpa_device **out, cpa_error *err);
    void (*device_close)(cpa_device *device);
    /* How many local keys a resumed attend may be cut at; 1 where the back end promises no bits. */
    int64_t (*split_tokens)(const cpa_device *device);

    /* Host memory that copies to and from the device move asynchronously. Freeing NULL does nothing. */
    cpa_status (*alloc_host)(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
    void (*free_host)(cpa_device *device, void *memory);

    /* Memory and streams. copy moves bytes between any two of host and device memory and is asynchronous where the
     * stream is; the memory must stay until then. */
    cpa_status (*alloc)(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
    void (*free)(cpa_device *device, void *memory); /* may wait for all that is enqueued */
    /* The same for memory that enqueued work may use, without waiting: `release` frees it, and what plans that grew
     * have retired; or an allocation that would fail otherwise. */
    void (*retire)(cpa_device *device, void *memory);
    void (*release)(cpa_device *device);
    cpa_status (*stream_create)(cpa_device *device, cpa_stream **out, cpa_error *err);
    void (*stream_destroy)(cpa_stream *stream);
    cpa_status (*stream_sync)(cpa_stream *stream);
    cpa_status (*copy)(void *dst, const void *src, int64_t bytes, cpa_stream *stream);
    /* The same for `rows` rows of row_bytes each, which lie a pitch (in bytes) apart. */
    cpa_status (*copy_rows)(void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch, int64_t row_bytes,
                            int64_t rows, cpa_stream *stream);
    /* Copies row map[i] of src to row i of dst, row_bytes each (gather). map is on the device; NULL: row i. */
    cpa_status (*gather_rows)(void *dst, const void *src, const int32_t *map, int64_t rows, int64_t row_bytes,
                              cpa_stream *stream);

    /* Marks. mark sets number `index` (0, 1, ...) to the moment at which what was enqueued on the stream before it is
     * done; set again, it moves. It allocates the first time that an index is used. In a graph each launch sets it.
     * mark_seconds is the time from one mark to another on the clock of the device (the host: of the caller); both must
     * have been reached, which they are once their streams are idle. mark_reached: whether one that was set is; 1 for
     * one that was never set. */
    cpa_status (*marks_create)(cpa_device *device, cpa_marks **out, cpa_error *err);
    void (*marks_destroy)(cpa_marks *marks);
    cpa_status (*mark)(cpa_marks *marks, int32_t index, cpa_stream *stream);
    cpa_status (*mark_seconds)(const cpa_marks *marks, int32_t from, int32_t to, double *seconds, cpa_error *err);
    int (*mark_reached)(const cpa_marks *marks, int32_t index);

    /* Graphs; all NULL where the back end has none. Between graph_begin and graph_end operations on the stream are
     * noted instead of enqueued, exchanges of a device transport too. graph_end ends that in any case; without `out`
     * nothing is kept. A launch enqueues what was noted: the same operations on the same addresses, whatever these hold
     * by then, page-locked host memory included. One launch of a graph at a time; allocates. */
    cpa_status (*graph_begin)(cpa_stream *stream);
    cpa_status (*graph_end)(cpa_stream *stream, cpa_graph **out);
    cpa_status (*graph_launch)(cpa_graph *graph, cpa_stream *stream);
    void (*graph_destroy)(cpa_graph *graph);
    /* For plans with steady_items: a number that two settings of one plan share only if their attends enqueue the same
     * operations on the same addresses. */
    uint64_t (*plan_shape)(const cpa_attend_plan *plan);

    /* Work split once a step; plan_set allocates only when the plan grows. A plan may be set while attends of its last
     * setting are enqueued, once those of the setting before that are done. plan_upload enqueues what brings the
     * setting to the device, behind all attends of the plan so far; otherwise the first attend on a stream does. NULL
     * where nothing has to be brought anywhere. A graph holds no upload of a plan that its stream has uploaded before
     * the capture: upload each setting before a launch. */
    cpa_status (*plan_create)(cpa_device *device, cpa_attend_plan **out, cpa_error *err);
    cpa_status (*plan_set)(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_error *err);
    cpa_status (*plan_upload)(const cpa_attend_plan *plan, cpa_stream *stream);
    void (*plan_destroy)(cpa_attend_plan *plan);

    /* The operations. */
    cpa_status (*kv_write)(const cpa_kv_write_args *args, cpa_stream *stream);
    cpa_status (*kv_copy)(const cpa_kv_copy_args *args, cpa_stream *stream);
    cpa_status (*kv_pack)(const cpa_kv_pack_args *args, cpa_stream *stream);
    cpa_status (*attend)(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_stream *stream);
    /* `awaited`: the messages that bring states, which the merge waits for (await_stored, base/stored.cuh), where a
     * transport of the back end's hands exchanges over; if they do not come it writes nothing. NULL or none: all states
     * are there. There are rows, or nobody would wait. */
    cpa_status (*merge)(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream);
    cpa_status (*synthesize)(const cpa_synth_args *args, cpa_stream *stream);
    cpa_status (*hash_rows)(const cpa_hash_rows_args *args, cpa_stream *stream);

    /* For the self-test. attend_path makes attend take its path `index` wherever that fits, from the next call on, and
     * gives its name; path 0 is the best one and the one in use otherwise. NULL past the last. */
    const char *(*attend_path)(cpa_device *device, int32_t index);
    /* NULL where the back end has no BLAS; reference_open fails with CPA_UNSUPPORTED where its library is missing.
     * reference_attend allocates and synchronises. */
    cpa_status (*reference_open)(cpa_device *device, cpa_reference_blas **out, cpa_error *err);
    cpa_status (*reference_attend)(cpa_reference_blas *reference, const cpa_reference_attend_args *args,
                                   cpa_stream *stream);
    void (*reference_close)(cpa_reference_blas *reference);
};

/* The host back end: any CPU, fp32, bf16 and fp16, any head size up to CPA_MAX_HEAD_DIM. */
extern const cpa_kernel_table cpa_kernels_host;

/* The CUDA back end, in builds that define CPA_HAVE_CUDA. */
extern const cpa_kernel_table cpa_kernels_cuda;

#endif
