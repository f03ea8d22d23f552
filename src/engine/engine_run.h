/* What runs an engine, for who destroys it. */
#ifndef CPA_ENGINE_RUN_H
#define CPA_ENGINE_RUN_H

#include "src/engine/engine_internal.h"

/* Ends a run by cpa_engine_step that has not come to its last one; nothing where there is none. Collective. */
void cpa_engine_end_steps(cpa_engine *engine);

#endif
