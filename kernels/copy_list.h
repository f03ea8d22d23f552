/* The contract between the library and a back end for many copies at once, of which each alone would take the host longer
 * to enqueue than the device to run. */
#ifndef CPA_KERNELS_COPY_LIST_H
#define CPA_KERNELS_COPY_LIST_H

#include "kernels/device.h"

/* Copy i brings bytes[i], more than 0, from srcs[i] to dsts[i]; none of them reads or writes what another one writes. */
typedef struct cpa_copy_list {
    void **dsts;
    const void **srcs;
    size_t *bytes;
    int64_t n;
} cpa_copy_list;

typedef struct cpa_copy_list_table {
    /* Enqueues the copies, in any order among themselves; as `copy` of the device's table else. The list may go when the
     * call returns. */
    cpa_status (*copy)(const cpa_copy_list *list, cpa_stream *stream);
    /* Enqueues zeros in memory of the device. */
    cpa_status (*clear)(void *memory, int64_t bytes, cpa_stream *stream);
} cpa_copy_list_table;

extern const cpa_copy_list_table cpa_host_copy_list;
extern const cpa_copy_list_table cpa_cuda_copy_list; /* in builds that define CPA_HAVE_CUDA */

#endif
