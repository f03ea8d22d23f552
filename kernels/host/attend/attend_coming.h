/* Rows of the cache on their way into the first-level cache, for groups that read pages (attend_pages.h,
 * attend_pairs.h). The file that includes this one has STEP, the keys that it takes at a time, and takes HEADS heads at
 * a time. */
#ifndef CPA_HOST_ATTEND_COMING_H
#define CPA_HOST_ATTEND_COMING_H

enum { HEADS = 2, LINE = 64 };

/* The rows of the next step and heads, in the order in which they lie, on their way to the cache while others are
 * worked on. Memory and arithmetic run side by side only if the requests are spread over the arithmetic: one for each
 * line that is used up. */
typedef struct coming {
    const char *at, *end; /* what is left of the row at hand */
    int64_t row_bytes;
    int32_t row, rows;
    const char *first[STEP * HEADS];
} coming;

INLINE int begins_block(const cpa_attend_pages *pages, int64_t key) {
    return (key & (((int64_t)1 << pages->block_shift) - 1)) == 0;
}

/* The rows of a step whose keys are all in use. */
INLINE void find_step(const cpa_attend_pages *pages, int32_t head, int64_t key, const char **rows) {
    const char *row = row_at(pages, head, key);
    for (int i = 0; i < STEP; i++) {
        if (i > 0) row = begins_block(pages, key + i) ? row_at(pages, head, key + i) : row + pages->token_stride;
        rows[i] = row;
    }
}

/* The rows of heads [head, head + heads) of keys [key, key + STEP), where there are any. */
INLINE void expect_rows(coming *next, const cpa_attend_pages *pages, int64_t key, int32_t head, int32_t heads) {
    const int64_t last = key + STEP < pages->keys ? key + STEP : pages->keys;
    next->at = next->end = NULL;
    next->row_bytes = pages->dim * cpa_dtype_bytes(pages->dtype);
    next->row = next->rows = 0;
    const char *row = NULL;
    for (key = key > 0 ? key : 0; key < last; key++) {
        row = row && !begins_block(pages, key) ? row + pages->token_stride : row_at(pages, head, key);
        for (int32_t i = 0; i < heads; i++) next->first[next->rows++] = row + i * pages->head_stride;
    }
}

INLINE void request(coming *next, int32_t lines) {
    for (int32_t i = 0; i < lines; i++, next->at += LINE) {
        if (next->at >= next->end) {
            if (next->row == next->rows) return;
            next->at = next->first[next->row++];
            next->end = next->at + next->row_bytes;
        }
        __builtin_prefetch(next->at, 0, 3);
    }
}

INLINE int32_t lines_of(int64_t bytes) {
    return bytes < LINE ? 1 : (int32_t)(bytes / LINE);
}

/* What comes after heads [head, head + HEADS) of the step at lane `key`: their successors, the next step, or the first
 * of `after` at key `after_key`. */
INLINE void expect_after(coming *next, const cpa_attend_tile *tile, const cpa_attend_pages *pages,
                         const cpa_attend_group *group, int32_t head, int32_t key, int32_t end,
                         const cpa_attend_pages *after, int64_t after_key) {
    const int32_t next_head = head + HEADS < group->heads ? head + HEADS : 0;
    const int32_t heads = group->heads - next_head < HEADS ? group->heads - next_head : HEADS;
    if (next_head == 0) key += STEP;
    if (key < end)
        expect_rows(next, pages, tile->key0 + key, next_head, heads);
    else
        expect_rows(next, after, after_key, 0, heads);
}

#endif
