/* The check of what is done to scores beside the mask of a layer. */
#ifndef CPA_OPS_CHECK_SCORE_H
#define CPA_OPS_CHECK_SCORE_H

#include <cpattn/score.h>

#include "base/check.h"

/* `where` begins the line that says what is wrong; each may be NULL. */
cpa_status cpa_check_score(const char *where, const cpa_score_rules *rules, const cpa_custom_mask *custom,
                           const cpa_score_bias *bias, cpa_error *err);

#endif
