/* The store of blocks of a job (--block-store), which a rank opens for itself: a folder, memory that NIXL reads
 * (nixl:FOLDER, where processes meet), or Mooncake's distributed store (mooncake:FILE, a configuration file of
 * Mooncake's). */
#ifndef CPA_LAUNCHER_BLOCK_STORE_H
#define CPA_LAUNCHER_BLOCK_STORE_H

#include <cpattn/blocks.h>

#include "launcher/settings/settings.h"
#include "src/model/model_name.h"

/* One that was never opened has only zeros. */
typedef struct cpa_job_store {
    int is_open; /* and the one of these that it is: */
    cpa_folder_store *folder;
    cpa_nixl_store *nixl;
    cpa_mooncake_store *mooncake;
    cpa_block_store table;
    char model[CPA_MODEL_NAME_BYTES]; /* the name of the model in the store */
} cpa_job_store;

/* CPA_IO where the folder of the settings, or the file, is not there. */
cpa_status cpa_job_store_check(const cpa_settings *settings, cpa_error *err);
/* Opens the store of the settings; without --block-store it stays closed. The model is named on rank 0 alone, whose
 * scheduler makes the keys. */
cpa_status cpa_job_store_open(const cpa_settings *settings, int32_t rank, cpa_job_store *out, cpa_error *err);
void cpa_job_store_close(cpa_job_store *store);
/* Whether this process has opened a library for a store. Such bring others with them, some of which crash in exit where
 * the system has others of their names (libnl of NIXL's wheels): once all is written, the process ends without exit. */
int cpa_job_store_has_library(void);

#endif
