/* The one check of attention shapes, alone and with the device that is to attend. */
#ifndef CPA_OPS_CHECK_SHAPE_H
#define CPA_OPS_CHECK_SHAPE_H

#include <cpattn/device.h>
#include <cpattn/types.h>

#include "base/check.h"

/* `where` begins the line that says what is wrong. */
cpa_status cpa_check_shape(const char *where, const cpa_attention_shape *shape, cpa_error *err);

/* The same, the mask's rules unless it is NULL, and whether the device attends so: CPA_UNSUPPORTED if not. */
cpa_status cpa_check_attend(const char *where, const cpa_device *device, const cpa_attention_shape *shape,
                            const cpa_mask *mask, cpa_error *err);

#endif
