/* The CUDA back end: device, streams, copies, and its tables. */
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/nn/linear.h"
#include "kernels/cuda/nn/nn.h"

static cpa_status find_encode(cpa_cuda_device *device, cpa_error *err) {
    const unsigned introduced = 12000; /* CUDA 12.0 */
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    CPA_TRY(cpa_cuda_check(
        err,
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, introduced, cudaEnableDefault, &found),
        "device: cuTensorMapEncodeTiled"));
    if (found != cudaDriverEntryPointSuccess)
        return cpa_fail(err, CPA_DEVICE,
                        "device: the CUDA driver has no cuTensorMapEncodeTiled; it is older than 12.0");
    device->encode = (cpa_cuda_encode_fn)function;
    return CPA_OK;
}

enum { LEAST_MAJOR = 8, HOPPER_MAJOR = 9 };

/* The tables that the device is made of, below. */
static const cpa_device_table device_table;
static const cpa_graph_table graph_table;
static const cpa_operator_table operator_table;
static const cpa_self_test_table self_test_table;

/* A kernel that is loaded at its first launch waits for the device to be idle, and so for ever beside one that waits
 * for a rank that does not come: nobody would be left to see that. So all are loaded with the context, unless CUDA runs
 * already or the user says otherwise. */
static void load_kernels_at_start(void) {
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

/* The first call of CUDA that this library makes. */
static cpa_status count_all(int *count, cpa_error *err) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, load_kernels_at_start);
    return cpa_cuda_check(err, cudaGetDeviceCount(count), "device");
}

/* Up to the first that the kernels do not run on. */
static int32_t device_count(void) {
    int count = 0, usable = 0, major = 0;
    if (count_all(&count, NULL) != CPA_OK) return 0;
    for (; usable < count; usable++) {
        cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, usable);
        if (cpa_cuda_check(NULL, error, "device") != CPA_OK || major < LEAST_MAJOR) break;
    }
    return usable;
}

static int64_t free_memory(int32_t ordinal) {
    size_t free_bytes = 0, total_bytes = 0;
    int current = 0;
    if (cpa_cuda_check(NULL, cudaGetDevice(&current), "device") != CPA_OK) return 0;
    cpa_status status = cpa_cuda_check(NULL, cudaSetDevice(ordinal), "device");
    if (status == CPA_OK) status = cpa_cuda_check(NULL, cudaMemGetInfo(&free_bytes, &total_bytes), "device");
    (void)cpa_cuda_check(NULL, cudaSetDevice(current), "device");
    return status == CPA_OK ? (int64_t)free_bytes : 0;
}

static void pci_address(int32_t ordinal, char *out) {
    if (cudaDeviceGetPCIBusId(out, CPA_PCI_ADDRESS_BYTES, ordinal) != cudaSuccess) {
        (void)cudaGetLastError();
        out[0] = 0;
    }
    for (char *c = out; *c; c++) *c = (char)tolower((unsigned char)*c);
}

static cpa_status device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err) {
    cpa_status status = CPA_OK;
    int count = 0;
    struct cudaDeviceProp properties;
    CPA_TRY(count_all(&count, err));
    if (options->ordinal < 0 || options->ordinal >= count)
        return cpa_fail(err, CPA_INVALID, "device: ordinal is %d, expected one of %d CUDA devices", options->ordinal,
                        count);
    CPA_TRY(cpa_cuda_check(err, cudaSetDevice(options->ordinal), "device"));
    CPA_TRY(cpa_cuda_check(err, cudaGetDeviceProperties(&properties, options->ordinal), "device"));
    if (properties.major < LEAST_MAJOR)
        return cpa_fail(err, CPA_UNSUPPORTED, "device: %s has compute capability %d.%d, expected at least %d.0",
                        properties.name, properties.major, properties.minor, LEAST_MAJOR);
    cpa_cuda_device *device = calloc(1, sizeof *device);
    if (!device) return cpa_fail(err, CPA_NO_MEMORY, "device: no memory");
    device->base.backend = CPA_BACKEND_CUDA;
    device->base.table = &device_table;
    device->base.graphs = &graph_table;
    device->base.operators = &operator_table;
    device->base.nn = &cpa_cuda_nn;
    device->base.self_test = &self_test_table;
    device->base.caps = (cpa_device_caps){
        .asynchronous = 1,
        .has_graphs = 1,
        .own_memory = 1,
        .has_reference = 1,
        .shared_bytes = (int64_t)properties.sharedMemPerBlockOptin,
        .split_tokens = 1,
    };
    device->ordinal = options->ordinal;
    device->multiprocessors = properties.multiProcessorCount;
    device->workspace_bytes = CPA_KEY_WORKSPACE_BYTES;
    device->path = properties.major == HOPPER_MAJOR ? CPA_CUDA_HOPPER : CPA_CUDA_PORTABLE;
    device->best = device->path;
    if (device->path == CPA_CUDA_HOPPER) CPA_TRY_GOTO(find_encode(device, err), failed);
    snprintf(device->base.description, sizeof device->base.description, "cuda %d, %.80s, %s, %d multiprocessors",
             device->ordinal, properties.name, device->path == CPA_CUDA_HOPPER ? "sm_90a" : "sm_80",
             device->multiprocessors);
    *out = &device->base;
    return CPA_OK;
failed:
    free(device);
    return status;
}

