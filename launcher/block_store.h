/* The store of blocks of a job (--block-store): a folder, which a rank opens for itself. */
#ifndef CPA_LAUNCHER_BLOCK_STORE_H
#define CPA_LAUNCHER_BLOCK_STORE_H

#include <cpattn/blocks.h>

#include "launcher/settings/settings.h"

/* One that was never opened has only zeros. */
typedef struct cpa_job_store {
    cpa_folder_store *folder;
    cpa_block_store table;
    char model[32]; /* the name of the model in the store */
} cpa_job_store;

/* Opens the store of the settings; without --block-store it stays closed. The model is named on rank 0 alone, whose
 * scheduler makes the keys. */
cpa_status cpa_job_store_open(const cpa_settings *settings, int32_t rank, cpa_job_store *out, cpa_error *err);
void cpa_job_store_close(cpa_job_store *store);

#endif
