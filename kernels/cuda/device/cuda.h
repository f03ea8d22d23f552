/* What the files of the CUDA back end share: the device, the stream, and its operations. C and CUDA C++. */
#ifndef CPA_CUDA_CUDA_H
#define CPA_CUDA_CUDA_H

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/graph.h"
#include "kernels/operators.h"
#include "kernels/self_test.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which kernels attend may use. */
typedef enum cpa_cuda_path {
    CPA_CUDA_SIMPLE = 0, /* any shape and dtype, no tensor cores */
    CPA_CUDA_PORTABLE,   /* mma.sync, compute capability 8.0 and later */
    CPA_CUDA_HOPPER      /* wgmma and bulk tensor copies, compute capability 9.0 alone */
} cpa_cuda_path;

typedef CUresult (*cpa_cuda_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                       const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                       CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill);

typedef struct cpa_cuda_device {
    cpa_device base;
    int ordinal;
    int multiprocessors;
    cpa_cuda_path best;               /* the fastest path that the device runs */
    cpa_cuda_path path;               /* the path in use; tests lower it */
    int32_t path_is_set;              /* it is the self-test's choice, which warns nobody of plain kernels */
    int64_t workspace_bytes;          /* most bytes of the workspace of a plan that is given none; tests lower it */
    cpa_cuda_encode_fn encode;        /* cuTensorMapEncodeTiled; set where path is CPA_CUDA_HOPPER */
    struct cpa_cuda_retired *retired; /* memory.c */
} cpa_cuda_device;

/* The first token of a kv_write whose slot does not exist, as the kernel saw it. */
typedef struct cpa_cuda_bad_slot {
    int32_t found;
    int64_t token, slot;
} cpa_cuda_bad_slot;

typedef struct cpa_cuda_stream {
    cpa_stream base;
    cudaStream_t handle;
    int wrapped;                        /* the handle is the caller's */
    cpa_cuda_bad_slot *bad_slot;        /* pinned; kernels write to it */
    int capturing;                      /* between graph_begin and graph_end */
    uint64_t captures;                  /* counts both: what was copied in one capture is not there outside of it */
    struct cpa_cuda_products *products; /* nn/linear.c: made by the first product that needs it */
} cpa_cuda_stream;

static inline cpa_cuda_device *cpa_cuda_device_of(const cpa_stream *stream) {
    return (cpa_cuda_device *)stream->device;
}

static inline cudaStream_t cpa_cuda_handle(const cpa_stream *stream) {
    return ((const cpa_cuda_stream *)stream)->handle;
}

/* Whether a kernel of so many CTAs may be placed before the one in front of it is over, where it or that one may wait
 * for other devices: no more CTAs early than leave room for what they wait for. */
static inline int cpa_cuda_starts_early(const cpa_stream *stream, int64_t ctas) {
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    return device->path == CPA_CUDA_HOPPER && ctas <= device->multiprocessors;
}

/* Of a power of two. */
static inline int32_t cpa_cuda_log2(int32_t power) {
    int32_t shift = 0;
    while (power >> shift > 1) shift++;
    return shift;
}

/* calls.c. CPA_OK, or a failure whose message names the operation and what CUDA said. */
cpa_status cpa_cuda_check(cpa_error *err, cudaError_t error, const char *what);
/* Makes the device current in this thread. */
cpa_status cpa_cuda_select(const cpa_device *device, cpa_error *err);
/* The outcome of the last launch on the stream. */
cpa_status cpa_cuda_launched(cpa_stream *stream, const char *operation);
/* Fails with CPA_UNSUPPORTED: what is too large, and the number. */
cpa_status cpa_cuda_unsupported(cpa_stream *stream, const char *what, int64_t number);
/* Whether a CTA of the kernel may have `bytes` of dynamic shared memory. */
int cpa_cuda_fits(const cpa_stream *stream, const void *kernel, int bytes);
/* Lets a kernel use `bytes` of dynamic shared memory. *prepared has a bit for each device where that was done; it
 * belongs to the kernel and begins as 0. */
cpa_status cpa_cuda_shared_memory(cpa_stream *stream, const void *kernel, int bytes, uint64_t *prepared);

/* library.c. Loads the first of the libraries that is there, for the life of the process; finds the function of a name
 * and stores it at *function, a pointer to a function. */
typedef struct cpa_cuda_library {
    const char *soname;
    void *handle;
} cpa_cuda_library;
cpa_status cpa_cuda_library_open(const char *name, const char *const *sonames, int count, cpa_cuda_library *out,
                                 cpa_error *err);
cpa_status cpa_cuda_library_find(const cpa_cuda_library *library, const char *name, void *function, cpa_error *err);

/* memory.c. cpa_cuda_malloc frees what was retired where memory is short; the device is current. cpa_cuda_retire_host
 * is cpa_cuda_retire for page-locked memory. */
cudaError_t cpa_cuda_malloc(cpa_device *device, int64_t bytes, void **out);
cpa_status cpa_cuda_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
void cpa_cuda_free(cpa_device *device, void *memory);
void cpa_cuda_retire(cpa_device *device, void *memory);
void cpa_cuda_retire_host(cpa_device *device, void *memory);
void cpa_cuda_release(cpa_device *device);
cpa_status cpa_cuda_alloc_host(cpa_device *device, int64_t bytes, void **out, cpa_error *err);
void cpa_cuda_free_host(cpa_device *device, void *memory);