static void device_close(cpa_device *device) {
    cpa_cuda_release(device);
    free(device);
}

/* Over a stream of the caller's, or with one of its own for NULL. */
static cpa_status make_stream(cpa_device *device, cudaStream_t wrapped, cpa_stream **out, cpa_error *err) {
    cpa_status status = CPA_OK;
    CPA_TRY(cpa_cuda_select(device, err));
    cpa_cuda_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return cpa_fail(err, CPA_NO_MEMORY, "stream: no memory");
    stream->base.device = device;
    CPA_TRY_GOTO(cpa_cuda_check(err, cudaHostAlloc((void **)&stream->bad_slot, sizeof *stream->bad_slot, 0), "stream"),
                 failed);
    *stream->bad_slot = (cpa_cuda_bad_slot){0};
    stream->wrapped = wrapped != NULL;
    stream->handle = wrapped;
    if (!wrapped)
        CPA_TRY_GOTO(cpa_cuda_check(err, cudaStreamCreateWithFlags(&stream->handle, cudaStreamNonBlocking), "stream"),
                     failed);
    stream->base.native = stream->handle;
    *out = &stream->base;
    return CPA_OK;
failed:
    (void)cudaFreeHost(stream->bad_slot);
    free(stream);
    return status;
}

static cpa_status stream_create(cpa_device *device, cpa_stream **out, cpa_error *err) {
    return make_stream(device, NULL, out, err);
}

/* The stream may be in capture, where memory is refused in the default modes; what is allocated here is none of the
 * graph's. */
static cpa_status stream_wrap(cpa_device *device, void *native, cpa_stream **out, cpa_error *err) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    const cpa_status status = make_stream(device, (cudaStream_t)native, out, err);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return status;
}

static void stream_destroy(cpa_stream *base) {
    cpa_cuda_stream *stream = (cpa_cuda_stream *)base;
    if (!stream) return;
    (void)cpa_cuda_select(base->device, NULL);
    (void)cudaStreamSynchronize(stream->handle);
    cpa_cuda_products_destroy(stream);
    if (!stream->wrapped) (void)cudaStreamDestroy(stream->handle);
    (void)cudaFreeHost(stream->bad_slot);
    free(stream);
}

static int stream_is_captured(const cpa_stream *base) {
    const cpa_cuda_stream *stream = (const cpa_cuda_stream *)base;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (stream->capturing) return 0;
    if (cudaStreamIsCapturing(stream->handle, &capture) != cudaSuccess) (void)cudaGetLastError();
    return capture != cudaStreamCaptureStatusNone;
}

/* A kernel cannot refuse: what kv_write found wrong shows here. */
static cpa_status take_bad_slot(cpa_cuda_stream *stream) {
    cpa_cuda_bad_slot bad = *stream->bad_slot;
    if (!bad.found) return CPA_OK;
    *stream->bad_slot = (cpa_cuda_bad_slot){0};
    return cpa_fail(&stream->base.error, CPA_INVALID,
                    "kv_write: slot_mapping[%lld] is %lld, which is no slot of the cache", (long long)bad.token,
                    (long long)bad.slot);
}

static cpa_status stream_sync(cpa_stream *base) {
    cpa_cuda_stream *stream = (cpa_cuda_stream *)base;
    cudaError_t error = cudaErrorNotReady;
    CPA_TRY(cpa_cuda_select(base->device, &base->error));
    const int looks = cpa_progress_looks(&base->progress);
    while (looks && error == cudaErrorNotReady) {
        error = cudaStreamQuery(stream->handle);
        cpa_progress_look(&base->progress);
    }
    if (!looks) error = cudaStreamSynchronize(stream->handle);
    CPA_TRY(cpa_cuda_check(&base->error, error, "stream"));
    return take_bad_slot(stream);
}

static cpa_status copy(void *dst, const void *src, int64_t bytes, cpa_stream *stream) {
    if (bytes <= 0) return CPA_OK;
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_check(&stream->error,
                          cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, cpa_cuda_handle(stream)), "copy");
}

