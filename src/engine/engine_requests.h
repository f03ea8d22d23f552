/* Calls from any thread, and what they leave for cpa_engine_error. */
#ifndef CPA_ENGINE_REQUESTS_H
#define CPA_ENGINE_REQUESTS_H

#include "src/engine/engine_internal.h"

/* What a call of this thread returns: where it failed, its line is what cpa_engine_error gives this thread from now
 * on. */
cpa_status cpa_engine_outcome(const cpa_engine *engine, cpa_status status, const cpa_error *err);

#endif
