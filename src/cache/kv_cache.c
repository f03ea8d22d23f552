#include "src/cache/kv_cache.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"
#include "kernels/operators.h"

typedef struct cache_layer {
    cpa_block_layout layout;
    int64_t before; /* bytes of a block in the layers before the layer */
} cache_layer;

struct cpa_kv_cache {
    cpa_device *device;
    int64_t num_blocks, host_blocks, block_bytes;
    cache_layer *layers;
    int32_t n_layers, group, on_host;
    char *memory;        /* device: [layers][num_blocks + 1], so that what a layer reads lies together */
    char *host;          /* page-locked: [host_blocks][layers], so that a block is one run of bytes */
    uint64_t *checksums; /* [host_blocks]; 0 for what never left, which nothing else has in practice */
    int64_t (*pairs)[2]; /* pairs of blocks of the moves at hand */
    int64_t cap_pairs;
};

/* ---- memory ---- */

int64_t cpa_kv_cache_block_bytes(const cpa_attention_shape *shape, cpa_index_rows index, int32_t layers,
                                 int32_t block_size) {
    return layers * cpa_block_layout_indexed(shape, index, block_size).bytes;
}

static cpa_status lay_out(cpa_kv_cache *cache, const cpa_kv_cache_options *o, cpa_error *err) {
    cache->layers = calloc((size_t)o->layers, sizeof *cache->layers);
    if (!cache->layers) return cpa_fail(err, CPA_NO_MEMORY, "KV cache: no memory for %" PRId32 " layers", o->layers);
    cache->n_layers = o->layers;
    for (int32_t i = 0; i < o->layers; i++) {
        const cpa_attention_shape *shape = &o->shapes[o->n_shapes == 1 ? 0 : i];
        const cpa_block_layout layout = cpa_block_layout_indexed(shape, o->index, o->block_size);
        cache->layers[i] = (cache_layer){layout, cache->block_bytes};
        cache->block_bytes += layout.bytes;
    }
    return CPA_OK;
}

static cpa_status allocate(cpa_kv_cache *cache, cpa_error *err) {
    const cpa_device_table *table = cache->device->table;
    void *memory;
    const int64_t bytes = (cache->num_blocks + 1) * cache->block_bytes;
    CPA_TRY((cache->on_host ? table->alloc_host : table->alloc)(cache->device, bytes, &memory, err));
    cache->memory = memory;
    if (cache->host_blocks == 0) return CPA_OK;
    cache->checksums = calloc((size_t)cache->host_blocks, sizeof *cache->checksums);
    if (!cache->checksums) return cpa_fail(err, CPA_NO_MEMORY, "KV cache: no memory for checksums");
    CPA_TRY(table->alloc_host(cache->device, cache->host_blocks * cache->block_bytes, &memory, err));
    cache->host = memory;
    return CPA_OK;
}

/* The bytes of a layer's blocks in a tier; layers behind it that are as long go on from there. */
static cpa_block_place place_of(const cpa_kv_cache *cache, cpa_kv_tier tier, int32_t layer) {
    const cache_layer *l = &cache->layers[layer];
    if (tier == CPA_TIER_HOST) return (cpa_block_place){cache->host + l->before, cache->block_bytes, l->layout.bytes};
    const int64_t blocks = cache->num_blocks + 1;
    return (cpa_block_place){cache->memory + blocks * l->before, l->layout.bytes, blocks * l->layout.bytes};
}

static cpa_status clear_null_block(cpa_kv_cache *cache, cpa_stream *stream, cpa_error *err) {
    const cpa_device_table *table = cache->device->table;
    void *zeros = calloc(1, (size_t)cache->block_bytes);
    if (!zeros) return cpa_fail(err, CPA_NO_MEMORY, "KV cache: no memory for a block");
    cpa_status status = CPA_OK;
    for (int32_t layer = 0; layer < cache->n_layers && status == CPA_OK; layer++) {
        const cpa_block_place at = place_of(cache, CPA_TIER_DEVICE, layer);
        status = table->copy(at.first + cache->num_blocks * at.stride, zeros, at.stride, stream);
    }
    if (status == CPA_OK) status = table->stream_sync(stream);
    free(zeros);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "KV cache: %s", stream->error.message);
}

