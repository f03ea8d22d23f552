#include "bench/rules.h"

#include <stdlib.h>

#include "base/check.h"

const char *const cpa_bench_rules[] = {"none", "softcap", "temperature", "alibi", "sink-logits", "bits", "tree", NULL};

static const float softcap = 30, temperature_len = 1024;

/* The bits of a row: those of the keys up to its own index. */
static void fill_bits(uint32_t *bits, int64_t words, int64_t index) {
    for (int64_t w = 0; w < words; w++) {
        const int64_t left = index + 1 - w * 32;
        bits[w] = left >= 32 ? UINT32_MAX : left <= 0 ? 0 : ((uint32_t)1 << left) - 1;
    }
}

static cpa_status make_bits(const cpa_bench_attend_work *work, int is_tree, cpa_case_score *out, cpa_error *err) {
    out->n_words = 0;
    for (int64_t i = 0; i < work->n_pieces; i++)
        out->n_words +=
            work->pieces[i].count * cpa_mask_words(work->pieces[i].count + (is_tree ? 0 : work->pieces[i].first));
    out->bits = malloc((size_t)out->n_words * sizeof *out->bits);
    out->row_word = calloc((size_t)work->rows, sizeof *out->row_word);
    out->first = calloc((size_t)work->rows, sizeof *out->first);
    out->width = calloc((size_t)work->rows, sizeof *out->width);
    if (!out->bits || !out->row_word || !out->first || !out->width)
        return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for %lld words of a mask",
                        (long long)out->n_words);
    for (int64_t i = 0, word = 0; i < work->n_pieces; i++) {
        const cpa_bench_piece *piece = &work->pieces[i];
        const int64_t before = is_tree ? piece->first : 0, keys = piece->first + piece->count - before;
        const int64_t row_words = cpa_mask_words(keys);
        for (int64_t j = 0; j < piece->count; j++, word += row_words) {
            out->row_word[piece->row + j] = word;
            out->first[piece->row + j] = before;
            out->width[piece->row + j] = (int32_t)keys;
            fill_bits(out->bits + word, row_words, piece->first + j - before);
        }
    }
    return CPA_OK;
}

cpa_status cpa_bench_score_make(cpa_bench_site *site, const cpa_bench_attend_work *work, cpa_bench_score *out,
                                cpa_error *err) {
    const int64_t rule = site->options.rules;
    cpa_case_score *host = &out->host;
    *host = (cpa_case_score){.q_heads = (int32_t)site->options.q_heads, .rows = work->rows};
    if (rule == CPA_BENCH_SOFTCAP) host->softcap = softcap;
    if (rule == CPA_BENCH_TEMPERATURE) host->temperature_len = temperature_len;
    if (rule == CPA_BENCH_ALIBI) CPA_TRY(cpa_case_score_add_slopes(host, err));
    if (rule == CPA_BENCH_SINK_LOGITS) CPA_TRY(cpa_case_score_add_sinks(host, err));
    if (rule == CPA_BENCH_BITS || rule == CPA_BENCH_TREE) CPA_TRY(make_bits(work, rule == CPA_BENCH_TREE, host, err));
    out->checked = *host;
    out->checked.bits = NULL;
    return cpa_case_score_upload(host, site->stream, &out->device, err);
}
