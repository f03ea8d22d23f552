/* What one rank keeps of preempted sequences in host memory: whole blocks, all layers, each with a checksum. */
#ifndef CPA_SWAP_H
#define CPA_SWAP_H

#include <cpattn/engine.h>

#include "src/cache/block_move.h"

typedef struct cpa_swap_options {
    cpa_kv_view (*layer_kv)(const void *ctx, int32_t layer); /* the device's blocks of a layer */
    const void *ctx;
    int32_t layers;
    int64_t host_blocks;
} cpa_swap_options;

typedef struct cpa_swap cpa_swap;

/* Bytes of one block, all layers, keys and values, as the views of the layers describe it. */
int64_t cpa_swap_block_bytes(const cpa_swap_options *options);

/* The device, and what layer_kv reads through ctx, must outlive it. */
cpa_status cpa_swap_create(cpa_device *device, const cpa_swap_options *options, cpa_swap **out, cpa_error *err);
void cpa_swap_destroy(cpa_swap *swap);

/* Moves the blocks of one rank's entries of a list out of or into the device's memory, a kv_copy a layer. out returns
 * when the blocks are there, since their checksums are taken then; in only enqueues its copies, which read the host
 * blocks until the stream is idle. A block that comes back with another checksum than it left with is not written to
 * the device; damaged[i], of n, is set to 1 for such a move and left alone for the others, and the error is logged. */
cpa_status cpa_swap_out(cpa_swap *swap, int32_t rank, const cpa_block_move *moves, int64_t n, cpa_stream *stream);
cpa_status cpa_swap_in(cpa_swap *swap, int32_t rank, const cpa_block_move *moves, int64_t n, uint64_t *damaged,
                       cpa_stream *stream);

/* A checksum that any change of one aligned word alters. bytes is a multiple of 8 or the rest is taken as zeros. */
uint64_t cpa_swap_checksum(const void *memory, int64_t bytes);

/* Bytes per second of copies between the device and host memory, the slower way of the two; takes some milliseconds. */
cpa_status cpa_swap_measure(cpa_device *device, double *bandwidth, cpa_error *err);

#endif
