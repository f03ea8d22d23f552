/* The host back end: device, memory, streams, copies, and its tables. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/check.h"
#include "kernels/host/attend/attend_rows.h"
#include "kernels/host/nn/nn.h"

const cpa_attend_isa *const cpa_attend_isas[] = {
    &cpa_attend_portable,
#ifdef __x86_64__
    &cpa_attend_avx2,
#ifndef CPA_WITHOUT_AVX512
    &cpa_attend_avx512,
    &cpa_attend_avx512bf16,
    &cpa_attend_amx,
#endif
#endif
    NULL,
};

/* Takes the widest instruction sets that this CPU has. VDPBF16PS is for those of AMD: Zen 5 starts two in a cycle, as
 * many as FMA, but Emerald Rapids one in two cycles, so that FMA in fp32 is twice as fast there. */
static void pick_isas(cpa_host_device *device) {
    for (int i = 0; cpa_attend_isas[i]; i++) {
#if defined __x86_64__ && !defined CPA_WITHOUT_AVX512
        if (cpa_attend_isas[i] == &cpa_attend_avx512bf16 && !__builtin_cpu_is("amd")) continue;
#endif
        if (cpa_attend_isas[i]->supported()) cpa_host_use_isa(device, cpa_attend_isas[i]);
    }
}

static void device_close(cpa_device *base) {
    cpa_host_device *device = (cpa_host_device *)base;
    cpa_threads_destroy(device->threads);
    for (int32_t i = 0; device->workspaces && i < device->thread_count; i++)
        cpa_attend_workspace_destroy(device->workspaces[i]);
    free(device->workspaces);
    free(device);
}

/* The tables that the device is made of, below. */
static const cpa_device_table device_table;
static const cpa_operator_table operator_table;
static const cpa_self_test_table self_test_table;

static int32_t device_count(void) {
    return 1;
}

static int64_t free_memory(int32_t ordinal) {
    (void)ordinal;
    return -1;
}

static void pci_address(int32_t ordinal, char *out) {
    (void)ordinal;
    out[0] = 0;
}

static cpa_status device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err) {
    cpa_status status = CPA_OK;
    cpa_host_device *device = calloc(1, sizeof *device);
    if (!device) return cpa_fail(err, CPA_NO_MEMORY, "device: no memory");
    device->base.backend = CPA_BACKEND_HOST;
    device->base.table = &device_table;
    device->base.operators = &operator_table;
    device->base.nn = &cpa_host_nn;
    device->base.self_test = &self_test_table;
    device->base.caps = (cpa_device_caps){.bit_exact = 1, .split_tokens = CPA_HOST_SPLIT_TOKENS};
    device->thread_count = options->threads > 0 ? options->threads : 1;
    pick_isas(device);
    device->workspaces = calloc((size_t)device->thread_count, sizeof *device->workspaces);
    if (!device->workspaces) {
        status = cpa_fail(err, CPA_NO_MEMORY, "device: no memory for %d threads", device->thread_count);
        goto failed;
    }
    for (int32_t i = 0; i < device->thread_count; i++)
        CPA_TRY_GOTO(cpa_attend_workspace_create(&device->workspaces[i], err), failed);
    CPA_TRY_GOTO(cpa_threads_create(device->thread_count, options->cpus, options->n_cpus, &device->threads, err),
                 failed);
    snprintf(device->base.description, sizeof device->base.description, "host, %s%s%s, %d %s", device->isa->name,
             device->pair_isa ? " with " : "", device->pair_isa ? device->pair_isa->name : "", device->thread_count,
             device->thread_count == 1 ? "thread" : "threads");
    *out = &device->base;
    return CPA_OK;
failed:
    device_close(&device->base);
    return status;
}

static cpa_status host_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err) {
    const size_t cache_line = 64, huge_page = (size_t)2 << 20;
    size_t size = bytes > 0 ? (size_t)bytes : 1;
    size_t alignment = size >= huge_page ? huge_page : cache_line;
    void *memory;
    (void)device;
    if (posix_memalign(&memory, alignment, size))
        return cpa_fail(err, CPA_NO_MEMORY, "device: no memory for %lld bytes", (long long)bytes);
    if (alignment == huge_page) madvise(memory, size, MADV_HUGEPAGE); /* fewer TLB misses; a hint that may fail */
    *out = memory;
    return CPA_OK;
}

/* The same, or from the caller's allocator. */
static cpa_status device_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err) {
    if (!device->memory.alloc) return host_alloc(device, bytes, out, err);
    void *memory = device->memory.alloc(device->memory.ctx, bytes > 0 ? bytes : 1);
    if (!memory)
        return cpa_fail(err, CPA_NO_MEMORY, "device: the caller's allocator has no %lld bytes", (long long)bytes);
    *out = memory;
    return CPA_OK;
}

static void host_free(cpa_device *device, void *memory) {
    (void)device;
    free(memory);
}

static void device_free(cpa_device *device, void *memory) {
    if (!device->memory.free) {
        free(memory);
    } else if (memory) {
        device->memory.free(device->memory.ctx, memory);
    }
}

/* Nothing is retired: operations have run when they return. */
static void release(cpa_device *device) {
    (void)device;
}

