#include "src/grammar/recogniser.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "src/grammar/sequence_table.h"

enum {
    BYTES = 256,
    MOST_VISITS = 1 << 23, /* of pairs and edges in one call: some 0.2 s */
    MOST_STATES = 1 << 14, /* before all is forgotten but the answers */
    MOST_CALLS = 1 << 18,
    ROOM = 1 << 26,      /* bytes of what is remembered, where it is not said */
    MOST_ROWS = 1 << 14, /* states that remember where bytes lead, as long as the walk for one mask takes */
    STATE_BITS = 24,     /* of keys */
    NOWHERE = -1,
    UNKNOWN = -2,
    NO_MEMORY = -3,
    TOO_MUCH = -4 /* more than MOST_VISITS */
};

static const uint32_t whole = UINT32_MAX; /* in place of a node: the answer may end */

typedef struct pair {
    uint32_t node, calls;
} pair;

/* What a call returns to: a node, and the calls around. */
typedef struct call {
    uint32_t node, parent, depth;
} call;

typedef struct state {
    int32_t *next;    /* [256] a state, NOWHERE or UNKNOWN; NULL: not remembered */
    uint32_t *mask;   /* NULL: not made yet */
    uint16_t plain;   /* how many plain characters, of any kind, may follow */
    uint8_t is_whole; /* what was taken so far is a whole answer */
} state;

/* What is remembered. Number 0 of the calls is none. */
typedef struct memory {
    cpa_sequence_table call_table, state_table; /* of a state the pairs, in the order in which they are found, so that
                                                 * they do not depend on what was met before */
    call *calls;
    state *states;
    int64_t calls_capacity, states_capacity, n_rows, mask_bytes;
    uint64_t epoch; /* number of this memory; each has another */
} memory;

struct cpa_recogniser {
    cpa_grammar grammar;
    uint8_t *is_end; /* [n_nodes] */
    const cpa_token_trie *tokens;
    int64_t n_words, room;
    memory memory;
    cpa_recognition *first;
    /* The state that is being made. */
    pair *places; /* places that take a byte, and `whole` */
    int64_t n_places, places_capacity;
    uint16_t plain;
    pair *pairs; /* all that were met */
    int64_t n_pairs, pairs_capacity;
    struct {
        uint32_t turn, pair;
    } * slots; /* [n_slots] of this turn: which pairs there are */
    int64_t n_slots;
    uint32_t turn;
    int64_t visits; /* in this call */
    int32_t *way;   /* [most_bytes + 1] states of the walk through the tokens */
};

struct cpa_recognition {
    cpa_recogniser *recogniser;
    cpa_recognition *before, *behind;
    int32_t state, moved; /* while all is forgotten but the answers: the same state in the new memory */
};

/* ---- Memory ---- */

static uint64_t new_epoch(void) {
    static atomic_ullong epochs;
    return atomic_fetch_add(&epochs, 1) + 1;
}

static void release_memory(memory *m) {
    for (int64_t i = 0; i < m->state_table.count; i++) {
        free(m->states[i].next);
        free(m->states[i].mask);
    }
    cpa_sequence_table_release(&m->call_table);
    cpa_sequence_table_release(&m->state_table);
    free(m->calls);
    free(m->states);
}

/* The number of a call inside of others; NO_MEMORY. */
static int64_t put_call(memory *m, uint32_t node, uint32_t parent) {
    const uint32_t values[2] = {node, parent};
    const int64_t count = m->call_table.count;
    if (!cpa_array_reserve(&m->calls, &m->calls_capacity, count + 1, sizeof *m->calls)) return NO_MEMORY;
    const int64_t number = cpa_sequence_table_put(&m->call_table, values, 2);
    if (number == CPA_NO_SEQUENCE) return NO_MEMORY;
    if (number == count) m->calls[number] = (call){node, parent, count > 0 ? m->calls[parent].depth + 1 : 0};
    return number;
}

