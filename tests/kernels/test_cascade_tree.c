/* The tree of equal leading blocks of a batch against what pairs of tables say. */
#include <string.h>

#include "kernels/cascade.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_TABLES = 24, MOST_UNITS = 9, ENTRIES = 4, BLOCK = 4, UNIT = ENTRIES * BLOCK };

typedef struct tables {
    cpa_attend_item items[MOST_TABLES];
    int32_t entries[MOST_TABLES * MOST_UNITS * ENTRIES];
    cpa_attend_batch batch;
} tables;

/* Tables that go along with an earlier one for a while, and then name blocks of few. */
static void deal_tables(tables *t, int64_t n) {
    t->batch = (cpa_attend_batch){.size = sizeof t->batch,
                                  .map = {1, BLOCK},
                                  .shape = {.q_heads = 1, .kv_heads = 1},
                                  .block_size = BLOCK,
                                  .items = t->items,
                                  .n_items = n,
                                  .block_tables = t->entries,
                                  .n_table_entries = MOST_TABLES * MOST_UNITS * ENTRIES};
    for (int64_t i = 0; i < n; i++) {
        int32_t *own = t->entries + i * MOST_UNITS * ENTRIES;
        const int64_t other = cpa_test_random_below(i + 1), along = cpa_test_random_below(MOST_UNITS * ENTRIES + 1);
        for (int64_t e = 0; e < MOST_UNITS * ENTRIES; e++) {
            const int32_t theirs = t->entries[other * MOST_UNITS * ENTRIES + e];
            own[e] = other < i && e < along ? theirs : (int32_t)cpa_test_random_below(3);
        }
        const int64_t keys = 1 + cpa_test_random_below(MOST_UNITS * UNIT), rows = 1 + cpa_test_random_below(3);
        t->items[i] = (cpa_attend_item){
            .q_row = 3 * i,
            .q_count = cpa_test_random_below(12) ? rows : 0,
            .q_first = keys > rows && cpa_test_random_below(8) ? keys - rows : 0, /* else most keys are later */
            .k_first = cpa_test_random_below(9)   ? 0
                       : cpa_test_random_below(2) ? UNIT
                                                  : BLOCK,
            .k_count = keys,
            .table = i * MOST_UNITS * ENTRIES,
        };
    }
}

/* Units that may be shared of an item, and by two of them. */
static int64_t units_of(const tables *t, int64_t i) {
    const cpa_attend_item *item = &t->items[i];
    const int64_t seen = item->q_first + 1 - item->k_first, keys = seen < item->k_count ? seen : item->k_count;
    return item->q_count == 0 || item->q_count > 2 || item->k_first % UNIT || keys < 0 ? 0 : keys / UNIT;
}

static int64_t units_in_common(const tables *t, int64_t i, int64_t j) {
    const int64_t a = units_of(t, i), b = units_of(t, j), most = a < b ? a : b;
    const int32_t *x = t->entries + t->items[i].table, *y = t->entries + t->items[j].table;
    int64_t units = 0;
    if (t->items[i].k_first != t->items[j].k_first) return 0;
    while (units < most && !memcmp(x + units * ENTRIES, y + units * ENTRIES, ENTRIES * sizeof *x)) units++;
    return units;
}

static int node_has(const cpa_cascade *c, const cpa_cascade_node *node, int64_t item) {
    for (int64_t i = node->first; i < node->first + node->count; i++)
        if (c->items[i].index == item) return 1;
    return 0;
}

