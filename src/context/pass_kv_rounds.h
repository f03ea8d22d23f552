/* Planning pass-KV peer by peer. */
#ifndef CPA_PASS_KV_ROUNDS_H
#define CPA_PASS_KV_ROUNDS_H

#include "src/context/pass_kv.h"

/* Plans the transfers of kv->now, whose mask is set. */
cpa_status cpa_pass_kv_plan_rounds(cpa_pass_kv *kv);

#endif
