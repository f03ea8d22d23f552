/* A block that moves on one rank. */
#ifndef CPA_BLOCK_MOVE_H
#define CPA_BLOCK_MOVE_H

#include <stdint.h>

/* Between two device blocks (copy), from a device block to a host block (swap out), or from a host block to a device
 * block (swap in). */
typedef struct cpa_block_move {
    uint64_t request;
    int32_t group; /* group of layers (layer_groups.h) */
    int32_t rank;
    int32_t from, to; /* blocks of the group's pools on the rank */
} cpa_block_move;

#endif
