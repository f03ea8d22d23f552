/* Graphs of decode steps: what the layers of a step enqueue, captured once and replayed in later steps of the same
 * shape.
 *
 * A step whose chunks are one token each is planned with the same number of rows on every rank, rounded up
 * (cpa_context_plan_ahead), so that its launches depend on few numbers; what differs from step to step lies in memory
 * of the device, where it is brought (cpa_context_upload_plan) before the step is captured or its graph launched. The
 * first step of a shape runs eagerly, since transports ask that of their buffers, the second is captured, and from the
 * third on the graph is launched. All ranks do the same: they agree on it before each such step. */
#ifndef CPA_GRAPHS_H
#define CPA_GRAPHS_H

#include "src/context/context.h"

typedef struct cpa_graphs cpa_graphs;

typedef enum cpa_graph_way { CPA_GRAPH_EAGER = 0, CPA_GRAPH_CAPTURE, CPA_GRAPH_REPLAY } cpa_graph_way;

/* For steps of the context on the stream; both, and `control`, must outlive it. */
cpa_status cpa_graphs_create(cpa_control *control, cpa_context *context, cpa_stream *stream, cpa_graphs **out,
                             cpa_error *err);
void cpa_graphs_destroy(cpa_graphs *graphs);

/* The rows that a step with so many on its busiest rank is planned with: at most 7 more, or an eighth. */
int64_t cpa_graphs_rows(int64_t rows);

/* What all ranks do with the step that is planned; `own` is what its shape has beside that of the context.
 * Collective. */
cpa_status cpa_graphs_choose(cpa_graphs *graphs, uint64_t own, cpa_graph_way *out, cpa_error *err);

/* Capture: call begin, enqueue the layers, call end with what came of that. Nothing is measured in a graph. */
cpa_status cpa_graphs_begin(cpa_graphs *graphs, cpa_error *err);
cpa_status cpa_graphs_end(cpa_graphs *graphs, cpa_status enqueued, cpa_error *err);
/* Launches the graph of the step, captured now or before; it is one span of the context. */
cpa_status cpa_graphs_launch(cpa_graphs *graphs, cpa_error *err);

#endif
