/* Blocks of a rank on disk: slots in a file for each group of layers, and an index of what is in them
 * (disk_index.h).
 *
 * Threads of its own write and read, by io_uring where a probe finds it, which is logged (disk_io.h). What is stored is
 * copied when it is given; the moves of one slot take place in the order in which they were asked for. Each block has a SHA-256, which is compared when it is read: what is
 * damaged, or belongs to another unit, does not come back. Where a write fails, as the disk is full, that is logged
 * once, nothing is stored any more, and what is there can still be read. The index is written every few seconds
 * while blocks are, and at the end. One thread calls these functions. */
#ifndef CPA_CACHE_DISK_BLOCKS_H
#define CPA_CACHE_DISK_BLOCKS_H

#include "src/cache/disk_index.h"
#include "src/cache/layer_groups.h"

typedef struct cpa_disk_blocks cpa_disk_blocks;

typedef struct cpa_disk_blocks_options {
    const char *folder;             /* of all ranks; its files are named by them */
    const char *identity;           /* what blocks depend on: those of another identity are refused */
    int32_t rank;                   /* whose blocks they are */
    const cpa_layer_groups *groups; /* with block_bytes, and disk_blocks, the slots of each */
    int no_uring;                   /* not 0: without io_uring, also where there is one */
    double index_s;                 /* seconds from one index to the next, while blocks are written; 0: 10 */
} cpa_disk_blocks_options;

/* Opens the files of a rank, or makes them. CPA_IO without the folder, or where another process has them open;
 * CPA_INVALID for an index of another identity or version. Without an index, or with one that is damaged, which is
 * logged, it begins with empty slots. */
cpa_status cpa_disk_blocks_open(const cpa_disk_blocks_options *options, cpa_disk_blocks **out, cpa_error *err);
/* When all is written, with the index. NULL does nothing. */
void cpa_disk_blocks_close(cpa_disk_blocks *disk);

/* The blocks that were there when it was opened, [*n]; valid until it is closed. */
const cpa_disk_entry *cpa_disk_blocks_found(const cpa_disk_blocks *disk, int64_t *n);

/* A copy of a block goes to the slot of *where, whose `used` and `sha256` are not looked at, in place of what is
 * there: of one that still has the checksum that it came to host memory with (kv_cache.h); another is logged, and
 * nothing is stored. Where more waits to be written than memory is spent on, it is not, or (waits) the caller waits. */
void cpa_disk_blocks_store(cpa_disk_blocks *disk, const cpa_disk_entry *where, const void *block, uint64_t checksum,
                           int waits);
/* Reads the block of the unit of *where from its slot; `block` and *failed, which is 0, are written until
 * cpa_disk_blocks_wait returns. *failed is then 1 for a block that is damaged or not there. */
void cpa_disk_blocks_load(cpa_disk_blocks *disk, const cpa_disk_entry *where, void *block, uint64_t *failed);
/* Waits for all loads. */
void cpa_disk_blocks_wait(cpa_disk_blocks *disk);
/* Whether a write has failed. */
int cpa_disk_blocks_is_full(cpa_disk_blocks *disk);

typedef struct cpa_disk_blocks_stats {
    int64_t bytes_written, bytes_read; /* of blocks */
    int64_t damaged;                   /* blocks that were not what was written */
} cpa_disk_blocks_stats;
void cpa_disk_blocks_get_stats(cpa_disk_blocks *disk, cpa_disk_blocks_stats *out);

#endif
