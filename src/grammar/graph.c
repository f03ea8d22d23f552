#include "src/grammar/graph.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

enum { EDGES_A_NODE = 4, CONTINUATION = 0x80, LAST_CONTINUATION = 0xbf };

uint32_t cpa_graph_node(cpa_graph *graph) {
    if (graph->status != CPA_OK) return 0;
    if (graph->n_nodes >= graph->most_nodes) {
        graph->status = CPA_UNSUPPORTED;
    } else if (!cpa_array_reserve(&graph->first, &graph->nodes_capacity, graph->n_nodes + 1, sizeof *graph->first) ||
               !cpa_array_reserve(&graph->plain, &graph->plain_capacity, graph->n_nodes + 1, sizeof *graph->plain)) {
        graph->status = CPA_NO_MEMORY;
    }
    if (graph->status != CPA_OK) return 0;
    graph->first[graph->n_nodes] = 0;
    graph->plain[graph->n_nodes] = 0;
    return (uint32_t)graph->n_nodes++;
}

void cpa_graph_set_plain(cpa_graph *graph, uint32_t node, int64_t characters) {
    if (graph->status != CPA_OK) return;
    graph->plain[node] = (uint16_t)(characters < CPA_MOST_PLAIN ? characters : CPA_MOST_PLAIN);
}

void cpa_graph_edge(cpa_graph *graph, uint32_t from, cpa_edge edge) {
    if (graph->status != CPA_OK) return;
    if (graph->n_edges >= EDGES_A_NODE * graph->most_nodes) {
        graph->status = CPA_UNSUPPORTED;
    } else if (!cpa_array_reserve(&graph->edges, &graph->edges_capacity, graph->n_edges + 1, sizeof edge)) {
        graph->status = CPA_NO_MEMORY;
    }
    if (graph->status != CPA_OK) return;
    edge.next = graph->first[from];
    graph->edges[graph->n_edges++] = edge;
    graph->first[from] = (uint32_t)graph->n_edges;
}

void cpa_graph_empty(cpa_graph *graph, uint32_t from, uint32_t to) {
    cpa_graph_edge(graph, from, (cpa_edge){.kind = CPA_EDGE_EMPTY, .to = to});
}

void cpa_graph_bytes(cpa_graph *graph, uint32_t from, uint8_t lo, uint8_t hi, uint32_t to) {
    cpa_graph_edge(graph, from, (cpa_edge){.kind = CPA_EDGE_BYTES, .lo = lo, .hi = hi, .to = to});
}

void cpa_graph_call(cpa_graph *graph, uint32_t from, uint32_t rule, uint32_t to) {
    cpa_graph_edge(graph, from, (cpa_edge){.kind = CPA_EDGE_CALL, .rule = rule, .to = to});
}

void cpa_graph_text(cpa_graph *graph, uint32_t from, const char *text, size_t bytes, uint32_t to) {
    if (bytes == 0) cpa_graph_empty(graph, from, to);
    for (size_t i = 0; i < bytes; i++) {
        const uint32_t next = i + 1 < bytes ? cpa_graph_node(graph) : to;
        const uint8_t byte = (uint8_t)text[i];
        cpa_graph_bytes(graph, from, byte, byte, next);
        from = next;
    }
}

static int compare_texts(const void *a, const void *b) {
    const cpa_graph_string *x = a, *y = b;
    const int order = memcmp(x->text, y->text, x->bytes < y->bytes ? x->bytes : y->bytes);
    return order != 0 ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

void cpa_graph_texts(cpa_graph *graph, uint32_t from, cpa_graph_string *texts, int64_t n, uint32_t to) {
    size_t most = 0;
    for (int64_t i = 0; i < n; i++) most = texts[i].bytes > most ? texts[i].bytes : most;
    uint32_t *path = malloc((most + 1) * sizeof *path); /* behind each byte of a text */
    if (!path) {
        if (graph->status == CPA_OK) graph->status = CPA_NO_MEMORY;
        return;
    }
    path[0] = from;
    qsort(texts, (size_t)n, sizeof *texts, compare_texts);
    for (int64_t i = 0; i < n; i++) {
        const cpa_graph_string t = texts[i], before = i > 0 ? texts[i - 1] : (cpa_graph_string){"", 0};
        size_t shared = 0;
        while (shared < t.bytes && shared < before.bytes && t.text[shared] == before.text[shared]) shared++;
        if (i > 0 && shared == t.bytes) continue; /* the same once more */
        for (size_t d = shared; d < t.bytes; d++) {
            path[d + 1] = cpa_graph_node(graph);
            cpa_graph_bytes(graph, path[d], (uint8_t)t.text[d], (uint8_t)t.text[d], path[d + 1]);
        }
        cpa_graph_empty(graph, path[t.bytes], to);
    }
    free(path);
}

/* Code points whose UTF-8 has `tail` bytes behind one that begins with `lead` bits: the ends of a range are peeled off
 * until all that is left differ in the first byte alone, then in the second, and so on. */
static void tails(cpa_graph *graph, uint32_t from, uint32_t lo, uint32_t hi, int tail, uint32_t lead, uint32_t to) {
    const uint32_t unit = 1u << (6 * tail); /* code points that share this byte */
    if (tail == 0) {
        cpa_graph_bytes(graph, from, (uint8_t)(lead + lo), (uint8_t)(lead + hi), to);
        return;
    }
    uint32_t first = lo / unit, last = hi / unit;
    if (lo % unit != 0 || (first == last && hi % unit != unit - 1)) {
        const uint32_t next = cpa_graph_node(graph);
        cpa_graph_bytes(graph, from, (uint8_t)(lead + first), (uint8_t)(lead + first), next);
        tails(graph, next, lo % unit, first == last ? hi % unit : unit - 1, tail - 1, CONTINUATION, to);
        if (first == last) return;
        first++;
    }
    if (hi % unit != unit - 1) {
        const uint32_t next = cpa_graph_node(graph);
        cpa_graph_bytes(graph, from, (uint8_t)(lead + last), (uint8_t)(lead + last), next);
        tails(graph, next, 0, hi % unit, tail - 1, CONTINUATION, to);
        if (first == last) return;
        last--;
    }
    uint32_t next = cpa_graph_node(graph);
    cpa_graph_bytes(graph, from, (uint8_t)(lead + first), (uint8_t)(lead + last), next);
    for (int i = tail; i > 0; i--) {
        const uint32_t after = i > 1 ? cpa_graph_node(graph) : to;
        cpa_graph_bytes(graph, next, CONTINUATION, LAST_CONTINUATION, after);
        next = after;
    }
}

void cpa_graph_characters(cpa_graph *graph, uint32_t from, uint32_t lo, uint32_t hi, uint32_t to) {
    static const struct {
        uint32_t lo, hi;
        int tail;
        uint32_t lead;
    } forms[] = {{0x1, 0x7f, 0, 0},
                 {0x80, 0x7ff, 1, 0xc0},
                 {0x800, 0xd7ff, 2, 0xe0},
                 {0xe000, 0xffff, 2, 0xe0},
                 {0x10000, 0x10ffff, 3, 0xf0}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const uint32_t first = lo > forms[i].lo ? lo : forms[i].lo, last = hi < forms[i].hi ? hi : forms[i].hi;
        if (first <= last) tails(graph, from, first, last, forms[i].tail, forms[i].lead, to);
    }
}

void cpa_graph_release(cpa_graph *graph) {
    free(graph->first);
    free(graph->plain);
    free(graph->edges);
    *graph = (cpa_graph){.n_nodes = 0};
}
