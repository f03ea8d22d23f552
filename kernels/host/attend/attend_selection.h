/* Which keys the rows of a unit attend by lists and by blocks; see cpattn/selection.h. Bits are with the rules of
 * scores, as they take the place of causality. */
#ifndef CPA_HOST_ATTEND_SELECTION_H
#define CPA_HOST_ATTEND_SELECTION_H

#include <cpattn/selection.h>

#include "kernels/host/attend/attend_isa.h"

/* Of one call; NULL and 0 where there is none. */
typedef struct cpa_attend_selects {
    int any;
    cpa_key_indices lists; /* unit >= 1 */
    cpa_key_blocks blocks;
} cpa_attend_selects;

cpa_attend_selects cpa_attend_selects_of(const cpa_key_selection *selection);

/* Those of a row of q, for a query head and its KV head. */
cpa_attend_row_keys cpa_attend_row_keys_of(const cpa_attend_selects *selects, int64_t row, int32_t head,
                                           int32_t kv_head);

/* Whether they name any key of the indices [first, last]. */
int cpa_attend_keys_meet(const cpa_attend_row_keys *keys, int64_t first, int64_t last);

#endif
