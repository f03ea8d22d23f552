/* Block tables that stay: rows are what was said of them, and so is what a device has of them after an upload, whatever
 * grew, moved or changed hands since the last one; and what they remember of each other changes nothing of what a search
 * finds. */
#include <stdlib.h>
#include <string.h>

#include "kernels/block_tables.h"
#include "kernels/cascade.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROWS = 12, SETS = 3, LONGEST = 900, STEPS = 400, NONE = 7 };

/* What the tables have to be. */
typedef struct model {
    int32_t entries[SETS][ROWS][2 * LONGEST];
    int64_t counts[ROWS];
} model;

static cpa_device *device;
static cpa_stream *stream;
static cpa_block_tables *tables;
static model expected;

static void open_tables(int32_t sets) {
    cpa_test_device_open(1, &device, &stream);
    device->caps.own_memory = 1; /* the host too keeps the two apart then */
    CU_ASSERT_EQUAL_FATAL(cpa_block_tables_create(device, sets, &tables, NULL), CPA_OK);
    memset(&expected, 0, sizeof expected);
}

static void close_tables(void) {
    cpa_block_tables_destroy(tables);
    cpa_test_device_close(device, stream);
}

static cpa_table_set set_of(int32_t set) {
    return (cpa_table_set){tables, set};
}

/* Adds n entries in all sets; some ids are below 0. Rows begin like the row before them, and name few blocks. */
static void append(int64_t row, int64_t n, int64_t ids) {
    for (int32_t set = 0; set < SETS && set < cpa_block_tables_sets(tables); set++) {
        int32_t given[2 * LONGEST];
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = expected.counts[row] + i;
            const int along = row > 0 && at < expected.counts[row - 1] && cpa_test_random_below(60) > 0;
            given[i] = along ? expected.entries[set][row - 1][at] : (int32_t)cpa_test_random_below(ids) - 1;
            expected.entries[set][row][at] = given[i] < 0 ? NONE : given[i];
        }
        CU_ASSERT_EQUAL_FATAL(cpa_block_tables_append(set_of(set), row, given, n, NONE, NULL), CPA_OK);
    }
    expected.counts[row] += n;
}

static void cut(int64_t row, int64_t count) {
    for (int32_t set = 0; set < cpa_block_tables_sets(tables); set++) cpa_block_tables_cut(set_of(set), row, count);
    expected.counts[row] = count;
}

static void replace(int64_t row, int64_t entry, int32_t id) {
    const int32_t set = (int32_t)cpa_test_random_below(cpa_block_tables_sets(tables));
    expected.entries[set][row][entry] = id;
    CU_ASSERT_EQUAL(cpa_block_tables_replace(set_of(set), row, entry, id, NULL), CPA_OK);
}

/* The row becomes one that differs in an entry, or ends elsewhere. */
static void give(int64_t row, int64_t count) {
    for (int32_t set = 0; set < cpa_block_tables_sets(tables); set++) {
        int32_t *to = expected.entries[set][row];
        for (int64_t i = expected.counts[row]; i < count; i++) to[i] = (int32_t)cpa_test_random_below(50);
        if (count > 0) to[cpa_test_random_below(count)] = (int32_t)cpa_test_random_below(50);
        CU_ASSERT_EQUAL(cpa_block_tables_give(set_of(set), row, to, count, NULL), CPA_OK);
    }
    expected.counts[row] = count;
}

/* One change of one row. */
static void change(int64_t ids) {
    const int64_t row = cpa_test_random_below(ROWS), count = expected.counts[row];
    switch (cpa_test_random_below(8)) {
        case 0: cut(row, cpa_test_random_below(4) ? count : 0); break;
        case 1: cut(row, cpa_test_random_below(count + 1)); break;
        case 2:
            if (count > 0) replace(row, cpa_test_random_below(count), (int32_t)cpa_test_random_below(ids));
            break;
        case 3: give(row, cpa_test_random_below(count / 2 + 40)); break;
        case 4:
            if (count < LONGEST / 2) append(row, 1 + cpa_test_random_below(LONGEST / 2), ids);
            break;
        default:
            if (count < LONGEST) append(row, 1 + cpa_test_random_below(20), ids);
    }
}

