/* The contract between the library and a back end for streams that wait for each other, where the host waits for none. */
#ifndef CPA_KERNELS_EVENT_ORDER_H
#define CPA_KERNELS_EVENT_ORDER_H

#include "kernels/device.h"

typedef struct cpa_event_order_table {
    /* What is enqueued on the stream from here on runs behind the moment that event number `index` was last set to
     * (event_record); one that was never set is waited for by nobody. */
    cpa_status (*await)(const cpa_events *events, int32_t index, cpa_stream *stream);
} cpa_event_order_table;

extern const cpa_event_order_table cpa_host_event_order;
extern const cpa_event_order_table cpa_cuda_event_order; /* in builds that define CPA_HAVE_CUDA */

#endif
