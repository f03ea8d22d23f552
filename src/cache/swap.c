#include "src/cache/swap.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/fault.h"
#include "base/hash.h"
#include "kernels/operators.h"

struct cpa_swap {
    cpa_device *device;
    cpa_swap_options options;
    int64_t block_bytes;
    void *memory;        /* [host_blocks][layers][keys, values], page-locked */
    uint64_t *checksums; /* [host_blocks] */
    int64_t (*pairs)[2]; /* of the moves at hand */
    int64_t cap_pairs;
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
        status = device->table->alloc_host(device, options->host_blocks * swap->block_bytes, &swap->memory, err);
    if (status != CPA_OK) {
        cpa_swap_destroy(swap);
        return status;
    }
    *out = swap;
    return CPA_OK;
}

void cpa_swap_destroy(cpa_swap *swap) {
    if (!swap) return;
    if (swap->memory) swap->device->table->free_host(swap->device, swap->memory);
    free(swap->pairs);
    free(swap->checksums);
    free(swap);
}

static char *host_block(const cpa_swap *swap, int64_t block) {
    return (char *)swap->memory + block * swap->block_bytes;
}

/* h -> (h ^ word) * odd, then a shifted copy xored in: each step is one-to-one in h and in the word, so two memories
 * that differ in one word never meet again. */
uint64_t cpa_swap_checksum(const void *memory, int64_t bytes) {
    uint64_t h = CPA_GOLDEN ^ (uint64_t)bytes;
    for (int64_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)memory + at, bytes - at < 8 ? (size_t)(bytes - at) : 8);
        h = (h ^ word) * UINT64_C(0xd6e8feb86659fd93);
        h ^= h >> 32;
    }
    return h;
}

/* The blocks of a layer in host memory, as a cache. */
static cpa_kv_view host_kv(const cpa_swap *swap, const cpa_kv_view *device, int32_t layer) {
    cpa_kv_view host = *device;
    int64_t element = cpa_dtype_bytes(device->dtype), k_bytes = key_bytes(device);
    host.k = (char *)swap->memory + layer * (k_bytes + value_bytes(device));
    host.v = (char *)host.k + k_bytes;
    host.k_block_stride = host.v_block_stride = swap->block_bytes / element;
    host.num_blocks = swap->options.host_blocks;
    return host;
}

/* Enqueues the copies of swap->pairs, [from, to], of all layers. */
static cpa_status copy_pairs(const cpa_swap *swap, int64_t n, int out, cpa_stream *stream) {
    for (int32_t layer = 0; n > 0 && layer < swap->options.layers; layer++) {
        cpa_kv_view device = swap->options.layer_kv(swap->options.ctx, layer), host = host_kv(swap, &device, layer);
        cpa_kv_copy_args copy = {sizeof copy, out ? device : host, out ? host : device,
                                 (const int64_t(*)[2])swap->pairs, n};
        CPA_TRY(stream->device->operators->kv_copy(&copy, stream));
    }
    return CPA_OK;
}

static cpa_status reserve_pairs(cpa_swap *swap, int64_t n, cpa_stream *stream) {
    if (n <= swap->cap_pairs) return CPA_OK;
    int64_t(*moved)[2] = realloc(swap->pairs, (size_t)n * sizeof *moved);
    if (!moved) return cpa_fail(&stream->error, CPA_NO_MEMORY, "swap: no memory for %" PRId64 " moves", n);
    swap->pairs = moved;
    swap->cap_pairs = n;
    return CPA_OK;
}

cpa_status cpa_swap_out(cpa_swap *swap, int32_t rank, const cpa_block_move *moves, int64_t n, cpa_stream *stream) {
    int64_t mine = 0;
    CPA_TRY(reserve_pairs(swap, n, stream));
    for (int64_t i = 0; i < n; i++) {
        if (moves[i].rank != rank) continue;
        swap->pairs[mine][0] = moves[i].from;
        swap->pairs[mine++][1] = moves[i].to;
    }
    CPA_TRY(copy_pairs(swap, mine, 1, stream));
    CPA_TRY(stream->device->table->stream_sync(stream));
    for (int64_t i = 0; i < mine; i++) {
        int64_t to = swap->pairs[i][1];
        swap->checksums[to] = cpa_swap_checksum(host_block(swap, to), swap->block_bytes);
    }
    return CPA_OK;
}

cpa_status cpa_swap_in(cpa_swap *swap, int32_t rank, const cpa_block_move *moves, int64_t n, uint64_t *damaged,
                       cpa_stream *stream) {
    int64_t sound = 0;
    CPA_TRY(reserve_pairs(swap, n, stream));
    for (int64_t i = 0; i < n; i++) {
        if (moves[i].rank != rank) continue;
        char *host = host_block(swap, moves[i].from);
        if (cpa_fault_is(CPA_FAULT_DAMAGED_SWAP) && moves[i].from % 3 == 0) host[swap->block_bytes / 2] ^= 4;
        uint64_t found = cpa_swap_checksum(host, swap->block_bytes), expected = swap->checksums[moves[i].from];
        if (found == expected) {
            swap->pairs[sound][0] = moves[i].from;
            swap->pairs[sound++][1] = moves[i].to;
            continue;
        }
        damaged[i] = 1;
        cpa_log(CPA_LOG_ERROR,
                "host block %" PRId32 " of request %" PRIu64 " came back with checksum %016" PRIx64
                ", it left with %016" PRIx64 "; the request is computed again",
                moves[i].from, moves[i].request, found, expected);
    }
    return copy_pairs(swap, sound, 0, stream);
}

enum { PROBE_BYTES = 8 << 20, PROBE_COPIES = 4 };

/* Seconds of the fastest of a few copies. */
static cpa_status time_copies(void *dst, const void *src, cpa_stream *stream, double *out) {
    const cpa_device_table *table = stream->device->table;
    double best = INFINITY;
    for (int i = 0; i < PROBE_COPIES; i++) {
        double start = cpa_clock_now();
        CPA_TRY(table->copy(dst, src, PROBE_BYTES, stream));
        CPA_TRY(table->stream_sync(stream));
        best = fmin(best, cpa_clock_now() - start);
    }
    *out = best;
    return CPA_OK;
}

cpa_status cpa_swap_measure(cpa_device *device, double *bandwidth, cpa_error *err) {
    const cpa_device_table *table = device->table;
    void *memory = NULL, *host = NULL;
    cpa_stream *stream = NULL;
    double out = 0, in = 0;
    cpa_status status = table->alloc_host(device, PROBE_BYTES, &host, err);
    if (status == CPA_OK) status = table->alloc(device, PROBE_BYTES, &memory, err);
    if (status == CPA_OK) status = table->stream_create(device, &stream, err);
    if (status == CPA_OK) {
        memset(host, 0, PROBE_BYTES);
        status = time_copies(memory, host, stream, &in);
        if (status == CPA_OK) status = time_copies(host, memory, stream, &out);
        if (status != CPA_OK) cpa_fail(err, status, "swap: %s", stream->error.message);
    }
    if (status == CPA_OK) *bandwidth = PROBE_BYTES / fmax(fmax(in, out), 1e-9);
    if (stream) table->stream_destroy(stream);
    if (memory) table->free(device, memory);
    if (host) table->free_host(device, host);
    return status;
}
