#include "bench/rules.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "bench/noise.h"

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

enum { BLOCK = 128 };

/* Blocks of keys that all rows and heads have in common, as prompts mostly do, and each row's own. */
static int selects_block(int64_t percent, int64_t block, int64_t own) {
    if (block == 0 || block == own) return 1;
    return block < own && (int64_t)(cpa_bench_hash((uint64_t)block) % 100) < percent;
}

static cpa_status make_blocks(const cpa_bench_attend_work *work, int64_t percent, cpa_bench_score *score,
                              cpa_error *err) {
    cpa_case_score *out = &score->host;
    double selected = 0, all = 0;
    int64_t keys = 0, line = 0;
    for (int64_t i = 0; i < work->n_pieces; i++) keys = cpa_max64(keys, work->pieces[i].first + work->pieces[i].count);
    const int64_t width = (keys + BLOCK - 1) / BLOCK, words = cpa_mask_words(width);
    const int64_t most_lines = work->rows / BLOCK + 2 * work->n_pieces;
    out->block = BLOCK;
    out->n_blocks = (int32_t)width;
    out->n_block_words = most_lines * out->q_heads * words;
    out->blocks = calloc((size_t)out->n_block_words, sizeof *out->blocks);
    out->block_word = malloc((size_t)work->rows * sizeof *out->block_word);
    if (!out->blocks || !out->block_word)
        return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for %lld words of blocks",
                        (long long)out->n_block_words);
    for (int64_t i = 0; i < work->n_pieces; i++, line++)
        for (int64_t j = 0; j < work->pieces[i].count; j++) {
            const int64_t index = work->pieces[i].first + j, own = index / BLOCK;
            if (j > 0 && index % BLOCK == 0) line++;
            out->block_word[work->pieces[i].row + j] = line * out->q_heads * words;
            for (int64_t block = 0; block <= own; block++) {
                if (!selects_block(percent, block, own)) continue;
                selected += (double)(block < own ? BLOCK : index % BLOCK + 1);
                for (int64_t head = 0; head < out->q_heads; head++)
                    out->blocks[(line * out->q_heads + head) * words + block / 32] |= 1u << block % 32;
            }
            all += (double)(index + 1);
        }
    score->selected = selected / all;
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
    out->selected = 1;
    if (site->options.density > 0) CPA_TRY(make_blocks(work, site->options.density, out, err));
    out->checked = *host;
    out->checked.bits = NULL;
    return cpa_case_score_upload(host, site->stream, &out->device, err);
}