/* Entries of a set that are not what they have to be. */
static int64_t wrong_entries(const int32_t *entries, int32_t set) {
    int64_t wrong = 0;
    for (int64_t row = 0; row < ROWS; row++) {
        const int64_t place = cpa_block_tables_place(tables, row), count = expected.counts[row];
        int32_t largest = -1;
        wrong += cpa_block_tables_count(set_of(set), row) != count;
        for (int64_t i = 0; i < count; i++) {
            wrong += entries[place + i] != expected.entries[set][row][i];
            if (entries[place + i] > largest) largest = entries[place + i];
        }
        wrong += cpa_block_tables_largest(set_of(set), row) < largest;
        wrong += count > 0 && cpa_block_tables_row_at(tables, place) != row;
        wrong += count == 0 && cpa_block_tables_largest(set_of(set), row) != -1;
    }
    return wrong;
}

static void uploads_bring_what_has_changed(void) {
    int64_t wrong = 0, first_capacity, uploads = 0;
    open_tables(SETS);
    cpa_test_random_seed(11);
    first_capacity = cpa_block_tables_capacity(tables);
    for (int step = 0; step < STEPS; step++) {
        for (int64_t changes = cpa_test_random_below(6); changes > 0; changes--) change(1000);
        if (cpa_test_random_below(3) == 0) continue; /* changes of several steps come with one upload */
        CU_ASSERT_EQUAL(cpa_block_tables_upload(tables, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
        uploads++;
        for (int32_t set = 0; set < SETS; set++) {
            const int64_t capacity = cpa_block_tables_capacity(tables), bytes = capacity * (int64_t)sizeof(int32_t);
            int32_t *found = malloc((size_t)bytes);
            CU_ASSERT_EQUAL(device->table->copy(found, cpa_block_tables_device(set_of(set)), bytes, stream), CPA_OK);
            CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
            wrong += wrong_entries(found, set) + wrong_entries(cpa_block_tables_host(set_of(set)), set);
            free(found);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(uploads > STEPS / 2 && cpa_block_tables_capacity(tables) > first_capacity);
    close_tables();
}

/* Rows that come and go take the ranges of those before them. */
static void rows_that_are_left_make_room(void) {
    open_tables(1);
    for (int round = 0; round < 100; round++) {
        append(round % ROWS, LONGEST, 1000);
        append((round + 1) % ROWS, 10, 1000);
        cut(round % ROWS, 0);
        cut((round + 1) % ROWS, 0);
    }
    CU_ASSERT(cpa_block_tables_capacity(tables) <= 4096);
    close_tables();
}

/* The largest entry of a row that is given is among its entries, and not one that it had before. */
static void a_given_row_has_no_larger_entry(void) {
    const int32_t ids[2][4] = {{3, 900, 5, 1}, {3, 4, 5, 1}};
    open_tables(1);
    CU_ASSERT_EQUAL(cpa_block_tables_give(set_of(0), 0, ids[0], 4, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_tables_largest(set_of(0), 0), 900);
    CU_ASSERT_EQUAL(cpa_block_tables_give(set_of(0), 0, ids[1], 4, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_tables_largest(set_of(0), 0), 5);
    CU_ASSERT_EQUAL(cpa_block_tables_give(set_of(0), 0, ids[1], 2, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_tables_largest(set_of(0), 0), 4);
    close_tables();
}

/* ---- the search for what rows share ---- */

enum { BLOCK = 4, UNIT = 16 };

static cpa_attend_batch batch_of(cpa_attend_item *items, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = i % ROWS, keys = expected.counts[row] * BLOCK - cpa_test_random_below(BLOCK);
        items[i] = (cpa_attend_item){.q_row = i,
                                     .q_count = keys > 0 && cpa_test_random_below(20) > 0,
                                     .q_first = keys > 0 ? keys - 1 : 0,
                                     .k_count = keys > 0 ? keys : 0,
                                     .table = cpa_block_tables_place(tables, row)};
    }
    return (cpa_attend_batch){.size = sizeof(cpa_attend_batch),
                              .map = {1, BLOCK},
                              .shape = {.q_heads = 1, .kv_heads = 1},
                              .block_size = BLOCK,
                              .items = items,
                              .n_items = n,
                              .block_tables = cpa_block_tables_host(set_of(0)),
                              .n_table_entries = cpa_block_tables_capacity(tables)};
}

static int same_trees(const cpa_cascade *a, const cpa_cascade *b) {
    if (a->n_nodes != b->n_nodes || a->n_items != b->n_items) return 0;
    for (int64_t i = 0; i < a->n_nodes; i++)
        if (memcmp(&a->nodes[i], &b->nodes[i], sizeof *a->nodes) != 0) return 0;
    for (int64_t i = 0; i < a->n_items; i++)
        if (a->items[i].index != b->items[i].index) return 0;
    return 1;
}

/* Two items have some of the rows, as those of peers that ask for rows of one sequence. Not each change is followed by a
 * search, and not each search has all rows. */
static void what_rows_remember_changes_no_tree(void) {
    enum { SEARCHES = 4000, ITEMS = 2 * ROWS };
    cpa_cascade fresh = {0}, remembering = {0};
    int64_t wrong = 0, nodes = 0;
    open_tables(1);
    cpa_test_random_seed(12);
    for (int search = 0; search < SEARCHES; search++) {
        cpa_attend_item items[ITEMS];
        for (int64_t changes = cpa_test_random_below(4); changes > 0; changes--) change(3);
        const cpa_attend_batch batch = batch_of(items, 2 + cpa_test_random_below(ITEMS - 1));
        CU_ASSERT_EQUAL_FATAL(cpa_cascade_find(&fresh, &batch, (cpa_table_set){0}, UNIT, 2, NULL), CPA_OK);
        CU_ASSERT_EQUAL_FATAL(cpa_cascade_find(&remembering, &batch, set_of(0), UNIT, 2, NULL), CPA_OK);
        wrong += !same_trees(&fresh, &remembering);
        nodes += fresh.n_nodes;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(nodes > SEARCHES);
    cpa_cascade_release(&fresh);
    cpa_cascade_release(&remembering);
    close_tables();
}

/* What was found of rows that go on is known before the next search, whichever of them is the longest then. */
static void rows_that_go_on_are_not_compared_again(void) {
    enum { SHARED = 800, FEW = 4 };
    int32_t prefix[SHARED];
    cpa_attend_item items[ROWS];
    cpa_cascade cascade = {0};
    open_tables(1);
    for (int32_t i = 0; i < SHARED; i++) prefix[i] = i;
    for (int64_t row = 0; row < FEW; row++) {
        const int32_t own = (int32_t)(1000 + row);
        CU_ASSERT_EQUAL(cpa_block_tables_append(set_of(0), row, prefix, SHARED, -1, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_block_tables_append(set_of(0), row, &own, 1, -1, NULL), CPA_OK);
        expected.counts[row] = SHARED + 1;
    }
    for (int64_t longest = 0; longest < FEW; longest++) {
        const int32_t more[8] = {0};
        CU_ASSERT_EQUAL(cpa_block_tables_append(set_of(0), longest, more, 8, -1, NULL), CPA_OK);
        expected.counts[longest] += 8;
        const cpa_attend_batch batch = batch_of(items, FEW);
        for (int64_t i = 0; i < FEW; i++) items[i].q_count = 1;
        CU_ASSERT_EQUAL_FATAL(cpa_cascade_find(&cascade, &batch, set_of(0), UNIT, 2, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cascade.n_nodes, 1);
        for (int64_t row = 0; row < FEW; row++)
            for (int64_t other = 0; other < FEW; other++)
                CU_ASSERT(cpa_block_tables_alike(set_of(0), row, other) >= SHARED);
    }
    CU_ASSERT_EQUAL(cpa_block_tables_replace(set_of(0), 2, 100, 5000, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_block_tables_alike(set_of(0), 2, 3), 100);
    CU_ASSERT(cpa_block_tables_alike(set_of(0), 0, 3) >= SHARED);
    cpa_cascade_release(&cascade);
    close_tables();
}

static const cpa_test TESTS[] = {
    {"uploads bring what has changed", uploads_bring_what_has_changed},
    {"rows that are left make room", rows_that_are_left_make_room},
    {"a given row has no larger entry", a_given_row_has_no_larger_entry},
    {"what rows remember changes no tree", what_rows_remember_changes_no_tree},
    {"rows that go on are not compared again", rows_that_go_on_are_not_compared_again},
};

CPA_TEST_MAIN("block tables that stay", TESTS)
