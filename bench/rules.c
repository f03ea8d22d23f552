#include "bench/rules.h"

#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "bench/memory.h"

const char *const cpa_bench_rules[] = {"none", "softcap", "temperature", "alibi", "sink-logits", "bits", "tree", NULL};

static const float softcap = 30, temperature_len = 1024;

static float slope_of(const cpa_bench_options *o, int64_t head) {
    return exp2f(-8.0f * (float)(head + 1) / (float)o->q_heads);
}

static float sink_of(int64_t head) {
    return (float)(head % 5) - 1;
}

double cpa_bench_ruled(const cpa_bench_options *o, int64_t head, int64_t p, int64_t t, double score) {
    switch (o->rules) {
        case CPA_BENCH_SOFTCAP: return (double)softcap * tanh(score / (double)softcap);
        case CPA_BENCH_TEMPERATURE:
            return (double)p > (double)temperature_len ? score * log2((double)p) / log2((double)temperature_len)
                                                       : score;
        case CPA_BENCH_ALIBI: return score + (double)slope_of(o, head) * (double)(t - p);
        default: return score;
    }
}

double cpa_bench_kept(const cpa_bench_options *o, int64_t head, double lse) {
    return o->rules == CPA_BENCH_SINK_LOGITS ? 1 / (1 + exp((double)sink_of(head) - lse)) : 1;
}

/* Copies n bytes to the device. */
static cpa_status upload(cpa_bench_site *site, const void *from, int64_t bytes, const void **out, cpa_error *err) {
    void *memory = NULL;
    CPA_TRY(cpa_device_alloc(site->device, bytes, &memory, err));
    *out = memory;
    return cpa_bench_copy(site, memory, from, bytes, err);
}

static cpa_status make_heads(cpa_bench_site *site, const float **out, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    float *of_heads = calloc((size_t)o->q_heads, sizeof *of_heads);
    const void *memory = NULL;
    if (!of_heads) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for %lld heads", (long long)o->q_heads);
    for (int64_t h = 0; h < o->q_heads; h++) of_heads[h] = o->rules == CPA_BENCH_ALIBI ? slope_of(o, h) : sink_of(h);
    cpa_status status = upload(site, of_heads, o->q_heads * (int64_t)sizeof *of_heads, &memory, err);
    *out = memory;
    free(of_heads);
    return status;
}

/* The bits of a row: those of the keys up to its own index. */
static void fill_bits(uint32_t *bits, int64_t words, int64_t index) {
    for (int64_t w = 0; w < words; w++) {
        const int64_t left = index + 1 - w * 32;
        bits[w] = left >= 32 ? UINT32_MAX : left <= 0 ? 0 : ((uint32_t)1 << left) - 1;
    }
}

static cpa_status make_bits(cpa_bench_site *site, const cpa_bench_attend_work *work, cpa_custom_mask *out,
                            cpa_error *err) {
    const int is_tree = site->options.rules == CPA_BENCH_TREE;
    int64_t words = 0;
    for (int64_t i = 0; i < work->n_pieces; i++)
        words += work->pieces[i].count * cpa_mask_words(work->pieces[i].count + (is_tree ? 0 : work->pieces[i].first));
    uint32_t *bits = malloc((size_t)words * sizeof *bits);
    int64_t *row_word = calloc((size_t)work->rows, sizeof *row_word),
            *first = calloc((size_t)work->rows, sizeof *first);
    int32_t *width = calloc((size_t)work->rows, sizeof *width);
    cpa_status status =
        bits && row_word && first && width
            ? CPA_OK
            : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for %lld words of a mask", (long long)words);
    for (int64_t i = 0, word = 0; status == CPA_OK && i < work->n_pieces; i++) {
        const cpa_bench_piece *piece = &work->pieces[i];
        const int64_t before = is_tree ? piece->first : 0, keys = piece->first + piece->count - before;
        const int64_t row_words = cpa_mask_words(keys);
        for (int64_t j = 0; j < piece->count; j++, word += row_words) {
            row_word[piece->row + j] = word;
            first[piece->row + j] = before;
            width[piece->row + j] = (int32_t)keys;
            fill_bits(bits + word, row_words, piece->first + j - before);
        }
    }
    const void *memory[4] = {NULL};
    if (status == CPA_OK) status = upload(site, bits, words * (int64_t)sizeof *bits, &memory[0], err);
    if (status == CPA_OK) status = upload(site, row_word, work->rows * (int64_t)sizeof *row_word, &memory[1], err);
    if (status == CPA_OK) status = upload(site, first, work->rows * (int64_t)sizeof *first, &memory[2], err);
    if (status == CPA_OK) status = upload(site, width, work->rows * (int64_t)sizeof *width, &memory[3], err);
    *out = (cpa_custom_mask){.bits = memory[0], .row_word = memory[1], .first = memory[2], .width = memory[3]};
    free(width);
    free(first);
    free(row_word);
    free(bits);
    return status;
}

cpa_status cpa_bench_score_make(cpa_bench_site *site, const cpa_bench_attend_work *work, cpa_bench_score *out,
                                cpa_error *err) {
    const int64_t rule = site->options.rules;
    const int is_mask = rule == CPA_BENCH_BITS || rule == CPA_BENCH_TREE;
    *out = (cpa_bench_score){.has_rules = rule != CPA_BENCH_NO_RULE && !is_mask, .has_custom = is_mask};
    if (rule == CPA_BENCH_SOFTCAP) out->rules.softcap = softcap;
    if (rule == CPA_BENCH_TEMPERATURE) out->rules.temperature_len = temperature_len;
    if (rule == CPA_BENCH_ALIBI) return make_heads(site, &out->rules.alibi_slopes, err);
    if (rule == CPA_BENCH_SINK_LOGITS) return make_heads(site, &out->rules.sink_logits, err);
    return out->has_custom ? make_bits(site, work, &out->custom, err) : CPA_OK;
}

void cpa_bench_score_release(const cpa_bench_site *site, cpa_bench_score *score) {
    const void *const used[] = {score->rules.alibi_slopes, score->rules.sink_logits, score->custom.bits,
                                score->custom.row_word,    score->custom.first,      score->custom.width};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_device_free(site->device, (void *)(uintptr_t)used[i]);
}
