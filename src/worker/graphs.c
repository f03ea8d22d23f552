#include "src/worker/graphs.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/hash.h"
#include "kernels/graph.h"
#include "src/context/context_plan.h"

/* Shapes that are remembered; of more, the one that was not used for the longest time goes. */
enum { GRAPHS = 32 };

/* A shape of steps. All ranks have the same entries, as they choose, capture and forget together. */
typedef struct graph_entry {
    uint64_t key; /* hash of the shapes on all ranks */
    int64_t used; /* number of the last step that used the entry; 0: the entry is free */
    cpa_graph *graph;
    cpa_context_account account; /* what a launch adds to the context's account */
} graph_entry;

struct cpa_graphs {
    cpa_control *control;
    cpa_context *context;
    cpa_stream *stream;
    graph_entry entries[GRAPHS];
    graph_entry *current; /* entry of the step that is planned */
    int64_t steps;
};

cpa_status cpa_graphs_create(cpa_control *control, cpa_context *context, cpa_stream *stream, cpa_graphs **out,
                             cpa_error *err) {
    cpa_graphs *graphs = calloc(1, sizeof *graphs);
    if (!graphs) return cpa_fail(err, CPA_NO_MEMORY, "graphs: no memory");
    graphs->control = control;
    graphs->context = context;
    graphs->stream = stream;
    *out = graphs;
    return CPA_OK;
}

/* Frees the graph of an entry, which stays known. */
static void empty_entry(cpa_graphs *graphs, graph_entry *entry) {
    if (entry->graph) graphs->stream->device->graphs->destroy(entry->graph);
    entry->graph = NULL;
}

void cpa_graphs_destroy(cpa_graphs *graphs) {
    if (!graphs) return;
    for (int i = 0; i < GRAPHS; i++) empty_entry(graphs, &graphs->entries[i]);
    free(graphs);
}

int64_t cpa_graphs_rows(int64_t rows) {
    int64_t step = rows <= 64 ? 8 : 32, power = 1;
    if (rows > 8) return (rows + step - 1) / step * step;
    while (power < rows) power *= 2;
    return power;
}

/* The entry of a shape; a free one, or the one that was not used for the longest time, for a shape that is new. */
static graph_entry *find_entry(cpa_graphs *graphs, uint64_t key, int *found) {
    graph_entry *oldest = &graphs->entries[0];
    for (int i = 0; i < GRAPHS; i++) {
        graph_entry *entry = &graphs->entries[i];
        if (entry->used && entry->key == key) {
            *found = 1;
            return entry;
        }
        if (entry->used < oldest->used) oldest = entry;
    }
    *found = 0;
    return oldest;
}

/* The same on all ranks, and of steps that have one shape on every rank: what a graph sends has to meet the graph that
 * the other ranks captured with it. */
static cpa_status joint_key(cpa_graphs *graphs, uint64_t shape, uint64_t *out, cpa_error *err) {
    const uint64_t own[] = {(uint64_t)graphs->control->rank, cpa_context_shape(graphs->context), shape};
    *out = cpa_hash_bytes(CPA_HASH_START, own, sizeof own);
    return graphs->control->size > 1 ? cpa_control_sum_u64(graphs->control, out, 1, err) : CPA_OK;
}

cpa_status cpa_graphs_choose(cpa_graphs *graphs, uint64_t own, cpa_graph_way *out, cpa_error *err) {
    uint64_t key;
    int known;
    CPA_TRY(joint_key(graphs, own, &key, err));
    graph_entry *entry = find_entry(graphs, key, &known);
    if (!known) {
        empty_entry(graphs, entry);
        entry->key = key;
    }
    entry->used = ++graphs->steps;
    graphs->current = entry;
    *out = entry->graph ? CPA_GRAPH_REPLAY : known ? CPA_GRAPH_CAPTURE : CPA_GRAPH_EAGER;
    return CPA_OK;
}

cpa_status cpa_graphs_begin(cpa_graphs *graphs, cpa_error *err) {
    empty_entry(graphs, graphs->current);
    cpa_context_account_begin(graphs->context, &graphs->current->account);
    cpa_status status = graphs->stream->device->graphs->begin(graphs->stream);
    if (status != CPA_OK) return cpa_fail(err, status, "%s", graphs->stream->error.message);
    cpa_context_capture(graphs->context, 1);
    return CPA_OK;
}

cpa_status cpa_graphs_end(cpa_graphs *graphs, cpa_status enqueued, cpa_error *err) {
    const cpa_graph_table *table = graphs->stream->device->graphs;
    graph_entry *entry = graphs->current;
    cpa_context_capture(graphs->context, 0);
    if (enqueued != CPA_OK) {
        table->end(graphs->stream, NULL);
        return enqueued;
    }
    cpa_context_account_end(graphs->context, &entry->account);
    cpa_status status = table->end(graphs->stream, &entry->graph);
    return status == CPA_OK ? status : cpa_fail(err, status, "%s", graphs->stream->error.message);
}

cpa_status cpa_graphs_launch(cpa_graphs *graphs, cpa_error *err) {
    const graph_entry *entry = graphs->current;
    cpa_spans *spans = cpa_context_spans(graphs->context);
    cpa_context_account_add(graphs->context, &entry->account);
    const int64_t span = cpa_spans_start_as(spans, CPA_SPAN_GRAPH, graphs->stream);
    cpa_status status = graphs->stream->device->graphs->launch(entry->graph, graphs->stream);
    cpa_spans_end(spans, span, graphs->stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "%s", graphs->stream->error.message);
}