/* The number of a state; NOWHERE if it has no places, NO_MEMORY. */
static int32_t put_state(memory *m, const pair *places, int64_t n, uint16_t plain) {
    const int64_t count = m->state_table.count;
    if (n == 0) return NOWHERE;
    if (!cpa_array_reserve(&m->states, &m->states_capacity, count + 1, sizeof *m->states)) return NO_MEMORY;
    const int64_t number = cpa_sequence_table_put(&m->state_table, (const uint32_t *)places, 2 * n);
    if (number == CPA_NO_SEQUENCE) return NO_MEMORY;
    if (number == count) {
        m->states[number] = (state){.next = NULL, .plain = plain};
        for (int64_t i = 0; i < n; i++) m->states[number].is_whole |= places[i].node == whole;
    }
    return (int32_t)number;
}

static int begin_memory(memory *m) {
    *m = (memory){.epoch = new_epoch()};
    return put_call(m, 0, 0) == 0;
}

/* ---- States ---- */

/* Whether a pair is new in this turn; NO_MEMORY. */
static int is_new(cpa_recogniser *r, uint32_t node, uint32_t calls) {
    if (r->n_slots < 2 * (r->n_pairs + 1)) {
        const int64_t n = r->n_slots ? 2 * r->n_slots : 1024;
        void *slots = calloc((size_t)n, sizeof *r->slots);
        if (!slots) return NO_MEMORY;
        free(r->slots);
        r->slots = slots;
        r->n_slots = n;
        for (int64_t i = 0; i < r->n_pairs; i++) {
            uint64_t at = cpa_mix64((uint64_t)r->pairs[i].node << 32 | r->pairs[i].calls);
            while (r->slots[at & (uint64_t)(n - 1)].turn == r->turn) at++;
            r->slots[at & (uint64_t)(n - 1)].turn = r->turn;
            r->slots[at & (uint64_t)(n - 1)].pair = (uint32_t)i;
        }
    }
    for (uint64_t at = cpa_mix64((uint64_t)node << 32 | calls);; at++) {
        const uint64_t slot = at & (uint64_t)(r->n_slots - 1);
        if (r->slots[slot].turn != r->turn) {
            r->slots[slot].turn = r->turn;
            r->slots[slot].pair = (uint32_t)r->n_pairs;
            return 1;
        }
        const pair there = r->pairs[r->slots[slot].pair];
        if (there.node == node && there.calls == calls) return 0;
    }
}

/* A place that is reached, unless its rest would be too deep. 0 without memory. */
static int add_pair(cpa_recogniser *r, uint32_t node, uint32_t calls) {
    if (r->memory.calls[calls].depth + r->grammar.needs[node] > CPA_GRAMMAR_MOST_DEEP) return 1;
    const int fresh = is_new(r, node, calls);
    if (fresh <= 0) return fresh == 0;
    if (!cpa_array_reserve(&r->pairs, &r->pairs_capacity, r->n_pairs + 1, sizeof *r->pairs)) return 0;
    r->pairs[r->n_pairs++] = (pair){node, calls};
    return 1;
}

static int add_place(cpa_recogniser *r, uint32_t node, uint32_t calls) {
    if (!cpa_array_reserve(&r->places, &r->places_capacity, r->n_places + 1, sizeof *r->places)) return 0;
    r->places[r->n_places++] = (pair){node, calls};
    return 1;
}

static int follow_call(cpa_recogniser *r, const cpa_edge *edge, uint32_t calls) {
    const cpa_grammar *g = &r->grammar;
    const uint32_t from = g->rules[edge->rule].from, depth = r->memory.calls[calls].depth;
    if (r->is_end[edge->to]) return add_pair(r, from, calls); /* returns to where this rule does */
    if (depth + 1 + g->needs[from] > CPA_GRAMMAR_MOST_DEEP || depth + g->needs[edge->to] > CPA_GRAMMAR_MOST_DEEP) {
        return 1;
    }
    const int64_t inner = put_call(&r->memory, edge->to, calls);
    return inner >= 0 && add_pair(r, from, (uint32_t)inner);
}

