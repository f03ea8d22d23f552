#include "src/worker/step_arrays.h"

#include <stddef.h>
#include <string.h>

/* One of the arrays: where its address stands, and bytes of all its entries. */
typedef struct part {
    size_t member;
    int64_t bytes;
} part;

#define DRAWING(type, field, least, most, none)                                                                        \
    {offsetof(cpa_step_arrays, field), sizes->emissions * (int64_t)sizeof(type)},

/* Those with entries of 8 bytes come first, so that all are aligned. */
int64_t cpa_step_arrays_lay_out(const cpa_step_sizes *sizes, void *base, cpa_step_arrays *out) {
    const int64_t tokens = sizes->rows + sizes->history;
    const part parts[] = {
        {offsetof(cpa_step_arrays, positions), sizes->rows * 8},
        {offsetof(cpa_step_arrays, slots), sizes->groups * sizes->rows * 8},
        {offsetof(cpa_step_arrays, salts), sizes->emissions * 8},
        {offsetof(cpa_step_arrays, sums), sizes->emissions * 8},
        {offsetof(cpa_step_arrays, seeds), sizes->emissions * 8},
        {offsetof(cpa_step_arrays, given), sizes->emissions * 8},
        {offsetof(cpa_step_arrays, drawn_at), sizes->emissions * 8},
        {offsetof(cpa_step_arrays, mask_row_word), sizes->masked_rows * 8},
        {offsetof(cpa_step_arrays, mask_first), sizes->masked_rows * 8},
        {offsetof(cpa_step_arrays, selected_index), sizes->selected_rows * 8},
        {offsetof(cpa_step_arrays, rows), sizes->emissions * 4},
        {offsetof(cpa_step_arrays, seqs), sizes->emissions * 4},
        {offsetof(cpa_step_arrays, top_logprobs), sizes->emissions * 4},
        CPA_DRAWING_FIELDS(DRAWING){offsetof(cpa_step_arrays, path_ends), sizes->emissions * 4},
        {offsetof(cpa_step_arrays, form_rows), sizes->forms * sizes->emissions * 4},
        {offsetof(cpa_step_arrays, bias_first), sizes->emissions * 4},
        {offsetof(cpa_step_arrays, bias_count), sizes->emissions * 4},
        {offsetof(cpa_step_arrays, tokens), tokens * 4},
        {offsetof(cpa_step_arrays, sources), tokens * 4},
        {offsetof(cpa_step_arrays, history_seqs), sizes->history * 4},
        {offsetof(cpa_step_arrays, history_outputs), sizes->history * 4},
        {offsetof(cpa_step_arrays, history_parents), sizes->history * 4},
        {offsetof(cpa_step_arrays, restarts), sizes->restarts * 4},
        {offsetof(cpa_step_arrays, mask_width), sizes->masked_rows * 4},
        {offsetof(cpa_step_arrays, mask_bits), sizes->mask_words * 4},
        {offsetof(cpa_step_arrays, bias_tokens), sizes->biases * 4},
        {offsetof(cpa_step_arrays, bias_values), sizes->biases * 4},
        {offsetof(cpa_step_arrays, next_tokens), sizes->next_tokens * 4},
        {offsetof(cpa_step_arrays, next_sources), sizes->next_tokens * 4},
    };
    int64_t at = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const char *place = base ? (char *)base + at : NULL;
        memcpy((char *)out + parts[i].member, &place, sizeof place);
        at += parts[i].bytes;
    }
    return at;
}
