#include "src/check/cases/selection.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"

enum { TILE = 16 }; /* neighbouring entries that have the same blocks */

static uint64_t random_at(int64_t i, uint64_t salt) {
    return cpa_mix64((uint64_t)i * 0x9e3779b97f4a7c15u + salt);
}

/* The list of an entry and head, with what is behind it. */
static void fill_list(int32_t *list, int32_t width, int32_t units, int64_t at, int32_t count) {
    int32_t n = 0;
    for (int32_t unit = 0; unit < units && n < width; unit++)
        if (random_at(at * units + unit, 11) % 5 == 0) list[n++] = unit;
    for (; n < count; n++) list[n] = -1;
    for (; n < width; n++) list[n] = n % 3; /* is not read */
}

cpa_status cpa_case_score_add_lists(cpa_case_score *score, int32_t kv_heads, int32_t unit, int64_t keys,
                                    cpa_error *err) {
    const int32_t units = (int32_t)((keys + unit - 1) / unit), width = units / 3 + 1;
    score->lists = malloc((size_t)(score->rows * kv_heads * width) * sizeof *score->lists);
    score->counts = malloc((size_t)score->rows * sizeof *score->counts);
    if (!score->lists || !score->counts)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld lists", (long long)score->rows);
    score->kv_heads = kv_heads;
    score->unit = unit;
    score->list_width = width;
    for (int64_t entry = 0; entry < score->rows; entry++) {
        score->counts[entry] = entry % 7 == 5 ? -1 : entry % 11 == 3 ? 0 : entry % 2 ? width : width / 2;
        for (int32_t head = 0; head < kv_heads; head++) {
            const int64_t at = entry * kv_heads + head;
            fill_list(score->lists + at * width, width, units, at, score->counts[entry]);
        }
    }
    return CPA_OK;
}

cpa_status cpa_case_score_add_blocks(cpa_case_score *score, int32_t block, int64_t keys, cpa_error *err) {
    const int32_t width = (int32_t)((keys + block - 1) / block) - 1; /* none sees what is behind */
    const int64_t words = cpa_mask_words(width), lines = (score->rows + TILE - 1) / TILE * score->q_heads;
    score->n_block_words = lines * words;
    score->blocks = calloc((size_t)score->n_block_words + 1, sizeof *score->blocks);
    score->block_word = malloc((size_t)score->rows * sizeof *score->block_word);
    if (!score->blocks || !score->block_word)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the blocks of %lld rows", (long long)score->rows);
    score->block = block;
    score->n_blocks = width;
    for (int64_t line = 0; line < lines; line++)
        for (int32_t bit = 0; bit < width; bit++)
            score->blocks[line * words + bit / 32] |= (uint32_t)(random_at(line * width + bit, 13) % 2) << (bit % 32);
    for (int64_t entry = 0; entry < score->rows; entry++)
        score->block_word[entry] = entry % 9 == 8 ? -1 : entry / TILE * score->q_heads * words;
    return CPA_OK;
}

int cpa_case_score_selects(const cpa_case_score *score, int64_t row, int32_t head, int64_t key) {
    const int64_t entry = score->row_map ? score->row_map[row] : row;
    if (score->lists && score->counts[entry] >= 0) {
        const int64_t kv_head = head / (score->q_heads / score->kv_heads);
        const int32_t *list = score->lists + (entry * score->kv_heads + kv_head) * score->list_width;
        int named = 0;
        for (int32_t i = 0; i < score->counts[entry] && list[i] >= 0; i++) named |= list[i] == key / score->unit;
        if (!named) return 0;
    }
    if (!score->blocks || score->block_word[entry] < 0) return 1;
    const uint32_t *bits = score->blocks + score->block_word[entry] + head * cpa_mask_words(score->n_blocks);
    const int64_t block = key / score->block;
    return block < score->n_blocks && (bits[block / 32] >> (block % 32) & 1);
}
