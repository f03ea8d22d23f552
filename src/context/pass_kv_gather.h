/* Planning pass-KV with all peers at once. */
#ifndef CPA_PASS_KV_GATHER_H
#define CPA_PASS_KV_GATHER_H

#include "src/context/pass_kv.h"

/* Plans the transfers of kv->now, whose mask is set, and the pass over the own shard. */
cpa_status cpa_pass_kv_plan_gather(cpa_pass_kv *kv);

#endif
