/* What a transfer of pass-KV sends in a layer that wants some blocks alone (kv_wanted.h).
 *
 * The wanted blocks of a message go one behind the other. They arrive at the end of the receiver's region, and from
 * there move forward to their places, as every place lies at or before the block that comes into it. What is between
 * them holds what it held. If more than CPA_KV_MOST_SQUEEZED per cent of the blocks are wanted, all go, as they lie. */
#ifndef CPA_KV_SQUEEZE_H
#define CPA_KV_SQUEEZE_H

#include "src/context/kv_transfers.h"

enum { CPA_KV_MOST_SQUEEZED = 70 };

/* Sets transfer->going, and the ranges that are packed of it. */
cpa_status cpa_kv_squeeze_send(cpa_kv_transfers *t, cpa_kv_transfer *transfer, const cpa_kv_range **ranges,
                               int64_t *n_ranges);
/* Sets route->coming. */
cpa_status cpa_kv_squeeze_count(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, cpa_kv_route *route);
/* Moves what came over a route to its places in the region. */
cpa_status cpa_kv_squeeze_spread(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, const cpa_kv_route *route,
                                 char *region, cpa_stream *stream);

#endif