/* Pairs that do not end to share where their tables part, and nodes that do not begin where those above them end. */
static int64_t wrong_pairs(const tables *t, const cpa_cascade *c) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < t->batch.n_items; i++) {
        for (int64_t j = 0; j < i; j++) {
            int64_t end = 0;
            for (int64_t n = 0; n < c->n_nodes; n++) {
                const cpa_cascade_node *node = &c->nodes[n];
                if (!node_has(c, node, i) || !node_has(c, node, j)) continue;
                wrong += node->k_begin != end || node->k_end <= end;
                end = node->k_end;
            }
            wrong += end != units_in_common(t, i, j) * UNIT;
        }
    }
    for (int64_t n = 0; n < c->n_nodes; n++) {
        const cpa_cascade_node *node = &c->nodes[n];
        wrong += node->count < 2 || node->parent >= n;
        if (node->parent < 0)
            wrong += node->k_begin != 0;
        else
            wrong += c->nodes[node->parent].k_end != node->k_begin || c->nodes[node->parent].count < node->count;
    }
    return wrong;
}

static void the_tree_is_what_pairs_of_tables_have_in_common(void) {
    enum { BATCHES = 3000 };
    static tables t;
    cpa_cascade cascade = {0};
    int64_t wrong = 0, nodes = 0, deep = 0;
    for (int i = 0; i < BATCHES; i++) {
        deal_tables(&t, cpa_test_random_below(MOST_TABLES + 1));
        CU_ASSERT_EQUAL_FATAL(cpa_cascade_find(&cascade, &t.batch, (cpa_table_set){0}, UNIT, 2, NULL), CPA_OK);
        wrong += wrong_pairs(&t, &cascade);
        nodes += cascade.n_nodes;
        for (int64_t n = 0; n < cascade.n_nodes; n++) {
            const int64_t above = cascade.nodes[n].parent;
            deep += above >= 0 && cascade.nodes[above].parent >= 0;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(nodes > 2 * BATCHES && deep > BATCHES / 10);
    cpa_cascade_release(&cascade);
}

/* Leaves out every node of `out`, a bit each in the order in which they are asked for. */
static int kept(const void *ctx, const cpa_cascade_node *node) {
    uint64_t *out = *(uint64_t *const *)ctx;
    const int keep = !(*out & 1);
    (void)node;
    *out >>= 1;
    return keep;
}

/* Of every item: the keys that nodes cover follow each other from 0 to where its last node ended. */
static void keys_of_a_node_that_is_left_out_go_to_those_below(void) {
    enum { BATCHES = 500 };
    static tables t;
    cpa_cascade cascade = {0};
    int64_t wrong = 0;
    for (int i = 0; i < BATCHES; i++) {
        int64_t end[MOST_TABLES] = {0};
        uint64_t out = (uint64_t)cpa_test_random_below(1 << 24), bits = out;
        const uint64_t *const ctx = &bits;
        deal_tables(&t, MOST_TABLES);
        CU_ASSERT_EQUAL_FATAL(cpa_cascade_find(&cascade, &t.batch, (cpa_table_set){0}, UNIT, 2, NULL), CPA_OK);
        for (int64_t n = 0; n < cascade.n_nodes; n++)
            for (int64_t k = 0; !(out >> n & 1) && k < cascade.nodes[n].count; k++)
                end[cascade.items[cascade.nodes[n].first + k].index] = cascade.nodes[n].k_end;
        cpa_cascade_keep(&cascade, kept, &ctx);
        for (int64_t item = 0; item < MOST_TABLES; item++) {
            int64_t covered = 0;
            for (int64_t n = 0; n < cascade.n_nodes; n++) {
                if (!node_has(&cascade, &cascade.nodes[n], item)) continue;
                wrong += cascade.nodes[n].k_begin != covered;
                covered = cascade.nodes[n].k_end;
            }
            wrong += covered != end[item];
        }
        for (int64_t n = 0; n < cascade.n_nodes; n++) {
            const cpa_cascade_node *node = &cascade.nodes[n];
            wrong += node->parent >= n || (node->parent >= 0 && cascade.nodes[node->parent].k_end != node->k_begin);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_cascade_release(&cascade);
}

static const cpa_test tests[] = {
    {"the tree is what pairs of tables have in common", the_tree_is_what_pairs_of_tables_have_in_common},
    {"keys of a node that is left out go to those below", keys_of_a_node_that_is_left_out_go_to_those_below},
};

CPA_TEST_MAIN("cascade_tree", tests)
