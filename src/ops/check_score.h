/* The check of what is done to scores and of what is attended beside the mask of a layer. */
#ifndef CPA_OPS_CHECK_SCORE_H
#define CPA_OPS_CHECK_SCORE_H

#include <cpattn/score.h>
#include <cpattn/selection.h>

#include "base/check.h"
#include "kernels/device.h"

/* `where` begins the line that says what is wrong; each may be NULL. */
cpa_status cpa_check_score(const char *where, const cpa_score_rules *rules, const cpa_key_selection *selection,
                           const cpa_score_bias *bias, cpa_error *err);

/* Whether the device can apply them to queries and keys at indices below `end`: devices with memory of their own count
 * in 32 bits how far a key is from a query. CPA_UNSUPPORTED if not. */
cpa_status cpa_check_score_reach(const char *where, const cpa_device *device, int64_t end, const cpa_score_rules *rules,
                                 const cpa_key_selection *selection, const cpa_score_bias *bias, cpa_error *err);

#endif
