#include "kernels/key_source.h"

#include "base/min_max.h"

enum { STATES_PART = 4 /* states have this part of a workspace, or as much as the least rows take */ };

int64_t cpa_key_room_least(const cpa_key_room *room) {
    return room->step * room->token_bytes + room->least_rows * room->row_bytes;
}

/* Into how many parts the rows of an item are cut, and how many keys a pass has. */
typedef struct item_cut {
    int64_t row_parts, keys;
} item_cut;

static item_cut cut_item(const cpa_key_room *room, const cpa_key_item *item) {
    item_cut cut = {1, 0};
    int64_t left = room->bytes;
    if (room->row_bytes > 0) {
        const int64_t beside = room->bytes - room->step * room->token_bytes; /* the least keys */
        const int64_t bytes = cpa_min64(room->bytes / STATES_PART, beside);
        const int64_t most = cpa_max64(bytes / room->row_bytes, room->least_rows);
        cut.row_parts = cpa_max64(cpa_ceil_div(item->rows, most), 1);
        left -= cpa_ceil_div(item->rows, cut.row_parts) * room->row_bytes;
    }
    const int64_t most_keys = left / room->token_bytes / room->step * room->step;
    cut.keys = cpa_ceil_div(cpa_ceil_div(item->keys, cpa_ceil_div(item->keys, most_keys)), room->step) * room->step;
    return cut;
}

/* The passes of an item that is cut; how many. */
static int64_t add_cut(const cpa_key_room *room, const cpa_key_item *items, int64_t i, cpa_key_pass *passes) {
    const cpa_key_item *item = &items[i];
    const item_cut cut = cut_item(room, item);
    int64_t n = 0;
    for (int64_t part = 0; part < cut.row_parts; part++) {
        const int64_t row = item->rows * part / cut.row_parts, end = item->rows * (part + 1) / cut.row_parts;
        for (int64_t key = 0; key < item->keys; key += cut.keys, n++) {
            if (!passes) continue;
            passes[n] = (cpa_key_pass){.item = i,
                                       .n_items = 1,
                                       .is_cut = 1,
                                       .row = row,
                                       .rows = end - row,
                                       .key = key,
                                       .keys = cpa_min64(cut.keys, item->keys - key)};
        }
    }
    return n;
}

int64_t cpa_key_passes(const cpa_key_room *room, const cpa_key_item *items, int64_t n_items, cpa_key_pass *passes) {
    const int64_t most_units = room->bytes / room->token_bytes / room->unit;
    int64_t n = 0, free_units = 0;
    int is_open = 0; /* the last pass takes more whole items */
    if (room->bytes < cpa_key_room_least(room)) return 0;
    for (int64_t i = 0; i < n_items; i++) {
        const int64_t units = cpa_ceil_div(items[i].keys, room->unit);
        if (units > most_units) {
            n += add_cut(room, items, i, passes ? passes + n : NULL);
            is_open = 0;
            continue;
        }
        if (!is_open || free_units < units) {
            if (passes) passes[n] = (cpa_key_pass){.item = i};
            n++;
            is_open = 1;
            free_units = most_units;
        }
        free_units -= units;
        if (passes) passes[n - 1].n_items++;
    }
    return n;
}

int cpa_key_item_sees(cpa_owner_map map, cpa_mask mask, int has_bits, const cpa_attend_item *item) {
    const int64_t ahead = has_bits ? 0 : cpa_mask_ahead(mask), last = item->q_first + item->q_count - 1;
    const int64_t key = item->k_first, end = key + item->k_count;
    if (item->q_count == 0 || item->k_count == 0) return 0;
    if (ahead > 0) {
        const int64_t behind = cpa_token_position(map, item->q_set, last) + ahead;
        if (key >= cpa_tokens_before(map, item->k_set, behind)) return 0;
    }
    if (mask.window <= 0) return 1;
    const int64_t first = cpa_token_position(map, item->q_set, item->q_first) - mask.window + 1;
    return end > cpa_tokens_before(map, item->k_set, cpa_max64(first, 0)) ||
           key < cpa_tokens_before(map, item->k_set, mask.sinks);
}
