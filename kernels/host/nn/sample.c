/* sample: the token that kernels/draw.h says. What stays is found by exact selection. */
#include <math.h>

#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/draw.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/log_softmax.h"
#include "kernels/host/nn/nn.h"

/* What is asked of a row; what is out of range has become what changes nothing. */
typedef struct sample_row {
    const float *logits;
    int64_t vocabulary;
    float temperature, top_p, min_p;
    cpa_draw_penalties penalties;
    int32_t top_k;
    /* Tokens in the prompt, and in the output, of the row's sequence, a bit each; NULL: none. */
    const uint32_t *in_prompt, *in_output;
    const uint32_t *output_counts; /* NULL: 1 for all in_output */
    const cpa_sample_args *paths;
    int32_t path_end;            /* end of the path; -1: none */
    const uint32_t *mask;        /* NULL: any token */
    const uint32_t *bias_tokens; /* [biases] */
    const float *bias_values;
    int32_t biases;
    float largest; /* largest logit after bias, penalties and mask */
} sample_row;

static float number_of(const float *numbers, int64_t row, float least, float most) {
    const float number = numbers ? numbers[row] : 0;
    return number > least && number < most ? number : 0;
}

static sample_row row_of(const cpa_sample_args *a, int64_t row) {
    const int64_t words = (a->vocabulary + 31) / 32, sequence = a->sequence ? a->sequence[row] : -1;
    const int64_t mask = a->mask_index ? a->mask_index[row] : -1;
    const int64_t first = a->bias_count ? a->bias_first[row] : 0, biases = a->bias_count ? a->bias_count[row] : 0;
    const int known = sequence >= 0 && sequence < a->sequences;
    const int biased = first >= 0 && biases > 0 && first + biases <= a->bias_entries;
    return (sample_row){
        .logits = a->logits + row * a->logits_stride,
        .vocabulary = a->vocabulary,
        .temperature = number_of(a->temperature, row, 0, INFINITY),
        .top_p = number_of(a->top_p, row, 0, 1),
        .min_p = number_of(a->min_p, row, 0, CPA_DRAW_ABOVE_ONE),
        .penalties = {.repetition = number_of(a->repetition, row, 0, INFINITY),
                      .presence = number_of(a->presence, row, -INFINITY, INFINITY),
                      .frequency = number_of(a->frequency, row, -INFINITY, INFINITY)},
        .top_k = a->top_k && a->top_k[row] > 0 ? a->top_k[row] : 0,
        .in_prompt = known && a->in_prompt ? a->in_prompt + sequence * words : NULL,
        .in_output = known && a->in_output ? a->in_output + sequence * words : NULL,
        .output_counts = known && a->output_counts ? a->output_counts + sequence * a->vocabulary : NULL,
        .paths = a,
        .path_end = a->path_ends ? a->path_ends[row] : -1,
        .mask = mask >= 0 && mask < a->n_masks ? a->masks + mask * words : NULL,
        .bias_tokens = biased ? a->bias_tokens + first : NULL,
        .bias_values = biased ? a->bias_values + first : NULL,
        .biases = biased ? (int32_t)biases : 0,
    };
}

static int has_bit(const uint32_t *bits, int64_t token) {
    return bits && bits[token / 32] >> token % 32 & 1;
}

static uint32_t times_in_output(const sample_row *row, int64_t token) {
    uint32_t times = 0;
    if (has_bit(row->in_output, token)) times = row->output_counts ? row->output_counts[token] : 1;
    if (row->path_end < 0) return times;
    return times + cpa_draw_times_on_path(row->paths->path_tokens, row->paths->path_parents, row->paths->path_entries,
                                          row->path_end, token);
}

static float logit_of(const sample_row *row, int64_t token) {
    float l = row->logits[token];
    if (row->mask && !has_bit(row->mask, token)) return cpa_draw_leave_out(l);
    if (row->biases > 0) l = cpa_draw_add_bias(l, row->bias_tokens, row->bias_values, row->biases, token);
    return cpa_draw_penalise(l, has_bit(row->in_prompt, token), times_in_output(row, token), row->penalties);
}

static float z_of(const sample_row *row, int64_t token) {
    return (logit_of(row, token) - row->largest) / row->temperature;
}

