/* Which blocks of a cache come through a ring for rows that attend selected blocks of keys alone (cpa_key_blocks): those
 * in which some row and some head of an item attends a key. The bits may be made on the device right before, so that the
 * host waits for their union. */
#ifndef CPA_OPS_RING_BLOCKS_H
#define CPA_OPS_RING_BLOCKS_H

#include "kernels/operators.h"
#include "src/ops/ring_passes.h"

/* The blocks of a pass that are attended. */
typedef struct cpa_ring_selected {
    int64_t first_run, n_runs;
    int lacks; /* not 0: these are not all */
} cpa_ring_selected;

typedef struct cpa_ring_blocks {
    int is_selected; /* 0: all blocks of all passes are attended */
    cpa_ring_selected *passes;
    cpa_ring_run *runs;
    int64_t n_runs, passes_capacity, runs_capacity;
    int64_t items, rows; /* of the setting; rows < 0: their items are not listed yet */
    /* Page-locked, and the same on the device: of each row its item, and of each item the union of bits. */
    int32_t *item_of_row, *device_item_of_row;
    uint32_t *bits, *device_bits;
    int64_t most_rows, most_words; /* that there is memory for */
    uint8_t *attended;             /* scratch: of each block of a pass */
    int64_t attended_capacity;
} cpa_ring_blocks;

/* Another setting, of a batch of so many items. */
void cpa_ring_blocks_reset(cpa_ring_blocks *blocks, int64_t items);
/* Chooses the blocks of each pass. Waits for the stream where there is a selection; `of` NULL: all blocks. */
cpa_status cpa_ring_blocks_select(cpa_ring_blocks *blocks, const cpa_ring_passes *passes, const cpa_attend_plan *head,
                                  cpa_owner_map map, const cpa_key_blocks *of, cpa_stream *stream);
void cpa_ring_blocks_free(cpa_ring_blocks *blocks, cpa_device *device);

#endif
