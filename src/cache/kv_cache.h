/* The KV cache of a group of layers on a rank: it owns the memory of these.
 *
 * A block is block_size tokens of one sequence in each of the layers, in each the bytes of that layer's layout
 * (kernels/block_layout.h). Blocks lie in tiers that hold the same bytes: those of the device, which operators see a
 * layer at a time through views, and those in host memory, which keep what gave way to others, each with a checksum.
 * Block numbers are those of a tier. */
#ifndef CPA_KV_CACHE_H
#define CPA_KV_CACHE_H

#include <cpattn/device.h>
#include <cpattn/types.h>

#include "kernels/block_layout.h"
#include "src/cache/block_move.h"

typedef enum cpa_kv_tier { CPA_TIER_DEVICE = 0, CPA_TIER_HOST } cpa_kv_tier;

typedef struct cpa_kv_cache_options {
    const cpa_attention_shape *shapes; /* [n_shapes] shape of each layer, or one of all; read by the call alone */
    int32_t n_shapes;                  /* layers, or 1 */
    cpa_index_rows index;              /* keys of an indexer, of every layer */
    int32_t layers;
    int32_t block_size;
    int64_t num_blocks;  /* blocks on the device, without the null block */
    int64_t host_blocks; /* blocks in host memory; 0: there is no such tier */
    int32_t group;       /* the group of layers, whose moves it makes (layer_groups.h) */
    int32_t on_host;     /* 1: the blocks that operators see lie in page-locked memory of the host */
} cpa_kv_cache_options;

typedef struct cpa_kv_cache cpa_kv_cache;

/* Bytes of one block: all layers, of one shape. */
int64_t cpa_kv_cache_block_bytes(const cpa_attention_shape *shape, cpa_index_rows index, int32_t layers,
                                 int32_t block_size);

/* Allocates all tiers and clears the null block, on a stream of the device, which it waits for. The device must outlive
 * the cache. What the other blocks hold is undefined. */
cpa_status cpa_kv_cache_create(const cpa_kv_cache_options *options, cpa_stream *stream, cpa_kv_cache **out,
                               cpa_error *err);
/* NULL does nothing. Nothing that is enqueued may use the cache any more. */
void cpa_kv_cache_destroy(cpa_kv_cache *cache);

/* The device's blocks of one layer, the null block behind them. */
cpa_kv_view cpa_kv_cache_view(const cpa_kv_cache *cache, int32_t layer);
/* The keys of its indexer in the same blocks; all zero without any. */
cpa_kv_view cpa_kv_cache_index_view(const cpa_kv_cache *cache, int32_t layer);

/* The block that entries of block tables name which no query sees: zeros in every layer. attend may load such keys all
 * the same, beside others in one tile, and give them the weight 0; so they have to be numbers, which what lies in a
 * block that is free or someone else's need not be. */
int32_t cpa_kv_cache_null_block(const cpa_kv_cache *cache);

/* Moves, or copies, the blocks of the entries of a list that are of one rank and of the cache's group from tier to tier
 * or within the device, as bytes; layers of one length go together. No block is both read and written. Copies to and
 * within the device are enqueued alone, and read their source until the stream is idle; those to the host have arrived
 * when this returns, since their checksums are taken then. A block that comes back from the host with another checksum
 * than it left with is not written to the device: damaged[i], of n, is set to 1 for such a move and left alone for the
 * others, and the error is logged. */
cpa_status cpa_kv_cache_move(cpa_kv_cache *cache, cpa_kv_tier from, cpa_kv_tier to, int32_t rank,
                             const cpa_block_move *moves, int64_t n, uint64_t *damaged, cpa_stream *stream);

/* A block in host memory, all of its layers; who has written it there without a move seals it. */
void *cpa_kv_cache_host_block(const cpa_kv_cache *cache, int32_t block);
void cpa_kv_cache_seal(cpa_kv_cache *cache, int32_t block);
/* The checksum that it came there with. */
uint64_t cpa_kv_cache_checksum(const cpa_kv_cache *cache, int32_t block);

/* A checksum that any change of one aligned word alters. bytes is a multiple of 8 or the rest is taken as zeros. */
uint64_t cpa_kv_checksum(const void *memory, int64_t bytes);

/* Bytes per second of copies between the device and host memory, the slower way of the two; takes some milliseconds. */
cpa_status cpa_kv_tier_bandwidth(cpa_device *device, double *bandwidth, cpa_error *err);

#endif
