#include "src/grammar/dfa.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "src/grammar/regex.h"
#include "src/grammar/sequence_table.h"

enum { MOST_NODES = 200000, BYTES = 256 };

static const uint32_t none = UINT32_MAX;

static cpa_status no_memory(cpa_error *err) {
    return cpa_fail(err, CPA_NO_MEMORY, "no memory for an automaton");
}

/* ---- States one by one, each with its edges ---- */

typedef struct builder {
    cpa_dfa dfa;
    int64_t n_edges, edges_capacity, firsts_capacity, accepts_capacity;
} builder;

/* The next state; its edges follow. */
static int add_state(builder *b, int accepts) {
    cpa_dfa *dfa = &b->dfa;
    if (!cpa_array_reserve(&dfa->first_edge, &b->firsts_capacity, dfa->n_states + 2, sizeof *dfa->first_edge) ||
        !cpa_array_reserve(&dfa->accepts, &b->accepts_capacity, dfa->n_states + 1, sizeof *dfa->accepts)) {
        return 0;
    }
    dfa->accepts[dfa->n_states] = accepts != 0;
    dfa->first_edge[dfa->n_states++] = b->n_edges;
    dfa->first_edge[dfa->n_states] = b->n_edges;
    return 1;
}

static int add_edge(builder *b, int lo, int hi, uint32_t to) {
    cpa_dfa *dfa = &b->dfa;
    if (!cpa_array_reserve(&dfa->edges, &b->edges_capacity, b->n_edges + 1, sizeof *dfa->edges)) return 0;
    struct cpa_dfa_edge *last = b->n_edges > dfa->first_edge[dfa->n_states - 1] ? &dfa->edges[b->n_edges - 1] : NULL;
    if (last && last->to == to && last->hi + 1 == lo) {
        last->hi = (uint8_t)hi;
        return 1;
    }
    dfa->edges[b->n_edges++] = (struct cpa_dfa_edge){.to = to, .lo = (uint8_t)lo, .hi = (uint8_t)hi};
    dfa->first_edge[dfa->n_states] = b->n_edges;
    return 1;
}

/* Which states can reach one that accepts: backwards, until nothing is added. States are mostly in the order in which
 * they are reached, so that a pass from the last to the first finds almost all. */
static uint8_t *find_living(const cpa_dfa *dfa, cpa_effort *effort) {
    uint8_t *lives = calloc((size_t)dfa->n_states + 1, 1);
    for (int is_changed = lives != NULL; is_changed;) {
        is_changed = 0;
        if (!cpa_effort_spend(effort, dfa->n_states)) break;
        for (int64_t s = dfa->n_states - 1; s >= 0; s--) {
            int found = dfa->accepts[s];
            for (int64_t e = dfa->first_edge[s]; !lives[s] && !found && e < dfa->first_edge[s + 1]; e++) {
                found = lives[dfa->edges[e].to];
            }
            if (found && !lives[s]) lives[s] = 1, is_changed = 1;
        }
    }
    return lives;
}

/* Leaves out what reaches no end. */
static cpa_status trim(cpa_dfa *dfa, cpa_effort *effort, cpa_error *err) {
    uint8_t *lives = find_living(dfa, effort);
    uint32_t *number = lives ? malloc(((size_t)dfa->n_states + 1) * sizeof *number) : NULL;
    builder b = {.n_edges = 0};
    cpa_status status = number ? CPA_OK : no_memory(err);
    if (effort->left == 0) status = cpa_effort_fail(err);
    if (status == CPA_OK && dfa->n_states > 0 && lives[0]) {
        uint32_t next = 0;
        for (int64_t s = 0; s < dfa->n_states; s++) number[s] = lives[s] ? next++ : none;
        int is_made = 1;
        for (int64_t s = 0; is_made && s < dfa->n_states; s++) {
            if (!lives[s]) continue;
            is_made = add_state(&b, dfa->accepts[s]);
            for (int64_t e = dfa->first_edge[s]; is_made && e < dfa->first_edge[s + 1]; e++) {
                const struct cpa_dfa_edge edge = dfa->edges[e];
                if (lives[edge.to]) is_made = add_edge(&b, edge.lo, edge.hi, number[edge.to]);
            }
        }
        if (!is_made) status = no_memory(err);
    }
    free(lives);
    free(number);
    cpa_dfa_release(dfa);
    *dfa = b.dfa;
    if (status != CPA_OK) cpa_dfa_release(dfa);
    return status;
}

