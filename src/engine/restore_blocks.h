/* What the ranks have found on disk when they opened it becomes what the scheduler can find there. */
#ifndef CPA_RESTORE_BLOCKS_H
#define CPA_RESTORE_BLOCKS_H

#include "src/engine/engine_internal.h"

/* Units of which every rank that has some has its block. Collective. */
cpa_status cpa_engine_restore_blocks(cpa_engine *engine, cpa_error *err);

#endif
