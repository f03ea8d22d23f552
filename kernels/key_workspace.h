/* Memory of the device that keys are prepared in (key_source.h), as much as there is. */
#ifndef CPA_KEY_WORKSPACE_H
#define CPA_KEY_WORKSPACE_H

#include "kernels/device.h"
#include "kernels/key_source.h"

/* A workspace of so many bytes; where memory is short, of half of that, and so on down to the least; empty where there
 * is not even that. */
cpa_key_workspace cpa_key_workspace_open(cpa_device *device, int64_t bytes, int64_t least);

#endif