cpa_status cpa_kv_cache_create(const cpa_kv_cache_options *options, cpa_stream *stream, cpa_kv_cache **out,
                               cpa_error *err) {
    cpa_kv_cache *cache = calloc(1, sizeof *cache);
    if (!cache) return cpa_fail(err, CPA_NO_MEMORY, "KV cache: no memory");
    cache->device = stream->device;
    cache->num_blocks = options->num_blocks;
    cache->group = options->group;
    cache->on_host = options->on_host;
    cache->host_blocks = options->host_blocks;
    cpa_status status = lay_out(cache, options, err);
    if (status == CPA_OK) status = allocate(cache, err);
    if (status == CPA_OK) status = clear_null_block(cache, stream, err);
    if (status != CPA_OK) {
        cpa_kv_cache_destroy(cache);
        return status;
    }
    *out = cache;
    return CPA_OK;
}

void cpa_kv_cache_destroy(cpa_kv_cache *cache) {
    if (!cache) return;
    const cpa_device_table *table = cache->device->table;
    if (cache->host) table->free_host(cache->device, cache->host);
    if (cache->memory) (cache->on_host ? table->free_host : table->free)(cache->device, cache->memory);
    free(cache->pairs);
    free(cache->checksums);
    free(cache->layers);
    free(cache);
}

cpa_kv_view cpa_kv_cache_view(const cpa_kv_cache *cache, int32_t layer) {
    return cpa_block_layout_view(&cache->layers[layer].layout, place_of(cache, CPA_TIER_DEVICE, layer).first,
                                 cache->num_blocks + 1, 0);
}

cpa_kv_view cpa_kv_cache_index_view(const cpa_kv_cache *cache, int32_t layer) {
    return cpa_block_layout_index_view(&cache->layers[layer].layout, place_of(cache, CPA_TIER_DEVICE, layer).first,
                                       cache->num_blocks + 1, 0);
}

int32_t cpa_kv_cache_null_block(const cpa_kv_cache *cache) {
    return (int32_t)cache->num_blocks;
}

/* ---- the host tier ---- */

void *cpa_kv_cache_host_block(const cpa_kv_cache *cache, int32_t block) {
    return cache->host + block * cache->block_bytes;
}

/* One-to-one in h and in the word, so two memories that differ in one word never meet again. */
static uint64_t add_word(uint64_t h, uint64_t word) {
    h = (h ^ word) * UINT64_C(0xd6e8feb86659fd93);
    return h ^ h >> 32;
}

/* Four sums side by side, of every fourth word each, which do not wait for each other. */
enum { CHECKSUM_LANES = 4 };

uint64_t cpa_kv_checksum(const void *memory, int64_t bytes) {
    const char *at = memory;
    uint64_t h[CHECKSUM_LANES] = {CPA_GOLDEN ^ (uint64_t)bytes, 1, 2, 3}, words[CHECKSUM_LANES];
    int64_t left = bytes;
    for (; left >= (int64_t)sizeof words; left -= (int64_t)sizeof words, at += sizeof words) {
        memcpy(words, at, sizeof words);
        for (int i = 0; i < CHECKSUM_LANES; i++) h[i] = add_word(h[i], words[i]);
    }
    memset(words, 0, sizeof words);
    if (left > 0) memcpy(words, at, (size_t)left);
    for (int i = 0; i < CHECKSUM_LANES; i++) h[i] = add_word(h[i], words[i]);
    for (int i = 1; i < CHECKSUM_LANES; i++) h[0] = add_word(h[0], h[i]);
    return h[0];
}