static cpa_status copy_rows(void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch, int64_t row_bytes,
                            int64_t rows, cpa_stream *stream) {
    if (rows <= 0 || row_bytes <= 0) return CPA_OK;
    if (dst_pitch == row_bytes && src_pitch == row_bytes) return copy(dst, src, rows * row_bytes, stream);
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_check(&stream->error,
                          cudaMemcpy2DAsync(dst, (size_t)dst_pitch, src, (size_t)src_pitch, (size_t)row_bytes,
                                            (size_t)rows, cudaMemcpyDefault, cpa_cuda_handle(stream)),
                          "copy_rows");
}

static const char *attend_path(cpa_device *base, int32_t index) {
    static const char *const names[] = {"simple", "portable", "hopper"};
    cpa_cuda_device *device = (cpa_cuda_device *)base;
    device->path_is_set = index >= 0;
    if (index < 0) device->path = device->best;
    if (index < 0 || index > (int32_t)device->best) return NULL;
    device->path = (cpa_cuda_path)((int32_t)device->best - index);
    return names[device->path];
}

static const cpa_device_table device_table = {
    .close = device_close,
    .alloc_host = cpa_cuda_alloc_host,
    .free_host = cpa_cuda_free_host,
    .alloc = cpa_cuda_alloc,
    .free = cpa_cuda_free,
    .retire = cpa_cuda_retire,
    .release = cpa_cuda_release,
    .stream_create = stream_create,
    .stream_wrap = stream_wrap,
    .stream_destroy = stream_destroy,
    .stream_is_captured = stream_is_captured,
    .stream_sync = stream_sync,
    .copy = copy,
    .copy_rows = copy_rows,
    .events_create = cpa_cuda_events_create,
    .events_destroy = cpa_cuda_events_destroy,
    .event_record = cpa_cuda_event_record,
    .event_seconds = cpa_cuda_event_seconds,
    .event_reached = cpa_cuda_event_reached,
};

static const cpa_graph_table graph_table = {
    .padded_rows = cpa_cuda_most_padded_rows,
    .begin = cpa_cuda_graph_begin,
    .end = cpa_cuda_graph_end,
    .launch = cpa_cuda_graph_launch,
    .destroy = cpa_cuda_graph_destroy,
    .plan_shape = cpa_cuda_plan_shape,
    .index_plan_shape = cpa_cuda_index_plan_shape,
};

static const cpa_operator_table operator_table = {
    .least_workspace = cpa_cuda_least_workspace,
    .plan_create = cpa_cuda_plan_create,
    .plan_set = cpa_cuda_plan_set,
    .plan_upload = cpa_cuda_plan_upload,
    .plan_reserve = cpa_cuda_plan_reserve,
    .plan_update = cpa_cuda_plan_update,
    .plan_destroy = cpa_cuda_plan_destroy,
    .attend_supported = cpa_cuda_attend_supported,
    .attend_kernels = cpa_cuda_attend_kernels_of,
    .attend = cpa_cuda_attend,
    .sparse_attend = cpa_cuda_sparse_attend,
    .merge = cpa_cuda_merge,
    .state_pack = cpa_cuda_state_pack,
    .state_merge_packed = cpa_cuda_state_merge_packed,
    .project_states = cpa_cuda_project_states,
    .index_plan_create = cpa_cuda_index_plan_create,
    .index_plan_set = cpa_cuda_index_plan_set,
    .index_plan_reserve = cpa_cuda_index_plan_reserve,
    .index_plan_upload = cpa_cuda_index_plan_upload,
    .index_plan_destroy = cpa_cuda_index_plan_destroy,
    .index_logits = cpa_cuda_index_logits,
    .kv_write = cpa_cuda_kv_write,
    .kv_copy = cpa_cuda_kv_copy,
    .kv_move = cpa_cuda_kv_move,
    .kv_convert = cpa_cuda_kv_convert,
    .kv_pack = cpa_cuda_kv_pack,
    .kv_gather = cpa_cuda_kv_gather,
    .latent_gather = cpa_cuda_latent_gather,
    .latent_expand = cpa_cuda_latent_expand,
    .copy_blocks = cpa_cuda_copy_blocks,
    .gather_rows = cpa_cuda_gather_rows,
    .synthesize = cpa_cuda_synthesize,
    .hash_rows = cpa_cuda_hash_rows,
    .join_columns = cpa_cuda_join_columns,
    .sum_parts = cpa_cuda_sum_parts,
    .take_tokens = cpa_cuda_take_tokens,
    .block_union = cpa_cuda_block_union,
};

static const cpa_self_test_table self_test_table = {
    .attend_path = attend_path,
    .reference_open = cpa_cuda_reference_open,
    .reference_attend = cpa_cuda_reference_attend,
    .reference_close = cpa_cuda_reference_close,
};

const cpa_backend_table cpa_backend_cuda = {
    .name = "cuda",
    .backend = CPA_BACKEND_CUDA,
    .device_count = device_count,
    .free_memory = free_memory,
    .pci_address = pci_address,
    .open = device_open,
};