/* The largest logit that there is then; NaN where one is NaN. */
static float largest_of(const sample_row *row) {
    float largest = -INFINITY;
    for (int64_t t = 0; t < row->vocabulary; t++) {
        const float l = logit_of(row, t);
        if (l != l) return l;
        largest = l > largest ? l : largest;
    }
    return largest;
}

static uint32_t first_of_the_largest(const sample_row *row) {
    int64_t token = 0;
    while (logit_of(row, token) != row->largest) token++;
    return (uint32_t)token;
}

/* The order up to which the tokens, those up to order `last` alone, are top_k, or have top_p of the weight `total`
 * where that is not 0: a radix select, eight bits at a time. All stay where they are not enough. */
static uint32_t last_that_stays(const sample_row *row, uint32_t last, uint64_t total) {
    enum { BITS = 8, BUCKETS = 1 << BITS };
    uint64_t found = 0;
    uint32_t prefix = 0;
    for (int shift = 32 - BITS; shift >= 0; shift -= BITS) {
        uint64_t sums[BUCKETS] = {0};
        for (int64_t t = 0; t < row->vocabulary; t++) {
            const float z = z_of(row, t);
            const uint32_t order = cpa_draw_order(z);
            if (order > last || (uint64_t)(order ^ prefix) >> (shift + BITS)) continue;
            sums[order >> shift & (BUCKETS - 1)] += total ? cpa_draw_weight(z) : 1;
        }
        uint32_t bucket = 0;
        for (; bucket < BUCKETS - 1; bucket++) {
            const uint64_t sum = found + sums[bucket];
            if (total ? cpa_draw_reaches(sum, total, row->top_p) : sum >= (uint64_t)row->top_k) break;
            found = sum;
        }
        prefix |= bucket << shift;
    }
    return prefix;
}

static uint64_t weight_up_to(const sample_row *row, uint32_t last) {
    uint64_t total = 0;
    for (int64_t t = 0; t < row->vocabulary; t++) {
        const float z = z_of(row, t);
        if (cpa_draw_order(z) <= last) total += cpa_draw_weight(z);
    }
    return total;
}

static uint32_t draw(const sample_row *row, uint64_t key) {
    uint32_t last = UINT32_MAX, token = 0;
    double best = -INFINITY;
    if (row->top_k > 0 && row->top_k < row->vocabulary) last = last_that_stays(row, last, 0);
    if (row->top_p > 0) last = (uint32_t)cpa_min64(last, last_that_stays(row, last, weight_up_to(row, last)));
    for (int64_t t = 0; t < row->vocabulary; t++) {
        const float z = z_of(row, t);
        if (cpa_draw_order(z) > last || (double)z + CPA_DRAW_MOST_GUMBEL < best) continue;
        if (row->min_p > 0 && cpa_draw_exp((double)z) < (double)row->min_p) continue;
        const double score = (double)z + cpa_draw_gumbel(key, t);
        if (score > best) best = score, token = (uint32_t)t;
    }
    return token;
}

static uint32_t sample_one(const cpa_sample_args *a, int64_t index) {
    if (a->given && a->given[index] >= 0) return (uint32_t)a->given[index];
    sample_row row = row_of(a, index);
    row.largest = largest_of(&row);
    if (!isfinite(row.largest)) return CPA_NO_TOKEN;
    if (row.temperature == 0) return first_of_the_largest(&row);
    return draw(&row, cpa_draw_key(a->seed ? a->seed[index] : 0, a->position ? a->position[index] : 0));
}

/* log(softmax) of the logits at the token. */
static float logprob_of(const float *logits, int64_t vocabulary, uint32_t token) {
    if (token >= vocabulary) return NAN;
    return (float)((double)logits[token] - cpa_host_log_sum(logits, vocabulary));
}

static void sample_item(void *ctx, int64_t index, int32_t thread) {
    const cpa_sample_args *a = ctx;
    const uint32_t token = sample_one(a, index);
    (void)thread;
    a->tokens[index * a->tokens_stride] = token;
    if (a->logprobs)
        a->logprobs[index * a->logprobs_stride] =
            logprob_of(a->logits + index * a->logits_stride, a->vocabulary, token);
}

cpa_status cpa_host_sample(const cpa_sample_args *args, cpa_stream *stream) {
    cpa_sample_args copy = *args;
    cpa_host_run(stream, args->rows, sample_item, &copy);
    return CPA_OK;
}