cpa_status cpa_cuda_events_create(cpa_device *device, cpa_events **out, cpa_error *err);
void cpa_cuda_events_destroy(cpa_events *events);
cpa_status cpa_cuda_event_record(cpa_events *events, int32_t index, cpa_stream *stream);
cpa_status cpa_cuda_event_seconds(const cpa_events *events, int32_t from, int32_t to, double *seconds, cpa_error *err);
int cpa_cuda_event_reached(const cpa_events *events, int32_t index);
cpa_status cpa_cuda_graph_begin(cpa_stream *stream);
cpa_status cpa_cuda_graph_end(cpa_stream *stream, cpa_graph **out);
cpa_status cpa_cuda_graph_launch(cpa_graph *graph, cpa_stream *stream);
void cpa_cuda_graph_destroy(cpa_graph *graph);
uint64_t cpa_cuda_plan_shape(const cpa_attend_plan *plan);
cpa_status cpa_cuda_gather_rows(void *dst, const void *src, const int32_t *map, int64_t rows, int64_t row_bytes,
                                cpa_stream *stream);
cpa_status cpa_cuda_kv_write(const cpa_kv_write_args *args, cpa_stream *stream);
cpa_status cpa_cuda_kv_copy(const cpa_kv_copy_args *args, cpa_stream *stream);
cpa_status cpa_cuda_kv_move(const cpa_kv_move_args *args, cpa_stream *stream);
cpa_status cpa_cuda_kv_convert(const cpa_kv_convert_args *args, cpa_stream *stream);
cpa_status cpa_cuda_kv_pack(const cpa_kv_pack_args *args, cpa_stream *stream);
cpa_status cpa_cuda_kv_gather(const cpa_kv_gather_args *args, const cpa_kv_view *rows, cpa_stream *stream);
cpa_status cpa_cuda_latent_gather(const cpa_latent_gather_args *args, cpa_stream *stream);
cpa_status cpa_cuda_latent_expand(const cpa_latent_expand_args *args, cpa_stream *stream);
cpa_status cpa_cuda_copy_blocks(const cpa_copy_blocks_args *args, cpa_stream *stream);
int64_t cpa_cuda_least_workspace(const cpa_attention_shape *shape, int32_t block_size);
cpa_status cpa_cuda_plan_create(cpa_device *device, const cpa_key_workspace *workspace, cpa_attend_plan **out,
                                cpa_error *err);
cpa_status cpa_cuda_plan_set(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                             cpa_error *err);
cpa_status cpa_cuda_plan_upload(const cpa_attend_plan *plan, cpa_stream *stream);
cpa_status cpa_cuda_plan_reserve(cpa_attend_plan *plan, const cpa_attend_reservation *reservation, cpa_error *err);
cpa_status cpa_cuda_plan_update(cpa_attend_plan *plan, const cpa_attend_update *update, cpa_stream *stream);
void cpa_cuda_plan_destroy(cpa_attend_plan *plan);
cpa_status cpa_cuda_attend_supported(const cpa_device *device, const char *where, const cpa_attention_shape *shape,
                                     const cpa_mask *mask, cpa_error *err);
void cpa_cuda_attend_kernels_of(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_attend_kernels *out);
cpa_status cpa_cuda_attend(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                           cpa_stream *stream);
cpa_status cpa_cuda_sparse_attend(const cpa_sparse_attend_args *args, cpa_stream *stream);
cpa_status cpa_cuda_merge(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream);
/* With rows, and options that make states or the result other than fp32 rows with natural logarithms. */
cpa_status cpa_cuda_merge_forms(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream);
cpa_status cpa_cuda_state_pack(const cpa_state_pack_args *args, cpa_stream *stream);
cpa_status cpa_cuda_state_merge_packed(const cpa_state_merge_packed_args *args, cpa_stream *stream);
cpa_status cpa_cuda_project_states(const cpa_project_states_args *args, cpa_stream *stream);
cpa_status cpa_cuda_index_plan_create(cpa_device *device, cpa_index_plan **out, cpa_error *err);
cpa_status cpa_cuda_index_plan_set(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err);
cpa_status cpa_cuda_index_plan_reserve(cpa_index_plan *plan, const cpa_index_limits *limits, cpa_error *err);
cpa_status cpa_cuda_index_plan_upload(const cpa_index_plan *plan, cpa_stream *stream);
uint64_t cpa_cuda_index_plan_shape(const cpa_index_plan *plan);
void cpa_cuda_index_plan_destroy(cpa_index_plan *plan);
cpa_status cpa_cuda_index_logits(const cpa_index_plan *plan, const cpa_index_logits_args *args, cpa_stream *stream);
cpa_status cpa_cuda_synthesize(const cpa_synth_args *args, cpa_stream *stream);
cpa_status cpa_cuda_hash_rows(const cpa_hash_rows_args *args, cpa_stream *stream);
cpa_status cpa_cuda_join_columns(const cpa_join_columns_args *args, cpa_stream *stream);
cpa_status cpa_cuda_sum_parts(const cpa_sum_parts_args *args, cpa_stream *stream);
cpa_status cpa_cuda_take_tokens(const cpa_take_tokens_args *args, cpa_stream *stream);
cpa_status cpa_cuda_block_union(const cpa_block_union_args *args, cpa_stream *stream);
cpa_status cpa_cuda_reference_open(cpa_device *device, cpa_reference_blas **out, cpa_error *err);
cpa_status cpa_cuda_reference_attend(cpa_reference_blas *reference, const cpa_reference_attend_args *args,
                                     cpa_stream *stream);
void cpa_cuda_reference_close(cpa_reference_blas *reference);

#ifdef __cplusplus
}
#endif
#endif
