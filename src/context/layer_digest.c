#include "src/context/layer_digest.h"

#include <string.h>

#include "base/hash.h"
#include "base/min_max.h"

/* So many values of a bias, or words of a mask, take some 40 us. */
enum { MOST_SAMPLES = 4096 };

static uint64_t add_word(uint64_t digest, uint64_t word) {
    return cpa_mix64((digest ^ word) + CPA_GOLDEN);
}

/* How far samples of n values lie apart. */
static int64_t apart(double n) {
    return n <= MOST_SAMPLES ? 1 : (int64_t)(n / MOST_SAMPLES) + 1;
}

static uint64_t add_floats(uint64_t digest, const float *values, int32_t n) {
    return values ? cpa_hash_bytes(digest, values, (size_t)n * sizeof *values) : digest;
}

/* The rows of a step, and the end of its keys. */
typedef struct step_size {
    int64_t rows, keys;
} step_size;

static step_size size_of(const cpa_planned_step *step) {
    step_size size = {0, cpa_planned_end(step)};
    for (int64_t i = 0; i < step->n_chunks; i++) size.rows += step->chunks[i].end - step->chunks[i].start;
    return size;
}

/* The values of a bias of all rows and heads that have their own, wherever they lie. */
static uint64_t add_bias(uint64_t digest, const cpa_score_bias *bias, step_size size, int32_t heads) {
    const int64_t rows = bias->row_stride ? size.rows : 1, of_heads = bias->head_stride ? heads : 1;
    const int64_t keys = cpa_max64(cpa_min64(bias->width, size.keys - bias->first), 0);
    const int64_t bytes = cpa_dtype_bytes(bias->dtype), step = apart((double)rows * (double)of_heads * (double)keys);
    int64_t at = 0; /* index of the next sample, from a row and head's first value on */
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < of_heads; head++, at -= keys) {
            for (; at < keys; at += step) {
                const int64_t index = row * bias->row_stride + head * bias->head_stride + at;
                uint64_t word = 0;
                memcpy(&word, (const char *)bias->values + index * bytes, (size_t)bytes);
                digest = add_word(digest, word);
            }
        }
    }
    return digest;
}

/* Which keys the rows see by their bits, wherever these lie. What is behind the last bit of a row means nothing. */
static uint64_t add_bits(uint64_t digest, const cpa_key_bits *of, int64_t rows) {
    int64_t words = 0, at = 0; /* index of the next sample, from a row's first word on */
    for (int64_t row = 0; row < rows; row++) words += of->row_word[row] < 0 ? 0 : cpa_mask_words(of->width[row]);
    const int64_t step = apart((double)words);
    for (int64_t row = 0; row < rows; row++) {
        const int has_bits = of->row_word[row] >= 0;
        const int64_t width = has_bits ? of->width[row] : -1, n = has_bits ? cpa_mask_words(width) : 0;
        digest = add_word(digest, (uint64_t)width);
        if (has_bits) digest = add_word(digest, (uint64_t)of->first[row]);
        for (; at < n; at += step) {
            const int64_t left = width - at * 32;
            const uint32_t used = left >= 32 ? UINT32_MAX : ((uint32_t)1 << left) - 1;
            digest = add_word(digest, of->bits[of->row_word[row] + at] & used);
        }
        at -= n;
    }
    return digest;
}

/* The lists of the rows and KV heads that have their own, but those that the context itself has chosen. What is behind
 * the count of a row means nothing. */
static uint64_t add_lists(uint64_t digest, const cpa_context_ops *ops, const cpa_key_indices *of, int64_t rows) {
    const int32_t kv_heads = ops->options.shape.kv_heads;
    const int32_t of_heads = of->head_stride ? kv_heads : 1;
    const int64_t step = apart((double)rows * (double)of_heads * (double)of->width);
    int64_t at = 0; /* index of the next sample, from a list's first entry on */
    const int64_t same[] = {of->unit, of->width};
    digest = cpa_hash_bytes(digest, same, sizeof same);
    if (of->indices == ops->chosen_lists) return digest;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t n = of->counts ? of->counts[row] : of->width;
        digest = add_word(digest, (uint64_t)n);
        for (int32_t head = 0; head < of_heads; head++, at -= of->width)
            for (; at < of->width; at += step)
                if (at < n)
                    digest =
                        add_word(digest, (uint64_t)of->indices[row * of->row_stride + head * of->head_stride + at]);
    }
    return digest;
}

/* The words of the blocks of the rows and query heads that have their own. */
static uint64_t add_blocks(uint64_t digest, const cpa_key_blocks *of, int64_t rows, int32_t heads) {
    const int32_t of_heads = of->head_stride ? heads : 1;
    const int64_t words = of->width / 32, step = apart((double)rows * (double)of_heads * (double)words);
    int64_t at = 0; /* index of the next sample, from a line's first word on; the last, of fewer bits, is left out */
    const int64_t same[] = {of->block, of->width};
    digest = cpa_hash_bytes(digest, same, sizeof same);
    for (int64_t row = 0; row < rows; row++) {
        digest = add_word(digest, of->row_word[row] < 0);
        for (int32_t head = 0; head < of_heads; head++, at -= words)
            for (; at < words; at += step)
                if (of->row_word[row] >= 0)
                    digest = add_word(digest, of->bits[of->row_word[row] + head * of->head_stride + at]);
    }
    return digest;
}

static uint64_t add_selection(uint64_t digest, const cpa_context_ops *ops, const cpa_key_selection *selection,
                              int64_t rows) {
    const int64_t kinds[] = {selection->bits != NULL, selection->indices != NULL, selection->blocks != NULL};
    digest = cpa_hash_bytes(digest, kinds, sizeof kinds);
    if (selection->bits) digest = add_bits(digest, selection->bits, rows);
    if (selection->indices) digest = add_lists(digest, ops, selection->indices, rows);
    return selection->blocks ? add_blocks(digest, selection->blocks, rows, ops->options.shape.q_heads) : digest;
}

uint64_t cpa_layer_digest(uint64_t digest, const cpa_context_ops *ops, const cpa_planned_step *step,
                          const cpa_layer *layer) {
    const cpa_score_rules none = {.softcap = 0}, *rules = layer->rules ? layer->rules : &none;
    const cpa_score_bias no_bias = {.width = 0}, *bias = layer->bias ? layer->bias : &no_bias;
    const int32_t heads = ops->options.shape.q_heads;
    const step_size size = size_of(step);
    for (int32_t f = 0; f < ops->forms.count; f++) {
        const cpa_form_rows *rows = &layer->forms[f].rows;
        const int64_t mask[] = {rows->mask.causal, rows->mask.sinks, rows->mask.window};
        digest = cpa_hash_bytes(digest, mask, sizeof mask);
        digest = cpa_hash_bytes(digest, &rows->scale, sizeof rows->scale);
    }
    const int64_t same[] = {rules->alibi_slopes != NULL,
                            rules->sink_logits != NULL,
                            layer->selection != NULL,
                            layer->bias != NULL,
                            (int64_t)bias->dtype,
                            bias->first,
                            bias->width};
    const float numbers[] = {rules->softcap, rules->temperature_len};
    digest = cpa_hash_bytes(digest, same, sizeof same);
    digest = cpa_hash_bytes(digest, numbers, sizeof numbers);
    if (ops->device->caps.own_memory) return digest;
    digest = add_floats(digest, rules->alibi_slopes, heads);
    digest = add_floats(digest, rules->sink_logits, heads);
    if (layer->selection) digest = add_selection(digest, ops, layer->selection, size.rows);
    return bias->width > 0 ? add_bias(digest, bias, size, heads) : digest;
}
