/* Memory of a device that processes share, as stores in it use it. */
#ifndef CPA_OPS_SHARED_MEMORY_H
#define CPA_OPS_SHARED_MEMORY_H

#include <cpattn/shared_memory.h>

#include "kernels/shared_memory.h"

struct cpa_shared_memory {
    cpa_device *device;
    cpa_memory_mark mark;
    void *address;
    int is_own; /* this process has created it */
};

#endif
