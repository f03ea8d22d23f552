/* The tree is found from the longest path down. Of items that agree so far one leads: how far the others go along with
 * it cuts its path into nodes, and those that leave it at the same place are looked at again, from there on. So an
 * entry is compared once with that of a leader, and once more where the item itself leads. Tables that stay remember how
 * far: there the next search goes on, and a leader of all is one that others are compared with. */
#include "kernels/cascade.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"

typedef struct cascade_search {
    cpa_cascade *cascade;
    const cpa_attend_batch *batch;
    cpa_table_set tables;  /* the batch's tables that stay, if it has such */
    int64_t unit, entries; /* keys, and table entries, of a unit */
    cpa_error *err;
} cascade_search;

static cpa_status reserve(void *array, int64_t *capacity, int64_t n, size_t size, cpa_error *err) {
    if (cpa_array_reserve(array, capacity, n, size)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for a tree of %lld", (long long)n);
}

/* The items that may share, with what all their rows see: keys up to the position of the first. */
static cpa_status list_items(const cascade_search *s, int64_t most_rows) {
    const cpa_attend_batch *batch = s->batch;
    cpa_cascade *c = s->cascade;
    CPA_TRY(reserve(&c->items, &c->items_capacity, batch->n_items, sizeof *c->items, s->err));
    CPA_TRY(reserve(&c->sorted, &c->sorted_capacity, batch->n_items, sizeof *c->sorted, s->err));
    CPA_TRY(reserve(&c->counts, &c->counts_capacity, 4 * batch->n_items + 1, sizeof *c->counts, s->err));
    for (int64_t i = 0; i < batch->n_items; i++) {
        const cpa_attend_item *item = &batch->items[i];
        if (item->q_count == 0 || item->q_count > most_rows || item->k_first % s->unit != 0) continue;
        const int64_t position = cpa_token_position(batch->map, item->q_set, item->q_first);
        const int64_t seen = cpa_tokens_before(batch->map, item->k_set, position + 1) - item->k_first;
        const int64_t units = cpa_min64(item->k_count, seen) / s->unit;
        if (units < 1) continue;
        c->items[c->n_items++] = (cpa_cascade_item){
            .index = i,
            .entries = batch->block_tables + item->table,
            .row = s->tables.tables ? cpa_block_tables_row_at(s->tables.tables, item->table) : -1,
            .units = units,
        };
    }
    return CPA_OK;
}

/* Whether the first keys of two items are the same tokens. */
static int begin_alike(const cascade_search *s, const cpa_cascade_item *a, const cpa_cascade_item *b) {
    const cpa_attend_item *x = &s->batch->items[a->index], *y = &s->batch->items[b->index];
    return x->k_first == y->k_first && x->k_set.kind == y->k_set.kind && x->k_set.shard == y->k_set.shard;
}

/* First entries in which two items agree, that agree in the first `from`. */
static int64_t common_entries(const cascade_search *s, const cpa_cascade_item *a, const cpa_cascade_item *b,
                              int64_t from) {
    enum { RUN = 256 };
    int64_t i = from;
    const int64_t end = cpa_min64(a->units, b->units) * s->entries;
    if (!begin_alike(s, a, b)) return from;
    if (a->row >= 0 && b->row >= 0) i = cpa_max64(i, cpa_min64(cpa_block_tables_alike(s->tables, a->row, b->row), end));
    while (end - i >= RUN && !memcmp(a->entries + i, b->entries + i, RUN * sizeof *a->entries)) i += RUN;
    while (i < end && a->entries[i] == b->entries[i]) i++;
    return i;
}

/* What the next search is told of the rows of items [begin, end), compared with the leader behind them. */
static void remember(const cascade_search *s, int64_t begin, int64_t end, int64_t unit) {
    const cpa_cascade_item *items = s->cascade->items, *leader = &items[end];
    if (leader->row < 0) return;
    if (unit == 0) cpa_block_tables_found_alike(s->tables, leader->row, -1, 0);
    for (int64_t i = begin; i < end; i++)
        if (items[i].row >= 0 && items[i].row != leader->row)
            cpa_block_tables_found_alike(s->tables, items[i].row, leader->row, items[i].alike);
}

/* Puts items [begin, end) that have the same first and last entry in a unit side by side: a counting sort by a hash of
 * these, then the few that the count did not part. Those that end before come last; returns where. */
static int64_t bring_together(const cascade_search *s, int64_t begin, int64_t end, int64_t unit) {
    cpa_cascade *c = s->cascade;
    const int64_t last = s->entries - 1;
    int64_t n = 0, ended = end;
    int bits = 1;
    while (((int64_t)1 << bits) < 2 * (end - begin)) bits++;
    memset(c->counts, 0, (((size_t)1 << bits) + 1) * sizeof *c->counts);
    for (int64_t i = begin; i < end; i++) {
        cpa_cascade_item item = c->items[i];
        if (item.units <= unit) continue;
        const int32_t *at = item.entries + unit * s->entries;
        item.key = cpa_mix64((uint64_t)(uint32_t)at[0] << 32 | (uint32_t)at[last]);
        c->counts[(item.key >> (64 - bits)) + 1]++;
        c->items[i].key = item.key;
        n++;
    }
    for (int64_t i = 0; i < (int64_t)1 << bits; i++) c->counts[i + 1] += c->counts[i];
    memcpy(c->sorted, c->items + begin, (size_t)(end - begin) * sizeof *c->sorted);
    for (int64_t i = 0, old = end - begin; i < old; i++) {
        const cpa_cascade_item *item = &c->sorted[i];
        if (item->units <= unit)
            c->items[--ended] = *item;
        else
            c->items[begin + c->counts[item->key >> (64 - bits)]++] = *item;
    }
    for (int64_t i = begin + 1; i < begin + n; i++) {
        const cpa_cascade_item item = c->items[i];
        int64_t at = i;
        for (; at > begin && c->items[at - 1].key > item.key; at--) c->items[at] = c->items[at - 1];
        c->items[at] = item;
    }
    return begin + n;
}

static int shorter_first(const void *a, const void *b) {
    const int64_t left = ((const cpa_cascade_item *)a)->common, right = ((const cpa_cascade_item *)b)->common;
    return (left > right) - (left < right);
}

static void swap_items(cpa_cascade_item *a, cpa_cascade_item *b) {
    const cpa_cascade_item item = *a;
    *a = *b;
    *b = item;
}

/* The item of [begin, end) that goes furthest comes last and leads: those that have the next unit in common with it
 * stand before it, by how many they have. Returns the first of these. */
static int64_t follow(const cascade_search *s, int64_t begin, int64_t end, int64_t unit) {
    cpa_cascade_item *items = s->cascade->items, *leader = &items[end - 1];
    int64_t first = begin;
    for (int64_t i = begin; i < end - 1; i++)
        if (items[i].units > leader->units) swap_items(&items[i], leader);
    for (int64_t i = begin; i < end - 1; i++) {
        items[i].alike = common_entries(s, &items[i], leader, unit * s->entries);
        items[i].common = items[i].alike / s->entries;
    }
    remember(s, begin, end - 1, unit);
    for (int64_t i = begin; i < end - 1; i++)
        if (items[i].common == unit) swap_items(&items[i], &items[first++]);
    for (int64_t i = first + 1; i < end - 1; i++) {
        if (items[i].common >= items[i - 1].common) continue;
        qsort(items + first, (size_t)(end - 1 - first), sizeof *items, shorter_first);
        break;
    }
    return first;
}

static cpa_status add_node(const cascade_search *s, cpa_cascade_node node) {
    cpa_cascade *c = s->cascade;
    CPA_TRY(reserve(&c->nodes, &c->nodes_capacity, c->n_nodes + 1, sizeof *c->nodes, s->err));
    c->nodes[c->n_nodes++] = node;
    return CPA_OK;
}

static cpa_status find_below(const cascade_search *s, int64_t begin, int64_t end, int64_t unit, int64_t parent);

/* The nodes along the path of the leader, items [first, end), and below them. */
static cpa_status cut_path(const cascade_search *s, int64_t first, int64_t end, int64_t unit, int64_t parent) {
    cpa_cascade *c = s->cascade;
    for (int64_t i = first, left; i < end - 1; i = left) {
        const int64_t common = c->items[i].common;
        CPA_TRY(add_node(s, (cpa_cascade_node){parent, unit * s->unit, common * s->unit, i, end - i}));
        parent = c->n_nodes - 1;
        unit = common;
        for (left = i; left < end - 1 && c->items[left].common == common; left++) continue;
        CPA_TRY(find_below(s, i, left, unit, parent));
    }
    return CPA_OK;
}

/* Items [begin, end) agree in the first `unit` units. */
static cpa_status find_below(const cascade_search *s, int64_t begin, int64_t end, int64_t unit, int64_t parent) {
    const cpa_cascade_item *items = s->cascade->items;
    if (end - begin < 2) return CPA_OK;
    end = bring_together(s, begin, end, unit);
    for (int64_t next; begin < end; begin = next) {
        for (next = begin + 1; next < end && items[next].key == items[begin].key; next++) continue;
        for (int64_t to = next; to - begin > 1;) { /* more than once where keys are equal but units are not */
            const int64_t first = follow(s, begin, to, unit);
            CPA_TRY(cut_path(s, first, to, unit, parent));
            to = first;
        }
    }
    return CPA_OK;
}

cpa_status cpa_cascade_find(cpa_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables, int64_t unit,
                            int64_t most_rows, cpa_error *err) {
    const cascade_search s = {cascade, batch, tables, unit, unit / batch->block_size, err};
    cascade->n_nodes = cascade->n_items = 0;
    /* Tensors without pages share nothing: one of their blocks reaches further than any unit. */
    if (batch->n_items < 2 || unit < batch->block_size) return CPA_OK;
    CPA_TRY(list_items(&s, most_rows));
    return find_below(&s, 0, cascade->n_items, 0, -1);
}

/* Of a node that is not kept the scratch array has the kept one above it, and where its keys began. */
void cpa_cascade_keep(cpa_cascade *cascade, int (*pays)(const void *ctx, const cpa_cascade_node *node),
                      const void *ctx) {
    int64_t kept = 0;
    for (int64_t i = 0; i < cascade->n_nodes; i++) {
        cpa_cascade_node node = cascade->nodes[i];
        if (node.parent >= 0) {
            const int64_t *above = cascade->counts + 2 * node.parent;
            node.parent = above[0];
            if (above[1] >= 0) node.k_begin = above[1];
        }
        const int keep = pays(ctx, &node);
        cascade->counts[2 * i] = keep ? kept : node.parent;
        cascade->counts[2 * i + 1] = keep ? -1 : node.k_begin;
        if (keep) cascade->nodes[kept++] = node;
    }
    cascade->n_nodes = kept;
}

/* Samples of one prompt are at the same position. */
static int ascend(const cpa_cascade_row *rows, int64_t n) {
    for (int64_t i = 1; i < n; i++)
        if (rows[i].position < rows[i - 1].position) return 0;
    return 1;
}

static int earlier_first(const void *a, const void *b) {
    const cpa_cascade_row *left = a, *right = b;
    if (left->position != right->position) return left->position < right->position ? -1 : 1;
    if (left->item != right->item) return left->item < right->item ? -1 : 1;
    return 0;
}

cpa_status cpa_cascade_list_rows(cpa_cascade *cascade, const cpa_attend_batch *batch, const cpa_cascade_node *node,
                                 int64_t *n, cpa_error *err) {
    int64_t rows = 0, at = 0;
    for (int64_t i = node->first; i < node->first + node->count; i++)
        rows += batch->items[cascade->items[i].index].q_count;
    CPA_TRY(reserve(&cascade->rows, &cascade->rows_capacity, rows, sizeof *cascade->rows, err));
    for (int64_t i = node->first; i < node->first + node->count; i++) {
        const int64_t index = cascade->items[i].index;
        const cpa_attend_item *item = &batch->items[index];
        for (int64_t token = 0; token < item->q_count; token++)
            cascade->rows[at++] =
                (cpa_cascade_row){index, token, cpa_token_position(batch->map, item->q_set, item->q_first + token)};
    }
    if (!ascend(cascade->rows, rows)) qsort(cascade->rows, (size_t)rows, sizeof *cascade->rows, earlier_first);
    *n = rows;
    return CPA_OK;
}

int64_t cpa_cascade_keys_saved(const cpa_cascade *cascade) {
    int64_t saved = 0;
    for (int64_t i = 0; i < cascade->n_nodes; i++) {
        const cpa_cascade_node *node = &cascade->nodes[i];
        saved += (node->count - 1) * (node->k_end - node->k_begin);
    }
    return saved;
}

void cpa_cascade_release(cpa_cascade *cascade) {
    free(cascade->nodes);
    free(cascade->items);
    free(cascade->rows);
    free(cascade->sorted);
    free(cascade->counts);
    *cascade = (cpa_cascade){0};
}