/* What is reached from a pair without a byte. */
static int follow(cpa_recogniser *r, pair p) {
    const cpa_grammar *g = &r->grammar;
    int takes_bytes = 0;
    if (r->is_end[p.node]) {
        const call back = r->memory.calls[p.calls];
        return p.calls == 0 ? add_place(r, whole, 0) : add_pair(r, back.node, back.parent);
    }
    r->visits += g->first[p.node + 1] - g->first[p.node] + 1;
    if (g->graph.plain[p.node] > r->plain) r->plain = g->graph.plain[p.node];
    for (uint32_t e = g->first[p.node]; e < g->first[p.node + 1]; e++) {
        const cpa_edge *edge = &g->edges[e];
        if (edge->kind == CPA_EDGE_EMPTY && !add_pair(r, edge->to, p.calls)) return 0;
        if (edge->kind == CPA_EDGE_CALL && !follow_call(r, edge, p.calls)) return 0;
        takes_bytes |= edge->kind == CPA_EDGE_BYTES || edge->kind == CPA_EDGE_SPECIAL;
    }
    return !takes_bytes || add_place(r, p.node, p.calls);
}

static void begin_state(cpa_recogniser *r) {
    if (++r->turn == 0) { /* all turns were had */
        if (r->slots) memset(r->slots, 0, (size_t)r->n_slots * sizeof *r->slots);
        r->turn = 1;
    }
    r->n_pairs = r->n_places = 0;
    r->plain = 0;
}

static int32_t end_state(cpa_recogniser *r) {
    for (int64_t i = 0; i < r->n_pairs; i++) {
        if (!follow(r, r->pairs[i])) return NO_MEMORY;
        if (r->visits > MOST_VISITS) return TOO_MUCH;
    }
    return put_state(&r->memory, r->places, r->n_places, r->plain);
}

static int32_t make_next(cpa_recogniser *r, int32_t from, uint8_t byte) {
    const cpa_grammar *g = &r->grammar;
    int64_t n;
    const pair *places = (const pair *)cpa_sequence_table_get(&r->memory.state_table, from, &n);
    begin_state(r);
    for (int64_t i = 0; i < n / 2; i++) {
        if (places[i].node == whole) continue;
        r->visits += g->first[places[i].node + 1] - g->first[places[i].node];
        for (uint32_t e = g->first[places[i].node]; e < g->first[places[i].node + 1]; e++) {
            const cpa_edge *edge = &g->edges[e];
            const int takes = edge->kind == CPA_EDGE_BYTES || edge->kind == CPA_EDGE_SPECIAL;
            if (takes && edge->lo <= byte && byte <= edge->hi && !add_pair(r, edge->to, places[i].calls)) {
                return NO_MEMORY;
            }
        }
    }
    return end_state(r);
}

/* The state behind a byte; NOWHERE, NO_MEMORY or TOO_MUCH. */
static int32_t step(cpa_recogniser *r, int32_t from, uint8_t byte) {
    memory *m = &r->memory;
    int32_t *row = m->states[from].next;
    if (!row && m->n_rows < MOST_ROWS) {
        row = m->states[from].next = malloc(BYTES * sizeof *row);
        for (int i = 0; row && i < BYTES; i++) row[i] = UNKNOWN;
        m->n_rows += row != NULL;
    }
    if (row && row[byte] != UNKNOWN) return row[byte];
    const int32_t to = make_next(r, from, byte);
    if (row && to >= NOWHERE) row[byte] = to;
    return to;
}

/* ---- Forgetting ---- */

/* A call of the old memory in the new one. */
static int64_t move_call(memory *to, const memory *from, uint32_t number) {
    if (number == 0) return 0;
    const int64_t parent = move_call(to, from, from->calls[number].parent);
    return parent < 0 ? parent : put_call(to, from->calls[number].node, (uint32_t)parent);
}

static int32_t move_state(cpa_recogniser *r, memory *to, int32_t number) {
    int64_t n;
    const pair *places = (const pair *)cpa_sequence_table_get(&r->memory.state_table, number, &n);
    r->n_places = 0;
    for (int64_t i = 0; i < n / 2; i++) {
        const int64_t calls = move_call(to, &r->memory, places[i].calls);
        if (calls < 0 || !add_place(r, places[i].node, (uint32_t)calls)) return NO_MEMORY;
    }
    return put_state(to, r->places, r->n_places, r->memory.states[number].plain);
}

