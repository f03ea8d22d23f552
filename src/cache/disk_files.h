/* The files of a rank in a folder of blocks: one for each group of layers. */
#ifndef CPA_CACHE_DISK_FILES_H
#define CPA_CACHE_DISK_FILES_H

#include "src/cache/layer_groups.h"

typedef struct cpa_disk_files {
    int folder; /* descriptors; -1: not open */
    int groups[CPA_MAX_LAYER_GROUPS];
} cpa_disk_files;

/* None is open. */
void cpa_disk_files_init(cpa_disk_files *files);
/* Opens them, or makes them. CPA_IO without the folder, or where another process has them open; cpa_disk_files_close then
 * closes what was opened. */
cpa_status cpa_disk_files_open(cpa_disk_files *files, const char *folder, int32_t rank, int32_t n_groups,
                               cpa_error *err);
/* What was written is on disk when this returns. 0 if that fails, with errno. */
int cpa_disk_files_sync(const cpa_disk_files *files);
void cpa_disk_files_close(cpa_disk_files *files);

#endif