static cpa_status too_many(cpa_error *err) {
    return cpa_fail(err, CPA_UNSUPPORTED, "more than %d states", CPA_DFA_MOST_STATES);
}

/* ---- Of a graph: states are sets of its nodes ---- */

typedef struct subset {
    const cpa_graph *graph;
    cpa_sequence_table sets;
    uint32_t *nodes; /* [graph->n_nodes] the set that is being made */
    int64_t n;
    uint32_t *mark; /* [graph->n_nodes] the turn in which a node was added */
    uint32_t turn;
    cpa_effort *effort;
} subset;

static void add_node(subset *s, uint32_t node) {
    if (s->mark[node] == s->turn) return;
    s->mark[node] = s->turn;
    s->nodes[s->n++] = node;
}

/* All that is reached without a byte; at the beginning of a text, or at its end, also what only is there. */
static void close_set(subset *s, cpa_edge_kind also) {
    for (int64_t i = 0; i < s->n; i++) {
        for (uint32_t e = s->graph->first[s->nodes[i]]; e; e = s->graph->edges[e - 1].next) {
            const cpa_edge *edge = &s->graph->edges[e - 1];
            if (!cpa_effort_spend(s->effort, 1)) return;
            if (edge->kind == CPA_EDGE_EMPTY || edge->kind == also) add_node(s, edge->to);
        }
    }
}