static cpa_status stream_create(cpa_device *device, cpa_stream **out, cpa_error *err) {
    cpa_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return cpa_fail(err, CPA_NO_MEMORY, "stream: no memory");
    stream->device = device;
    *out = stream;
    return CPA_OK;
}

static cpa_status stream_wrap(cpa_device *device, void *native, cpa_stream **out, cpa_error *err) {
    (void)device, (void)native, (void)out;
    return cpa_fail(err, CPA_UNSUPPORTED, "stream: the host back end has no streams of its own to wrap");
}

static int stream_is_captured(const cpa_stream *stream) {
    (void)stream;
    return 0;
}

static void stream_destroy(cpa_stream *stream) {
    free(stream);
}

/* Operations have run when they return, and none fails after that. */
static cpa_status stream_sync(cpa_stream *stream) {
    (void)stream;
    return CPA_OK;
}

static cpa_status host_copy(void *dst, const void *src, int64_t bytes, cpa_stream *stream) {
    (void)stream;
    if (bytes > 0) memcpy(dst, src, (size_t)bytes);
    return CPA_OK;
}

static cpa_status copy_rows(void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch, int64_t row_bytes,
                            int64_t rows, cpa_stream *stream) {
    (void)stream;
    for (int64_t i = 0; i < rows; i++)
        memcpy((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, (size_t)row_bytes);
    return CPA_OK;
}

static cpa_status gather_rows(void *dst, const void *src, const int32_t *map, int64_t rows, int64_t row_bytes,
                              cpa_stream *stream) {
    (void)stream;
    for (int64_t i = 0; i < rows; i++)
        memcpy((char *)dst + i * row_bytes, (const char *)src + (map ? map[i] : i) * row_bytes, (size_t)row_bytes);
    return CPA_OK;
}

static const char *attend_path(cpa_device *device, int32_t index) {
    return index == 0 ? ((cpa_host_device *)device)->isa->name : NULL;
}

/* Nothing has to be brought anywhere. */
static cpa_status plan_upload(const cpa_attend_plan *plan, cpa_stream *stream) {
    (void)plan, (void)stream;
    return CPA_OK;
}

static const cpa_device_table device_table = {
    .close = device_close,
    .alloc_host = host_alloc,
    .free_host = host_free,
    .alloc = device_alloc,
    .free = device_free,
    .retire = device_free,
    .release = release,
    .stream_create = stream_create,
    .stream_wrap = stream_wrap,
    .stream_destroy = stream_destroy,
    .stream_is_captured = stream_is_captured,
    .stream_sync = stream_sync,
    .copy = host_copy,
    .copy_rows = copy_rows,
    .events_create = cpa_host_events_create,
    .events_destroy = cpa_host_events_destroy,
    .event_record = cpa_host_event_record,
    .event_seconds = cpa_host_event_seconds,
    .event_reached = cpa_host_event_reached,
};

static const cpa_operator_table operator_table = {
    .least_workspace = cpa_host_least_workspace,
    .plan_create = cpa_host_plan_create,
    .plan_set = cpa_host_plan_set,
    .plan_upload = plan_upload,
    .plan_reserve = cpa_host_plan_reserve,
    .plan_update = cpa_host_plan_update,
    .plan_destroy = cpa_host_plan_destroy,
    .attend_supported = cpa_host_attend_supported,
    .attend_kernels = cpa_host_attend_kernels_of,
    .attend = cpa_host_attend,
    .sparse_attend = cpa_host_sparse_attend,
    .merge = cpa_host_merge,
    .state_pack = cpa_host_state_pack,
    .state_merge_packed = cpa_host_state_merge_packed,
    .project_states = cpa_host_project_states,
    .index_plan_create = cpa_host_index_plan_create,
    .index_plan_set = cpa_host_index_plan_set,
    .index_plan_reserve = cpa_host_index_plan_reserve,
    .index_plan_upload = cpa_host_index_plan_upload,
    .index_plan_destroy = cpa_host_index_plan_destroy,
    .index_logits = cpa_host_index_logits,
    .kv_write = cpa_host_kv_write,
    .kv_copy = cpa_host_kv_copy,
    .kv_move = cpa_host_kv_move,
    .kv_convert = cpa_host_kv_convert,
    .kv_pack = cpa_host_kv_pack,
    .kv_gather = cpa_host_kv_gather,
    .latent_gather = cpa_host_latent_gather,
    .latent_expand = cpa_host_latent_expand,
    .copy_blocks = cpa_host_copy_blocks,
    .gather_rows = gather_rows,
    .synthesize = cpa_host_synthesize,
    .hash_rows = cpa_host_hash_rows,
    .join_columns = cpa_host_join_columns,
    .sum_parts = cpa_host_sum_parts,
    .take_tokens = cpa_host_take_tokens,
    .block_union = cpa_host_block_union,
};

static const cpa_self_test_table self_test_table = {.attend_path = attend_path};

const cpa_backend_table cpa_backend_host = {
    .name = "host",
    .backend = CPA_BACKEND_HOST,
    .device_count = device_count,
    .free_memory = free_memory,
    .pci_address = pci_address,
    .open = device_open,
};
