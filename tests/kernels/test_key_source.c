/* Keys that go through a workspace in passes: each key of each row is in one pass, no pass takes more than there is, and
 * a pass that is left out has nothing that a row sees. */
#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "kernels/key_source.h"
#include "tests/fixtures/unit.h"

static uint64_t seed = 7;

static int64_t below(int64_t n) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (int64_t)((seed >> 33) % (uint64_t)n);
}

enum { MOST_ITEMS = 6, MOST_ROWS = 90, MOST_KEYS = 700, STEP = 32 };

static cpa_key_room random_room(void) {
    cpa_key_room room = {.token_bytes = 8 * (1 + below(5)),
                         .row_bytes = below(4) ? 4 * (1 + below(20)) : 0,
                         .least_rows = 1 + below(12),
                         .unit = 1 << below(5)};
    room.step = room.unit * (STEP / room.unit);
    room.bytes = cpa_key_room_least(&room) + below(3) * below(200 * room.token_bytes);
    return room;
}

static int64_t units(const cpa_key_room *room, int64_t keys) {
    return (keys + room->unit - 1) / room->unit * room->unit;
}

/* Marks what a pass has of an item; the bytes that it takes. */
static int64_t mark(const cpa_key_room *room, const cpa_key_item *item, const cpa_key_pass *pass,
                    uint8_t (*seen)[MOST_KEYS]) {
    const int64_t row = pass->is_cut ? pass->row : 0, rows = pass->is_cut ? pass->rows : item->rows;
    const int64_t key = pass->is_cut ? pass->key : 0, keys = pass->is_cut ? pass->keys : item->keys;
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t k = key; k < key + keys; k++) seen[r][k]++;
    return units(room, keys) * room->token_bytes + (pass->is_cut ? rows * room->row_bytes : 0);
}

/* A cut pass follows the one before where that ends, with as many keys, but for the last. */
static void check_order(const cpa_key_room *room, const cpa_key_item *item, const cpa_key_pass *passes, int64_t i) {
    const cpa_key_pass *pass = &passes[i], *before = pass - 1;
    CU_ASSERT_EQUAL(pass->n_items, 1);
    CU_ASSERT_EQUAL(pass->key % room->step, 0);
    if (room->row_bytes > 0 && pass->rows < item->rows) CPA_ASSERT_ORDER(pass->rows, >=, room->least_rows / 2);
    if (pass->key == 0) {
        CU_ASSERT(pass->row == 0 || (before->item == pass->item && before->row + before->rows == pass->row));
        CU_ASSERT(pass->row == 0 || before->key + before->keys == item->keys);
        return;
    }
    CU_ASSERT(before->item == pass->item && before->row == pass->row && before->rows == pass->rows);
    CU_ASSERT_EQUAL(before->key + before->keys, pass->key);
    CU_ASSERT(pass->keys == before->keys || pass->key + pass->keys == item->keys);
}

static void every_key_of_every_row_is_in_one_pass_that_fits(void) {
    static uint8_t seen[MOST_ITEMS][MOST_ROWS][MOST_KEYS];
    int64_t cut = 0, whole = 0;
    for (int round = 0; round < 3000; round++) {
        const cpa_key_room room = random_room();
        const int64_t n_items = 1 + below(MOST_ITEMS);
        cpa_key_item items[MOST_ITEMS];
        memset(seen, 0, sizeof seen);
        for (int64_t i = 0; i < n_items; i++) items[i] = (cpa_key_item){1 + below(MOST_ROWS), below(MOST_KEYS)};
        const int64_t n = cpa_key_passes(&room, items, n_items, NULL);
        cpa_key_pass *passes = calloc((size_t)n + 1, sizeof *passes);
        CU_ASSERT_FATAL(n > 0 && passes != NULL);
        CU_ASSERT_EQUAL(cpa_key_passes(&room, items, n_items, passes), n);
        for (int64_t i = 0; i < n; i++) {
            int64_t bytes = 0;
            for (int64_t k = passes[i].item; k < passes[i].item + passes[i].n_items; k++)
                bytes += mark(&room, &items[k], &passes[i], seen[k]);
            CPA_ASSERT_ORDER(bytes, <=, room.bytes);
            if (passes[i].is_cut) check_order(&room, &items[passes[i].item], passes, i);
            *(passes[i].is_cut ? &cut : &whole) += 1;
        }
        int64_t wrong = 0;
        for (int64_t i = 0; i < n_items; i++)
            for (int64_t r = 0; r < items[i].rows; r++)
                for (int64_t k = 0; k < items[i].keys; k++) wrong += seen[i][r][k] != 1;
        CU_ASSERT_EQUAL(wrong, 0);
        free(passes);
    }
    CU_ASSERT(cut > 1000 && whole > 1000);
}

