#include "src/check/cases/score.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/hash.h"
#include "kernels/device.h"
#include "src/check/cases/selection.h"

/* Zeros, to be freed. */
static cpa_status make_array(int64_t n, int64_t element, void *out, cpa_error *err) {
    void *memory = calloc((size_t)(n > 0 ? n : 1), (size_t)element);
    if (!memory)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld bytes of score rules", (long long)(n * element));
    memcpy(out, &memory, sizeof memory);
    return CPA_OK;
}

static uint64_t random_at(int64_t i, uint64_t salt) {
    return cpa_mix64((uint64_t)i * 0x9e3779b97f4a7c15u + salt);
}

void cpa_case_score_release(cpa_case_score *score) {
    free(score->slopes);
    free(score->sinks);
    free(score->bits);
    free(score->row_word);
    free(score->first);
    free(score->width);
    free(score->bias);
    free(score->row_map);
    free(score->lists);
    free(score->counts);
    free(score->blocks);
    free(score->block_word);
    *score = (cpa_case_score){0};
}

float cpa_case_slope(int32_t head, int32_t q_heads) {
    return exp2f(-8.0f * (float)(head + 1) / (float)q_heads);
}

cpa_status cpa_case_score_add_slopes(cpa_case_score *score, cpa_error *err) {
    CPA_TRY(make_array(score->q_heads, sizeof(float), &score->slopes, err));
    for (int32_t h = 0; h < score->q_heads; h++) score->slopes[h] = cpa_case_slope(h, score->q_heads);
    return CPA_OK;
}

cpa_status cpa_case_score_add_sinks(cpa_case_score *score, cpa_error *err) {
    CPA_TRY(make_array(score->q_heads, sizeof(float), &score->sinks, err));
    for (int32_t h = 0; h < score->q_heads; h++) score->sinks[h] = -2 + 5.0f * (float)h / (float)score->q_heads;
    score->sinks[score->q_heads - 1] = -INFINITY;
    return CPA_OK;
}

/* Entries of rows lie in another order than the rows. */
static cpa_status add_row_map(cpa_case_score *score, cpa_error *err) {
    if (score->row_map) return CPA_OK;
    CPA_TRY(make_array(score->rows, sizeof(int32_t), &score->row_map, err));
    for (int64_t row = 0; row < score->rows; row++) score->row_map[row] = (int32_t)(score->rows - 1 - row);
    return CPA_OK;
}

cpa_status cpa_case_score_add_bias(cpa_case_score *score, cpa_dtype dtype, int per_head, int64_t first, int64_t width,
                                   cpa_error *err) {
    const int64_t n = score->rows * (per_head ? score->q_heads : 1) * width;
    CPA_TRY(make_array(n, cpa_dtype_bytes(dtype), &score->bias, err));
    score->bias_dtype = dtype;
    score->per_head = per_head;
    score->bias_first = first;
    score->bias_width = width;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t random = random_at(i, 3);
        const float value = random % 16 == 0 ? -INFINITY : (float)(random >> 40) * 0x1p-22f - 2;
        cpa_narrow((char *)score->bias + i * cpa_dtype_bytes(dtype), &value, dtype, 1);
    }
    return add_row_map(score, err);
}

static int64_t entry_of(const cpa_case_score *score, int64_t row) {
    return score->row_map ? score->row_map[row] : row;
}

/* Bit b of entry e is what `sees` says of e and b. */
static void set_bits(cpa_case_score *score, int64_t entry, int64_t row,
                     int (*sees)(const void *ctx, int64_t row, int64_t key), const void *ctx) {
    uint32_t *bits = score->bits + entry * cpa_mask_words(score->width[entry]);
    for (int64_t bit = 0; bit < score->width[entry]; bit++)
        bits[bit / 32] |= (uint32_t)(sees(ctx, row, score->first[entry] + bit) != 0) << (bit % 32);
}

static int sees_at_random(const void *ctx, int64_t row, int64_t key) {
    const cpa_case_score *score = ctx;
    return random_at(row * score->width[0] + key - score->first[0], 5) % 3 != 0;
}

cpa_status cpa_case_score_add_bits(cpa_case_score *score, int64_t first, int32_t width, cpa_error *err) {
    const int64_t words = cpa_mask_words(width);
    score->n_words = score->rows * words;
    CPA_TRY(make_array(score->n_words, sizeof(uint32_t), &score->bits, err));
    CPA_TRY(make_array(score->rows, sizeof(int64_t), &score->row_word, err));
    CPA_TRY(make_array(score->rows, sizeof(int64_t), &score->first, err));
    CPA_TRY(make_array(score->rows, sizeof(int32_t), &score->width, err));
    for (int64_t entry = 0; entry < score->rows; entry++) {
        score->row_word[entry] = entry % 7 == 6 ? -1 : entry * words;
        score->first[entry] = first;
        score->width[entry] = width;
    }
    for (int64_t entry = 0; entry < score->rows; entry++) set_bits(score, entry, entry, sees_at_random, score);
    return add_row_map(score, err);
}

void cpa_case_score_fill_bits(cpa_case_score *score, int (*sees)(const void *ctx, int64_t row, int64_t key),
                              const void *ctx) {
    memset(score->bits, 0, (size_t)score->n_words * sizeof *score->bits);
    for (int64_t row = 0; row < score->rows; row++) {
        const int64_t entry = entry_of(score, row);
        score->row_word[entry] = entry * cpa_mask_words(score->width[entry]);
        set_bits(score, entry, row, sees, ctx);
    }
}