static int64_t bytes_of(const memory *m) {
    const cpa_sequence_table *calls = &m->call_table, *states = &m->state_table;
    const size_t rows = (size_t)m->n_rows * BYTES * sizeof(int32_t);
    const size_t values = (size_t)(calls->n_values + states->n_values) * sizeof *calls->values;
    const size_t slots = (size_t)(calls->n_slots + states->n_slots) * sizeof *calls->slots;
    return m->mask_bytes + (int64_t)(rows + values + slots) + calls->count * (int64_t)sizeof *m->calls +
           states->count * (int64_t)sizeof *m->states;
}

/* Where the memory is full, leaves the states of the answers alone. 0 without memory, and all is as it was. */
static int forget(cpa_recogniser *r) {
    const memory *m = &r->memory;
    if (m->state_table.count < MOST_STATES && m->call_table.count < MOST_CALLS && bytes_of(m) < r->room) return 1;
    memory fresh;
    int is_moved = begin_memory(&fresh);
    for (cpa_recognition *a = r->first; is_moved && a; a = a->behind) {
        a->moved = move_state(r, &fresh, a->state);
        is_moved = a->moved >= 0;
    }
    for (cpa_recognition *a = r->first; is_moved && a; a = a->behind) a->state = a->moved;
    release_memory(is_moved ? &r->memory : &fresh);
    if (is_moved) r->memory = fresh;
    return is_moved;
}

/* ---- Masks ---- */

/* Tokens in the order of their bytes. */
static void allow(const cpa_token_trie *tokens, int64_t first, int64_t end, uint32_t *mask) {
    for (int64_t i = first; i < end; i++) mask[tokens->tokens[i] / 32] |= 1u << tokens->tokens[i] % 32;
}

/* Walks through the tokens as far as the grammar takes their bytes. NO_MEMORY or TOO_MUCH, else 0. */
static int32_t fill_mask(cpa_recogniser *r, int32_t from, uint32_t *mask) {
    const cpa_token_trie *tokens = r->tokens;
    r->way[0] = from;
    for (int64_t i = 0; i < tokens->n_nodes;) {
        const cpa_trie_node *node = &tokens->nodes[i];
        if (node->plain <= r->memory.states[r->way[node->depth]].plain) { /* all that begin so */
            allow(tokens, node->first, node->end < tokens->n_nodes ? tokens->nodes[node->end].first : tokens->n_tokens,
                  mask);
            i = node->end;
            continue;
        }
        const int32_t to = step(r, r->way[node->depth], node->byte);
        if (to < NOWHERE) return to;
        if (to == NOWHERE) {
            i = node->end;
            continue;
        }
        allow(tokens, node->first, node->first + node->count, mask);
        r->way[node->depth + 1] = to;
        i++;
    }
    return 0;
}

static cpa_status fail(int32_t why, cpa_error *err) {
    return why == TOO_MUCH ? cpa_fail(err, CPA_UNSUPPORTED, "too many ways in which the answer may go on at once")
                           : cpa_fail(err, CPA_NO_MEMORY, "no memory for the states of a grammar");
}

cpa_status cpa_recognition_mask(cpa_recognition *answer, const uint32_t **out, cpa_error *err) {
    cpa_recogniser *r = answer->recogniser;
    if (!forget(r)) return fail(NO_MEMORY, err);
    uint32_t *mask = r->memory.states[answer->state].mask;
    if (!mask) {
        mask = calloc((size_t)r->n_words + 1, sizeof *mask);
        r->visits = 0;
        const int32_t result = mask ? fill_mask(r, answer->state, mask) : NO_MEMORY;
        if (result < 0) {
            free(mask);
            return fail(result, err);
        }
        r->memory.mask_bytes += r->n_words * (int64_t)sizeof *mask;
        r->memory.states[answer->state].mask = mask;
    }
    *out = mask;
    return CPA_OK;
}

/* ---- Answers ---- */