static void what_fits_is_one_pass(void) {
    const cpa_key_room room = {.bytes = 1000, .token_bytes = 10, .row_bytes = 5, .least_rows = 4, .unit = 4, .step = 8};
    const cpa_key_item items[] = {{50, 33}, {1, 0}, {70, 64}}; /* 36 + 0 + 64 tokens */
    cpa_key_pass pass;
    CU_ASSERT_EQUAL_FATAL(cpa_key_passes(&room, items, 3, NULL), 1);
    CU_ASSERT_EQUAL(cpa_key_passes(&room, items, 3, &pass), 1);
    CU_ASSERT(!pass.is_cut && pass.item == 0 && pass.n_items == 3);
}

static void a_room_below_its_least_takes_nothing(void) {
    cpa_key_room room = {.token_bytes = 10, .row_bytes = 5, .least_rows = 4, .unit = 4, .step = 8};
    const cpa_key_item item = {100, 100};
    room.bytes = cpa_key_room_least(&room);
    CU_ASSERT(cpa_key_passes(&room, &item, 1, NULL) > 1);
    room.bytes--;
    CU_ASSERT_EQUAL(cpa_key_passes(&room, &item, 1, NULL), 0);
}

static cpa_token_set random_set(int32_t ranks, int of_keys) {
    const int32_t kind = (int32_t)below(of_keys ? 3 : 2);
    cpa_token_set set = {.kind = kind == 0   ? CPA_TOKENS_SHARD
                                 : kind == 1 ? CPA_TOKENS_ALL
                                             : CPA_TOKENS_OTHERS,
                         .shard = (int32_t)below(ranks)};
    return set;
}

/* Row by row and key by key. */
static int sees_some(cpa_owner_map map, cpa_mask mask, const cpa_attend_item *item) {
    for (int64_t r = 0; r < item->q_count; r++) {
        const int64_t query = cpa_token_position(map, item->q_set, item->q_first + r);
        for (int64_t k = 0; k < item->k_count; k++) {
            const int64_t key = cpa_token_index(map, item->k_set, item->k_first + k);
            if (cpa_mask_ahead(mask) > 0 && key >= query + cpa_mask_ahead(mask)) continue;
            if (mask.window == 0 || query - key < mask.window || key < mask.sinks) return 1;
        }
    }
    return 0;
}

static void an_item_that_is_left_out_sees_nothing(void) {
    int left_out = 0, blind = 0;
    for (int round = 0; round < 20000; round++) {
        const cpa_owner_map map = {.cp_size = 2 + (int32_t)below(3), .interleave = 1 << below(4)};
        const cpa_mask mask = {.causal = (int32_t)below(2),
                               .window = below(2) * (1 + below(40)),
                               .sinks = (int32_t)below(9),
                               .right = below(3) ? 0 : 1 + below(5)};
        const cpa_attend_item item = {.q_first = below(60),
                                      .q_count = below(8),
                                      .k_first = below(60),
                                      .k_count = below(30),
                                      .q_set = random_set(map.cp_size, 0),
                                      .k_set = random_set(map.cp_size, 1)};
        const int sees = cpa_key_item_sees(map, mask, 0, &item), some = sees_some(map, mask, &item);
        CU_ASSERT(sees || !some);
        left_out += !sees;
        blind += !some;
    }
    CU_ASSERT(left_out > 1000 && left_out > blind * 9 / 10);
}

static void bits_may_show_what_lies_behind(void) {
    const cpa_owner_map map = {.cp_size = 1, .interleave = 16};
    const cpa_mask causal = {.causal = 1};
    const cpa_attend_item item = {.q_first = 10, .q_count = 2, .k_first = 32, .k_count = 16};
    CU_ASSERT_EQUAL(cpa_key_item_sees(map, causal, 0, &item), 0);
    CU_ASSERT_EQUAL(cpa_key_item_sees(map, causal, 1, &item), 1);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every key of every row is in one pass, which fits", every_key_of_every_row_is_in_one_pass_that_fits},
        {"what fits is one pass", what_fits_is_one_pass},
        {"a room below its least takes nothing", a_room_below_its_least_takes_nothing},
        {"an item that is left out sees nothing", an_item_that_is_left_out_sees_nothing},
        {"bits may show what lies behind a query", bits_may_show_what_lies_behind},
    };
    return cpa_test_main(argc, argv, "key source", tests, (int)(sizeof tests / sizeof tests[0]));
}
