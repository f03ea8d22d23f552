/* The one check of attention shapes. */
#ifndef CPA_OPS_CHECK_SHAPE_H
#define CPA_OPS_CHECK_SHAPE_H

#include <cpattn/types.h>

#include "base/check.h"

/* `where` begins the line that says what is wrong. CPA_UNSUPPORTED for what no kernel computes yet. */
cpa_status cpa_check_shape(const char *where, const cpa_attention_shape *shape, cpa_error *err);

#endif
