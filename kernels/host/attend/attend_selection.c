#include "kernels/host/attend/attend_selection.h"

#include <math.h>

#include "base/min_max.h"

cpa_attend_selects cpa_attend_selects_of(const cpa_key_selection *selection) {
    cpa_attend_selects selects = {0};
    if (!selection) return selects;
    if (selection->indices) {
        selects.lists = *selection->indices;
        if (selects.lists.unit == 0) selects.lists.unit = 1;
    }
    if (selection->blocks) selects.blocks = *selection->blocks;
    selects.any = selection->indices || selection->blocks;
    return selects;
}

/* The first entry that is not below `least`, or is negative: those are behind all others. */
static int32_t find_entry(const int32_t *list, int32_t n, int64_t least) {
    int32_t low = 0, high = n;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (list[middle] >= 0 && list[middle] < least)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

cpa_attend_row_keys cpa_attend_row_keys_of(const cpa_attend_selects *selects, int64_t row, int32_t head,
                                           int32_t kv_head) {
    const cpa_key_indices *lists = &selects->lists;
    const cpa_key_blocks *blocks = &selects->blocks;
    cpa_attend_row_keys keys = {.unit = lists->unit, .block = blocks->block, .n_blocks = blocks->width};
    if (lists->unit > 0) {
        const int64_t of = lists->row_map ? lists->row_map[row] : row;
        const int32_t n = lists->counts ? lists->counts[of] : lists->width;
        keys.listed = n >= 0;
        if (n > 0) {
            keys.list = lists->indices + of * lists->row_stride + kv_head * lists->head_stride;
            keys.n_listed = find_entry(keys.list, (int32_t)cpa_min64(n, lists->width), INT64_MAX);
        }
    }
    if (blocks->bits) {
        const int64_t of = blocks->row_map ? blocks->row_map[row] : row, word = blocks->row_word[of];
        if (word >= 0) keys.blocks = blocks->bits + word + head * blocks->head_stride;
    }
    return keys;
}

static int has_block(const cpa_attend_row_keys *keys, int64_t block) {
    return block < keys->n_blocks && (keys->blocks[block / 32] >> (block % 32) & 1);
}

int cpa_attend_keys_meet(const cpa_attend_row_keys *keys, int64_t first, int64_t last) {
    if (keys->listed) {
        const int32_t at = find_entry(keys->list, keys->n_listed, first / keys->unit);
        if (at == keys->n_listed || (int64_t)keys->list[at] * keys->unit > last) return 0;
    }
    if (!keys->blocks) return 1;
    const int64_t end = cpa_min64(last / keys->block + 1, keys->n_blocks);
    for (int64_t block = first / keys->block; block < end; block++)
        if (has_block(keys, block)) return 1;
    return 0;
}

void cpa_attend_hide_keys(const cpa_attend_row_keys *keys, const int64_t *index, int32_t begin, int32_t end, float *s) {
    int32_t at = keys->listed ? find_entry(keys->list, keys->n_listed, index[begin] / keys->unit) : 0;
    for (int32_t j = begin; j < end; j++) {
        int attends = 1;
        if (keys->listed) {
            const int64_t entry = index[j] / keys->unit;
            while (at < keys->n_listed && keys->list[at] < entry) at++;
            attends = at < keys->n_listed && keys->list[at] == entry;
        }
        if (keys->blocks) attends &= has_block(keys, index[j] / keys->block);
        if (!attends) s[j] = -INFINITY;
    }
}