static int compare_nodes(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int64_t store_set(subset *s) {
    cpa_effort_spend(s->effort, 8 * s->n); /* they are sorted and kept */
    qsort(s->nodes, (size_t)s->n, sizeof *s->nodes, compare_nodes);
    return cpa_sequence_table_put(&s->sets, s->nodes, s->n);
}

static void load_set(subset *s, int64_t state) {
    int64_t n;
    const uint32_t *nodes = cpa_sequence_table_get(&s->sets, state, &n);
    s->n = 0;
    s->turn++;
    for (int64_t i = 0; i < n; i++) add_node(s, nodes[i]);
}

static int accepts(subset *s, int64_t state, uint32_t to) {
    load_set(s, state);
    close_set(s, CPA_EDGE_END);
    return s->mark[to] == s->turn;
}

/* The edges of a state: between two bytes where some edge begins or ends all lead to the same set. */
static int add_edges(subset *s, builder *b, int64_t state) {
    const cpa_graph *graph = s->graph;
    uint8_t cuts[BYTES + 1] = {0};
    int64_t n;
    const uint32_t *nodes = cpa_sequence_table_get(&s->sets, state, &n);
    for (int64_t i = 0; i < n; i++) {
        for (uint32_t e = graph->first[nodes[i]]; e; e = graph->edges[e - 1].next) {
            const cpa_edge *edge = &graph->edges[e - 1];
            if (edge->kind == CPA_EDGE_BYTES) cuts[edge->lo] = cuts[edge->hi + 1] = 1;
        }
    }
    for (int lo = 0; lo < BYTES;) {
        int hi = lo;
        while (hi + 1 < BYTES && !cuts[hi + 1]) hi++;
        nodes = cpa_sequence_table_get(&s->sets, state, &n);
        s->n = 0;
        s->turn++;
        for (int64_t i = 0; i < n; i++) {
            for (uint32_t e = graph->first[nodes[i]]; e; e = graph->edges[e - 1].next) {
                const cpa_edge *edge = &graph->edges[e - 1];
                if (!cpa_effort_spend(s->effort, 1)) return 1;
                if (edge->kind == CPA_EDGE_BYTES && edge->lo <= lo && lo <= edge->hi) add_node(s, edge->to);
            }
        }
        close_set(s, CPA_EDGE_EMPTY);
        if (s->n > 0) {
            const int64_t to = store_set(s);
            if (to == CPA_NO_SEQUENCE || !add_edge(b, lo, hi, (uint32_t)to)) return 0;
        }
        lo = hi + 1;
    }
    return 1;
}

cpa_status cpa_dfa_of_graph(const cpa_graph *graph, uint32_t from, uint32_t to, cpa_effort *effort, cpa_dfa *out,
                            cpa_error *err) {
    subset s = {.graph = graph, .effort = effort};
    builder b = {.n_edges = 0};
    cpa_status status = CPA_OK;
    s.nodes = malloc((size_t)graph->n_nodes * sizeof *s.nodes);
    s.mark = calloc((size_t)graph->n_nodes, sizeof *s.mark);
    if (s.nodes && s.mark) {
        s.turn++;
        add_node(&s, from);
        close_set(&s, CPA_EDGE_BEGIN);
        if (store_set(&s) == CPA_NO_SEQUENCE) status = no_memory(err);
    } else {
        status = no_memory(err);
    }
    for (int64_t state = 0; status == CPA_OK && state < s.sets.count; state++) {
        if (s.sets.count > CPA_DFA_MOST_STATES) {
            status = too_many(err);
        } else if (!add_state(&b, accepts(&s, state, to)) || !add_edges(&s, &b, state)) {
            status = no_memory(err);
        } else if (effort->left == 0) {
            status = cpa_effort_fail(err);
        }
    }
    free(s.nodes);
    free(s.mark);
    cpa_sequence_table_release(&s.sets);
    if (status != CPA_OK) {
        cpa_dfa_release(&b.dfa);
        return status;
    }
    CPA_TRY(trim(&b.dfa, effort, err));
    *out = b.dfa;
    return CPA_OK;
}

cpa_status cpa_dfa_of_regex(const char *expression, size_t bytes, int is_whole, cpa_effort *effort, cpa_dfa *out,
                            cpa_error *err) {
    cpa_graph graph = {.most_nodes = MOST_NODES};
    const uint32_t before = cpa_graph_node(&graph), from = cpa_graph_node(&graph);
    const uint32_t to = cpa_graph_node(&graph), behind = cpa_graph_node(&graph);
    cpa_graph_empty(&graph, before, from);
    cpa_graph_empty(&graph, to, behind);
    if (!is_whole) {
        cpa_graph_characters(&graph, before, 0, UINT32_MAX, before);
        cpa_graph_characters(&graph, behind, 0, UINT32_MAX, behind);
    }
    cpa_status status = cpa_regex_build(expression, bytes, &graph, from, to, effort, err);
    if (status == CPA_OK && graph.status != CPA_OK) {
        status = graph.status == CPA_NO_MEMORY ? no_memory(err)
                                               : cpa_fail(err, CPA_UNSUPPORTED, "the expression is too large");
    }
    if (status == CPA_OK) status = cpa_dfa_of_graph(&graph, before, behind, effort, out, err);
    cpa_graph_release(&graph);
    return status;
}

cpa_status cpa_dfa_of_lengths(int64_t least, int64_t most, cpa_effort *effort, cpa_dfa *out, cpa_error *err) {
    cpa_graph graph = {.most_nodes = MOST_NODES};
    const uint32_t from = cpa_graph_node(&graph), to = cpa_graph_node(&graph);
    uint32_t at = from;
    for (int64_t i = 0; graph.status == CPA_OK && (i < least || i < most); i++) {
        const uint32_t next = cpa_graph_node(&graph);
        if (i >= least) cpa_graph_empty(&graph, at, to);
        cpa_graph_characters(&graph, at, 0, UINT32_MAX, next);
        at = next;
    }
    if (most < 0) cpa_graph_characters(&graph, at, 0, UINT32_MAX, at);
    if (most < 0 || most >= least) cpa_graph_empty(&graph, at, to);
    cpa_status status = graph.status == CPA_OK          ? cpa_dfa_of_graph(&graph, from, to, effort, out, err)
                        : graph.status == CPA_NO_MEMORY ? no_memory(err)
                                                        : too_many(err);
    cpa_graph_release(&graph);
    return status;
}

/* ---- Of two ---- */

/* The state behind a byte, and, in *last, the last byte from this one on that leads there too. */
static uint32_t step(const cpa_dfa *dfa, uint32_t state, int byte, int *last) {
    *last = BYTES - 1;
    if (state == none) return none;
    for (int64_t e = dfa->first_edge[state]; e < dfa->first_edge[state + 1]; e++) {
        const struct cpa_dfa_edge *edge = &dfa->edges[e];
        if (edge->hi < byte) continue;
        *last = edge->lo <= byte ? edge->hi : edge->lo - 1;
        return edge->lo <= byte ? edge->to : none;
    }
    return none;
}

cpa_status cpa_dfa_join(const cpa_dfa *a, const cpa_dfa *b, int minus, cpa_effort *effort, cpa_dfa *out,
                        cpa_error *err) {
    cpa_sequence_table pairs = {0};
    builder made = {.n_edges = 0};
    cpa_status status = CPA_OK;
    const uint32_t begin[2] = {0, b->n_states > 0 ? 0 : none};
    if (a->n_states > 0 && (minus || begin[1] != none) && cpa_sequence_table_put(&pairs, begin, 2) < 0) {
        status = no_memory(err);
    }
    for (int64_t i = 0; status == CPA_OK && i < pairs.count; i++) {
        int64_t two;
        const uint32_t *pair = cpa_sequence_table_get(&pairs, i, &two), x = pair[0], y = pair[1];
        const int y_accepts = y != none && b->accepts[y];
        if (i >= CPA_DFA_MOST_STATES) {
            status = too_many(err);
            break;
        }
        int is_made = add_state(&made, a->accepts[x] && (minus ? !y_accepts : y_accepts));
        for (int byte = 0, last; is_made && byte < BYTES; byte = last + 1) {
            int last_b;
            const uint32_t next[2] = {step(a, x, byte, &last), step(b, y, byte, &last_b)};
            last = last < last_b ? last : last_b;
            cpa_effort_spend(effort, 16); /* edges are looked for one by one */
            if (next[0] == none || (next[1] == none && !minus)) continue;
            const int64_t to = cpa_sequence_table_put(&pairs, next, 2);
            is_made = to != CPA_NO_SEQUENCE && add_edge(&made, byte, last, (uint32_t)to);
        }
        if (!is_made) status = no_memory(err);
        if (is_made && effort->left == 0) status = cpa_effort_fail(err);
    }
    cpa_sequence_table_release(&pairs);
    if (status != CPA_OK) {
        cpa_dfa_release(&made.dfa);
        return status;
    }
    CPA_TRY(trim(&made.dfa, effort, err));
    *out = made.dfa;
    return CPA_OK;
}

cpa_status cpa_dfa_narrow(cpa_dfa *a, cpa_dfa *b, int minus, cpa_effort *effort, cpa_error *err) {
    cpa_dfa joined = {0};
    const cpa_status status = cpa_dfa_join(a, b, minus, effort, &joined, err);
    cpa_dfa_release(a);
    cpa_dfa_release(b);
    *a = joined;
    return status;
}

int cpa_dfa_takes(const cpa_dfa *dfa, const char *text, size_t bytes) {
    uint32_t state = dfa->n_states > 0 ? 0 : none;
    for (size_t i = 0; state != none && i < bytes; i++) {
        int last;
        state = step(dfa, state, (unsigned char)text[i], &last);
    }
    return state != none && dfa->accepts[state];
}

void cpa_dfa_release(cpa_dfa *dfa) {
    free(dfa->first_edge);
    free(dfa->edges);
    free(dfa->accepts);
    *dfa = (cpa_dfa){.n_states = 0};
}
