#include "src/worker/worker_trees.h"

#include <string.h>

#include "kernels/device.h"
#include "kernels/graph.h"

void cpa_worker_count_masks(cpa_worker *worker, const cpa_step_plan *plan) {
    cpa_step_sizes *sizes = &worker->rows->sizes;
    int64_t rows = 0, words = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        rows += chunk->count;
        if (chunk->parents >= 0) words += chunk->drafts * cpa_mask_words(chunk->drafts);
    }
    sizes->masked_rows = words > 0 ? rows : 0;
    sizes->mask_words = words;
}

void cpa_worker_pad_masks(const cpa_worker *worker, int64_t all_rows, cpa_step_sizes *sizes) {
    sizes->masked_rows = all_rows;
    const cpa_worker_options *o = &worker->options;
    const cpa_attention_shape *shape = &worker->forms.list[o->model.decode_form].shape; /* drafts decode */
    const int32_t packed = worker->device->graphs->padded_rows(shape, o->block_size);   /* rows of a chunk, at most */
    sizes->mask_words = all_rows * cpa_mask_words(packed / (shape->q_heads / shape->kv_heads));
}

/* The rows of a chunk from `row` on; *word is the first that is free. */
static void list_tree(const cpa_step_arrays *to, const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t row,
                      int64_t *word) {
    const int64_t first = cpa_plan_first_draft(chunk), words = cpa_mask_words(chunk->drafts);
    for (int64_t i = 0; i < chunk->drafts; i++, *word += words) {
        uint32_t *bits = to->mask_bits + *word;
        to->mask_row_word[row + i] = *word;
        to->mask_first[row + i] = first;
        to->mask_width[row + i] = (int32_t)chunk->drafts;
        memset(bits, 0, (size_t)words * sizeof *bits);
        for (int64_t at = i; at >= 0; at = cpa_plan_parent(plan, chunk, at)) bits[at / 32] |= 1u << at % 32;
    }
}

void cpa_worker_list_masks(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_worker_rows *rows = worker->rows;
    const cpa_step_arrays *to = &rows->host;
    int64_t row = 0, word = 0;
    if (rows->sizes.masked_rows == 0) return;
    for (int64_t i = 0; i < rows->sizes.masked_rows; i++) {
        to->mask_row_word[i] = -1;
        to->mask_first[i] = to->mask_width[i] = 0;
    }
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        row += chunk->count;
        if (chunk->parents >= 0) list_tree(to, plan, chunk, row - chunk->drafts, &word);
    }
}

int cpa_worker_mask(const cpa_worker *worker, cpa_key_bits *out) {
    const cpa_step_arrays *arrays = &worker->arrays;
    if (worker->rows->sizes.masked_rows == 0) return 0;
    *out = (cpa_key_bits){.bits = arrays->mask_bits,
                          .row_word = arrays->mask_row_word,
                          .first = arrays->mask_first,
                          .width = arrays->mask_width};
    return 1;
}
