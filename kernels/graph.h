/* The table of graphs, of devices whose capabilities have them. */
#ifndef CPA_KERNELS_GRAPH_H
#define CPA_KERNELS_GRAPH_H

#include <cpattn/indexer.h>

#include "kernels/attend_plan.h"
#include "kernels/device.h"

/* The work of a stream between begin and end, to be launched again and again. */
typedef struct cpa_graph cpa_graph;

/* Between begin and end operations on the stream are noted instead of enqueued, exchanges of a device transport too. */
struct cpa_graph_table {
    cpa_status (*begin)(cpa_stream *stream);
    /* Ends that in any case; without `out` nothing is kept. Allocates. */
    cpa_status (*end)(cpa_stream *stream, cpa_graph **out);
    /* Enqueues what was noted: the same operations on the same addresses, whatever these hold by then, page-locked host
     * memory included. One launch of a graph at a time. */
    cpa_status (*launch)(cpa_graph *graph, cpa_stream *stream);
    void (*destroy)(cpa_graph *graph);
    /* For plans with padded_items: a number that two settings of one plan share only if their attends enqueue the same
     * operations on the same addresses. */
    uint64_t (*plan_shape)(const cpa_attend_plan *plan);
    /* The same of two settings of a reserved plan of an indexer, and index_logits. */
    uint64_t (*index_plan_shape)(const cpa_index_plan *plan);
    /* An item of a plan with padded_items, of this shape and with blocks of so many tokens, may have so many rows times
     * query heads of a KV head; where one has more, what an attend enqueues depends on its batch after all. */
    int32_t (*padded_rows)(const cpa_attention_shape *shape, int32_t block_size);
};

#endif