void cpa_kv_cache_seal(cpa_kv_cache *cache, int32_t block) {
    cache->checksums[block] = cpa_kv_checksum(cpa_kv_cache_host_block(cache, block), cache->block_bytes);
}

uint64_t cpa_kv_cache_checksum(const cpa_kv_cache *cache, int32_t block) {
    return cache->checksums[block];
}

/* ---- moves ---- */

static cpa_status reserve_pairs(cpa_kv_cache *cache, int64_t n, cpa_stream *stream) {
    if (cpa_array_reserve(&cache->pairs, &cache->cap_pairs, n, sizeof *cache->pairs)) return CPA_OK;
    return cpa_fail(&stream->error, CPA_NO_MEMORY, "KV cache: no memory for %" PRId64 " moves", n);
}

/* Whether a host block still is what left for it; says so if not. */
static int is_sound(const cpa_kv_cache *cache, const cpa_block_move *move) {
    const uint64_t found = cpa_kv_checksum(cpa_kv_cache_host_block(cache, move->from), cache->block_bytes);
    const uint64_t expected = cache->checksums[move->from];
    if (found == expected) return 1;
    cpa_log(CPA_LOG_ERROR,
            "host block %" PRId32 " of request %" PRIu64 " came back with checksum %016" PRIx64
            ", it left with %016" PRIx64 "; the request is computed again",
            move->from, move->request, found, expected);
    return 0;
}

cpa_status cpa_kv_cache_move(cpa_kv_cache *cache, cpa_kv_tier from, cpa_kv_tier to, int32_t rank,
                             const cpa_block_move *moves, int64_t n, uint64_t *damaged, cpa_stream *stream) {
    int64_t count = 0;
    if (n == 0) return CPA_OK;
    if ((from == CPA_TIER_HOST || to == CPA_TIER_HOST) && !cache->host)
        return cpa_fail(&stream->error, CPA_INTERNAL, "KV cache: blocks move, and there is no host memory for them");
    CPA_TRY(reserve_pairs(cache, n, stream));
    for (int64_t i = 0; i < n; i++) {
        if (moves[i].group != cache->group || moves[i].rank != rank) continue;
        if (from == CPA_TIER_HOST && !is_sound(cache, &moves[i])) {
            damaged[i] = 1;
            continue;
        }
        cache->pairs[count][0] = moves[i].from;
        cache->pairs[count++][1] = moves[i].to;
    }
    for (int32_t layer = 0, end; count > 0 && layer < cache->n_layers; layer = end) {
        const int64_t bytes = cache->layers[layer].layout.bytes;
        for (end = layer + 1; end < cache->n_layers && cache->layers[end].layout.bytes == bytes;) end++;
        const cpa_copy_blocks_args copy = {.src = place_of(cache, from, layer),
                                           .dst = place_of(cache, to, layer),
                                           .bytes = bytes,
                                           .layers = end - layer,
                                           .pairs = (const int64_t(*)[2])cache->pairs,
                                           .n_pairs = count};
        CPA_TRY(stream->device->operators->copy_blocks(&copy, stream));
    }
    if (to != CPA_TIER_HOST || count == 0) return CPA_OK;
    CPA_TRY(stream->device->table->stream_sync(stream));
    for (int64_t i = 0; i < count; i++) cpa_kv_cache_seal(cache, (int32_t)cache->pairs[i][1]);
    return CPA_OK;
}

/* ---- how fast a tier is ---- */

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

cpa_status cpa_kv_tier_bandwidth(cpa_device *device, double *bandwidth, cpa_error *err) {
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
        if (status != CPA_OK) cpa_fail(err, status, "KV cache: %s", stream->error.message);
    }
    if (status == CPA_OK) *bandwidth = PROBE_BYTES / fmax(fmax(in, out), 1e-9);
    if (stream) table->stream_destroy(stream);
    if (memory) table->free(device, memory);
    if (host) table->free_host(device, host);
    return status;
}