/* A copy on the device of what there is on the host. */
static cpa_status copy_of(const void *from, int64_t bytes, cpa_stream *stream, void *out, cpa_error *err) {
    const cpa_device_table *table = stream->device->table;
    void *memory = NULL;
    if (!from) return CPA_OK;
    CPA_TRY(table->alloc(stream->device, bytes, &memory, err));
    memcpy(out, &memory, sizeof memory);
    const cpa_status status = table->copy(memory, from, bytes, stream);
    return status == CPA_OK ? table->stream_sync(stream) : status;
}

cpa_status cpa_case_score_upload(const cpa_case_score *score, cpa_stream *stream, cpa_case_score_on_device *out,
                                 cpa_error *err) {
    const int64_t rows = score->rows, heads = score->per_head ? score->q_heads : 1, of_heads = score->q_heads * 4;
    *out = (cpa_case_score_on_device){
        .rules = {.softcap = score->softcap, .temperature_len = score->temperature_len},
        .bias = {.dtype = score->bias_dtype,
                 .row_stride = heads * score->bias_width,
                 .head_stride = score->per_head ? score->bias_width : 0,
                 .first = score->bias_first,
                 .width = score->bias_width},
        .indices = {.row_stride = (int64_t)score->kv_heads * score->list_width,
                    .head_stride = score->list_width,
                    .width = score->list_width,
                    .unit = score->unit},
        .blocks = {.head_stride = cpa_mask_words(score->n_blocks), .width = score->n_blocks, .block = score->block},
    };
    CPA_TRY(copy_of(score->slopes, of_heads, stream, &out->rules.alibi_slopes, err));
    CPA_TRY(copy_of(score->sinks, of_heads, stream, &out->rules.sink_logits, err));
    CPA_TRY(copy_of(score->bits, score->n_words * 4, stream, &out->bits.bits, err));
    CPA_TRY(copy_of(score->row_word, rows * 8, stream, &out->bits.row_word, err));
    CPA_TRY(copy_of(score->first, rows * 8, stream, &out->bits.first, err));
    CPA_TRY(copy_of(score->width, rows * 4, stream, &out->bits.width, err));
    CPA_TRY(copy_of(score->row_map, rows * 4, stream, &out->bits.row_map, err));
    out->bias.row_map = out->indices.row_map = out->blocks.row_map = out->bits.row_map;
    CPA_TRY(copy_of(score->lists, rows * score->kv_heads * score->list_width * 4, stream, &out->indices.indices, err));
    CPA_TRY(copy_of(score->counts, rows * 4, stream, &out->indices.counts, err));
    CPA_TRY(copy_of(score->blocks, score->n_block_words * 4, stream, &out->blocks.bits, err));
    CPA_TRY(copy_of(score->block_word, rows * 8, stream, &out->blocks.row_word, err));
    return copy_of(score->bias, rows * out->bias.row_stride * cpa_dtype_bytes(score->bias_dtype), stream,
                   &out->bias.values, err);
}

void cpa_case_score_free(cpa_case_score_on_device *score, cpa_device *device) {
    const void *const used[] = {score->rules.alibi_slopes, score->rules.sink_logits, score->bits.bits,
                                score->bits.row_word,      score->bits.first,        score->bits.width,
                                score->bits.row_map,       score->bias.values,       score->indices.indices,
                                score->indices.counts,     score->blocks.bits,       score->blocks.row_word};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (used[i]) device->table->free(device, (void *)(uintptr_t)used[i]);
    *score = (cpa_case_score_on_device){.rules = {.softcap = 0}};
}

const cpa_key_selection *cpa_case_score_selection(cpa_case_score_on_device *score) {
    const cpa_key_selection selection = {.bits = score->bits.bits ? &score->bits : NULL,
                                         .indices = score->indices.indices ? &score->indices : NULL,
                                         .blocks = score->blocks.bits ? &score->blocks : NULL};
    score->selection = selection;
    return selection.bits || selection.indices || selection.blocks ? &score->selection : NULL;
}

void cpa_case_score_set(cpa_case_score_on_device *score, cpa_attend_args *args) {
    args->rules = &score->rules;
    args->selection = cpa_case_score_selection(score);
    args->bias = score->bias.values ? &score->bias : NULL;
}

cpa_reference_rules cpa_case_score_rules(const cpa_case_score *score, int32_t head, int64_t query) {
    cpa_reference_rules rules = {.index = query};
    if (!score) return rules;
    rules.softcap = (double)score->softcap;
    rules.temperature_len = (double)score->temperature_len;
    if (score->slopes) rules.slope = (double)score->slopes[head];
    if (score->sinks) {
        rules.sink = (double)score->sinks[head];
        rules.has_sink = 1;
    }
    return rules;
}

int cpa_case_score_sees(const cpa_case_score *score, cpa_mask mask, int64_t row, int32_t head, int64_t query,
                        int64_t key) {
    if (score && !cpa_case_score_selects(score, row, head, key)) return 0;
    if (!score || !score->bits) return cpa_reference_sees(mask, query, key);
    const int64_t entry = entry_of(score, row), word = score->row_word[entry], bit = key - score->first[entry];
    if (word < 0 || bit < 0) return cpa_reference_sees(mask, query, key);
    mask.causal = 0;
    return bit < score->width[entry] && cpa_reference_sees(mask, query, key) &&
           (score->bits[word + bit / 32] >> (bit % 32) & 1);
}

float cpa_case_score_bias(const cpa_case_score *score, int64_t row, int32_t head, int64_t key) {
    float value;
    if (!score || !score->bias || key < score->bias_first || key >= score->bias_first + score->bias_width) return 0;
    const int64_t heads = score->per_head ? score->q_heads : 1, entry = entry_of(score, row);
    const int64_t at = (entry * heads + (score->per_head ? head : 0)) * score->bias_width + key - score->bias_first;
    cpa_widen(&value, (const char *)score->bias + at * cpa_dtype_bytes(score->bias_dtype), score->bias_dtype, 1);
    return value;
}
