#include "src/swap.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/fault.h"
#include "kernels/kernels.h"

struct cpa_swap {
    cpa_device *device;
    cpa_swap_options options;
    int64_t block_bytes;
    void *memory;        /* [host_blocks][layers][keys, values], page-locked */
    uint64_t *checksums; /* [host_blocks] */
};

static int64_t key_bytes(const cpa_kv_view *kv) {
    return kv->k_block_stride * cpa_dtype_bytes(kv->dtype);
}

static int64_t value_bytes(const cpa_kv_view *kv) {
    return kv->v_block_stride * cpa_dtype_bytes(kv->dtype);
}

int64_t cpa_swap_block_bytes(const cpa_swap_options *options) {
    cpa_kv_view kv = options->layer_kv(options->ctx, 0);
    return options->layers * (key_bytes(&kv) + value_bytes(&kv));
}

cpa_status cpa_swap_create(cpa_device *device, const cpa_swap_options *options, cpa_swap **out, cpa_error *err) {
    cpa_swap *swap = calloc(1, sizeof *swap);
    if (!swap) return cpa_fail(err, CPA_NO_MEMORY, "swap: no memory");
    swap->device = device;
    swap->options = *options;
    swap->block_bytes = cpa_swap_block_bytes(options);
    swap->checksums = calloc((size_t)options->host_blocks, sizeof *swap->checksums);
    cpa_status status = swap->checksums ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "swap: no memory");
    if (status == CPA_OK)
        status = device->kernels->alloc_host(device, options->host_blocks * swap->block_bytes, &swap->memory, err);
    if (status != CPA_OK) {
        cpa_swap_destroy(swap);
        return status;
    }
    *out = swap;
    return CPA_OK;
}

void cpa_swap_destroy(cpa_swap *swap) {
    if (!swap) return;
    if (swap->memory) swap->device->kernels->free_host(swap->device, swap->memory);
    free(swap->checksums);
    free(swap);
}

static char *host_block(const cpa_swap *swap, int32_t block) {
    return (char *)swap->memory + block * swap->block_bytes;
}

/* h -> (h ^ word) * odd, then a shifted copy xored in: each step is one-to-one in h and in the word, so two memories
 * that differ in one word never meet again. */
uint64_t cpa_swap_checksum(const void *memory, int64_t bytes) {
    uint64_t h = UINT64_C(0x9e3779b97f4a7c15) ^ (uint64_t)bytes;
    for (int64_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)memory + at, bytes - at < 8 ? (size_t)(bytes - at) : 8);
        h = (h ^ word) * UINT64_C(0xd6e8feb86659fd93);
        h ^= h >> 32;
    }
    return h;
}

/* Copies a block of all layers between its place on the device and one in host memory. */
static cpa_status copy_block(const cpa_swap *swap, int32_t device_block, int32_t at, int out, cpa_stream *stream) {
    const cpa_kernel_table *kernels = stream->device->kernels;
    char *host = host_block(swap, at);
    for (int32_t layer = 0; layer < swap->options.layers; layer++) {
        cpa_kv_view kv = swap->options.layer_kv(swap->options.ctx, layer);
        int64_t k_bytes = key_bytes(&kv), v_bytes = value_bytes(&kv);
        char *k = (char *)kv.k + device_block * k_bytes, *v = (char *)kv.v + device_block * v_bytes;
        CPA_TRY(kernels->copy(out ? host : k, out ? k : host, k_bytes, stream));
        host += k_bytes;
        CPA_TRY(kernels->copy(out ? host : v, out ? v : host, v_bytes, stream));
        host += v_bytes;
    }
    return CPA_OK;
}

cpa_status cpa_swap_out(cpa_swap *swap, int32_t rank, const cpa_plan_move *moves, int64_t n, cpa_stream *stream) {
    for (int64_t i = 0; i < n; i++)
        if (moves[i].rank == rank) CPA_TRY(copy_block(swap, moves[i].from, moves[i].to, 1, stream));
    CPA_TRY(stream->device->kernels->stream_sync(stream));
    for (int64_t i = 0; i < n; i++) {
        if (moves[i].rank != rank) continue;
        swap->checksums[moves[i].to] = cpa_swap_checksum(host_block(swap, moves[i].to), swap->block_bytes);
    }
    return CPA_OK;
}

cpa_status cpa_swap_in(cpa_swap *swap, int32_t rank, const cpa_plan_move *moves, int64_t n, uint64_t *damaged,
                       cpa_stream *stream) {
    for (int64_t i = 0; i < n; i++) {
        if (moves[i].rank != rank) continue;
        char *host = host_block(swap, moves[i].from);
        if (cpa_fault_is(CPA_FAULT_DAMAGED_SWAP) && moves[i].from % 3 == 0) host[swap->block_bytes / 2] ^= 4;
        uint64_t found = cpa_swap_checksum(host, swap->block_bytes), expected = swap->checksums[moves[i].from];
        if (found == expected) {
            CPA_TRY(copy_block(swap, moves[i].to, moves[i].from, 0, stream));
            continue;
        }
        damaged[i] = 1;
        cpa_log(CPA_LOG_ERROR,
                "host block %" PRId32 " of request %" PRIu64 " came back with checksum %016" PRIx64
                ", it left with %016" PRIx64 "; the request is computed again",
                moves[i].from, moves[i].request, found, expected);
    }
    return stream->device->kernels->stream_sync(stream);
}

enum { PROBE_BYTES = 8 << 20, PROBE_COPIES = 4 };

/* Seconds of the fastest of a few copies. */
static cpa_status time_copies(void *dst, const void *src, cpa_stream *stream, double *out) {
    const cpa_kernel_table *kernels = stream->device->kernels;
    double best = INFINITY;
    for (int i = 0; i < PROBE_COPIES; i++) {
        double start = cpa_clock_now();
        CPA_TRY(kernels->copy(dst, src, PROBE_BYTES, stream));
        CPA_TRY(kernels->stream_sync(stream));
        best = fmin(best, cpa_clock_now() - start);
    }
    *out = best;
    return CPA_OK;
}

cpa_status cpa_swap_measure(cpa_device *device, double *bandwidth, cpa_error *err) {
    const cpa_kernel_table *kernels = device->kernels;
    void *memory = NULL, *host = NULL;
    cpa_stream *stream = NULL;
    double out = 0, in = 0;
    cpa_status status = kernels->alloc_host(device, PROBE_BYTES, &host, err);
    if (status == CPA_OK) status = kernels->alloc(device, PROBE_BYTES, &memory, err);
    if (status == CPA_OK) status = kernels->stream_create(device, &stream, err);
    if (status == CPA_OK) {
        memset(host, 0, PROBE_BYTES);
        status = time_copies(memory, host, stream, &in);
        if (status == CPA_OK) status = time_copies(host, memory, stream, &out);
        if (status != CPA_OK) cpa_fail(err, status, "swap: %s", stream->error.message);
    }
    if (status == CPA_OK) *bandwidth = PROBE_BYTES / fmax(fmax(in, out), 1e-9);
    if (stream) kernels->stream_destroy(stream);
    if (memory) kernels->free(device, memory);
    if (host) kernels->free_host(device, host);
    return status;
}