cpa_status cpa_recogniser_open(cpa_grammar *grammar, const cpa_token_trie *tokens, cpa_recogniser **out,
                               cpa_error *err) {
    cpa_recogniser *r = calloc(1, sizeof *r);
    if (!r) {
        cpa_grammar_release(grammar);
        return fail(NO_MEMORY, err);
    }
    r->grammar = *grammar;
    *grammar = (cpa_grammar){.n_rules = 0};
    r->tokens = tokens;
    r->n_words = (tokens->vocabulary + 31) / 32;
    r->room = ROOM;
    r->is_end = calloc((size_t)r->grammar.graph.n_nodes, 1);
    r->way = malloc(((size_t)tokens->most_bytes + 1) * sizeof *r->way);
    if (!r->is_end || !r->way || !begin_memory(&r->memory)) {
        cpa_recogniser_close(r);
        return fail(NO_MEMORY, err);
    }
    for (int64_t i = 0; i < r->grammar.n_rules; i++) r->is_end[r->grammar.rules[i].to] = 1;
    *out = r;
    return CPA_OK;
}

void cpa_recogniser_close(cpa_recogniser *r) {
    if (!r) return;
    release_memory(&r->memory);
    cpa_grammar_release(&r->grammar);
    free(r->is_end);
    free(r->places);
    free(r->pairs);
    free(r->slots);
    free(r->way);
    free(r);
}

int64_t cpa_recogniser_bytes(const cpa_recogniser *r) {
    const cpa_grammar *g = &r->grammar;
    const int64_t nodes = g->graph.n_nodes, edges = g->first[nodes];
    const size_t a_node = sizeof *g->first + sizeof *g->graph.plain + sizeof *g->needs + sizeof *r->is_end;
    return nodes * (int64_t)a_node + edges * (int64_t)sizeof *g->edges + g->n_rules * (int64_t)sizeof *g->rules;
}

void cpa_recogniser_set_room(cpa_recogniser *r, int64_t bytes) {
    r->room = bytes;
}

cpa_status cpa_recognition_begin(cpa_recogniser *r, cpa_recognition **out, cpa_error *err) {
    cpa_recognition *answer = calloc(1, sizeof *answer);
    if (!answer) return fail(NO_MEMORY, err);
    begin_state(r);
    r->visits = 0;
    const int is_begun = add_pair(r, r->grammar.rules[0].from, 0);
    answer->recogniser = r;
    answer->state = is_begun ? end_state(r) : NO_MEMORY;
    if (answer->state < 0) {
        const int32_t why = answer->state;
        free(answer);
        return fail(why, err);
    }
    answer->behind = r->first;
    if (r->first) r->first->before = answer;
    *out = r->first = answer;
    return CPA_OK;
}

void cpa_recognition_end(cpa_recognition *answer) {
    if (!answer) return;
    if (answer->before) answer->before->behind = answer->behind;
    if (answer->behind) answer->behind->before = answer->before;
    if (answer->recogniser->first == answer) answer->recogniser->first = answer->behind;
    free(answer);
}

cpa_status cpa_recognition_add(cpa_recognition *answer, const char *text, size_t bytes, int *taken, cpa_error *err) {
    cpa_recogniser *r = answer->recogniser;
    *taken = 0;
    if (!forget(r)) return fail(NO_MEMORY, err);
    r->visits = 0;
    int32_t at = answer->state;
    for (size_t i = 0; i < bytes && at >= 0; i++) at = step(r, at, (uint8_t)text[i]);
    if (at < NOWHERE) return fail(at, err);
    *taken = at >= 0;
    if (*taken) answer->state = at;
    return CPA_OK;
}

cpa_status cpa_recognition_add_token(cpa_recognition *answer, uint32_t token, int *taken, cpa_error *err) {
    const cpa_token_trie *tokens = answer->recogniser->tokens;
    char name[CPA_SPECIAL_NAME_BYTES];
    size_t bytes;
    const char *text = cpa_token_trie_bytes(tokens, token, &bytes);
    *taken = 0;
    if (!text) return CPA_OK;
    if (!tokens->is_special[token]) return cpa_recognition_add(answer, text, bytes, taken, err);
    cpa_special_name(token, name);
    return cpa_recognition_add(answer, name, sizeof name, taken, err);
}

int cpa_recognition_is_whole(const cpa_recognition *answer) {
    return answer->recogniser->memory.states[answer->state].is_whole;
}

uint64_t cpa_recognition_key(const cpa_recognition *answer) {
    return answer->recogniser->memory.epoch << STATE_BITS | (uint64_t)answer->state;
}
