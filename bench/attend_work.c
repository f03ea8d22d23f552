#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "bench/attend.h"
#include "program/trace.h"

/* Prompt lengths made up for this benchmark: the quantiles of (0.5 + 0.618 i) mod 1 of a distribution with a median of
 * 6,909 tokens, a quarter below 2,306 and above 15,368, and one in a hundred above 85,401, between which the logarithm
 * is linear. Those are the figures of the Mooncake conversation trace. */
static const int32_t prompt_lengths[] = {
    6909, 1091,  14698, 3641, 58022, 9218, 1791,  19828, 5409, 912,   12299, 2851,  30882, 7713, 1279,  16458,
    4235, 891,   10291, 2205, 22609, 6292, 991,   13731, 3316, 40138, 8611,  1575,  18466, 4927, 903,   11489,
    2597, 26726, 7205,  1158, 15329, 3858, 75903, 9614,  1939, 20719, 5731,  917,   12827, 3020, 34024, 8044,
    1385, 17198, 4487,  895,  10733, 2365, 24101, 6666,  1051, 14321, 3514,  50403, 8981,  1706, 19296, 5220,
};
enum { N_PROMPTS = sizeof prompt_lengths / sizeof prompt_lengths[0] };

static cpa_status alloc_work(int64_t sequences, int64_t pieces, int64_t steps, cpa_bench_attend_work *out,
                             cpa_error *err) {
    *out = (cpa_bench_attend_work){
        .n_sequences = sequences,
        .lengths = calloc((size_t)sequences, sizeof *out->lengths),
        .pieces = calloc((size_t)pieces, sizeof *out->pieces),
        .steps = calloc((size_t)steps + 1, sizeof *out->steps),
    };
    if (out->lengths && out->pieces && out->steps) return CPA_OK;
    cpa_bench_attend_work_release(out);
    return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for %lld sequences", (long long)sequences);
}

int64_t cpa_bench_shared_tokens(const cpa_bench_options *options, const cpa_bench_attend_work *work, int64_t sequence) {
    const int64_t both = cpa_min64(work->lengths[0], work->lengths[sequence]);
    return sequence == 0 ? 0 : cpa_min64(options->shared, both) / options->block_size * options->block_size;
}

void cpa_bench_attend_work_release(cpa_bench_attend_work *work) {
    free(work->steps);
    free(work->pieces);
    free(work->lengths);
    *work = (cpa_bench_attend_work){0};
}

static void add_piece(cpa_bench_attend_work *work, int64_t sequence, int64_t first, int64_t count) {
    work->pieces[work->n_pieces++] = (cpa_bench_piece){sequence, first, count, work->rows};
    work->rows += count;
}

static void end_step(cpa_bench_attend_work *work) {
    work->steps[++work->n_steps] = work->n_pieces;
}

cpa_status cpa_bench_attend_work_equal(const cpa_bench_options *options, const int64_t *shape,
                                       cpa_bench_attend_work *out, cpa_error *err) {
    int64_t sequences = shape[0], count = shape[1], most = shape[2];
    if (count > most) {
        return cpa_fail(err, CPA_INVALID, "bench attend: %lld new tokens in a context of %lld", (long long)count,
                        (long long)most);
    }
    CPA_TRY(alloc_work(sequences, sequences, 1, out, err));
    for (int64_t i = 0; i < sequences; i++) {
        int64_t length = options->ragged ? cpa_max64(count, most * (i % 8 + 1) / 8) : most;
        out->lengths[i] = length;
        add_piece(out, i, length - count, count);
    }
    end_step(out);
    return CPA_OK;
}

/* The lengths of the first n prompts, to be freed. */
static cpa_status read_lengths(const cpa_bench_options *options, int64_t n, int64_t **out, cpa_error *err) {
    cpa_trace trace = {0};
    int64_t known = N_PROMPTS;
    if (options->trace[0]) {
        CPA_TRY(cpa_trace_open(options->trace, n, options->length_scale, &trace, err));
        known = trace.count;
    }
    int64_t *lengths = n <= known ? malloc((size_t)n * sizeof *lengths) : NULL;
    for (int64_t i = 0; lengths && i < n; i++) {
        lengths[i] = options->trace[0] ? trace.requests[i].prompt_tokens
                                       : (int64_t)fmax(1, floor(prompt_lengths[i] * options->length_scale));
    }
    if (options->trace[0]) cpa_trace_close(&trace);
    if (n > known) {
        return cpa_fail(err, CPA_INVALID, "bench varlen: found %lld requests, expected at most the %lld of %s",
                        (long long)n, (long long)known, options->trace[0] ? options->trace : "the built-in list");
    }
    if (!lengths) return cpa_fail(err, CPA_NO_MEMORY, "bench varlen: no memory for lengths");
    *out = lengths;
    return CPA_OK;
}

/* One sequence with about as many visible pairs as those all together: L^2 = sum of squares. */
static cpa_status make_one(const int64_t *lengths, int64_t n, cpa_bench_attend_work *out, cpa_error *err) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += (double)lengths[i] * (double)lengths[i];
    CPA_TRY(alloc_work(1, 1, 1, out, err));
    out->lengths[0] = (int64_t)(sqrt(squares) + 0.5);
    add_piece(out, 0, 0, out->lengths[0]);
    end_step(out);
    return CPA_OK;
}

static cpa_status make_steps(const int64_t *lengths, int64_t n, int64_t budget, cpa_bench_attend_work *out,
                             cpa_error *err) {
    int64_t tokens = 0, left = budget;
    for (int64_t i = 0; i < n; i++) tokens += lengths[i];
    int64_t steps = (tokens + budget - 1) / budget;
    CPA_TRY(alloc_work(n, n + steps, steps, out, err)); /* a step ends within a prompt at most once */
    memcpy(out->lengths, lengths, (size_t)n * sizeof *lengths);
    for (int64_t i = 0, first = 0; i < n; first = 0, i++) {
        while (first < lengths[i]) {
            int64_t count = cpa_min64(left, lengths[i] - first);
            add_piece(out, i, first, count);
            first += count;
            left -= count;
            if (left > 0) continue;
            end_step(out);
            left = budget;
        }
    }
    if (left < budget) end_step(out);
    return CPA_OK;
}

cpa_status cpa_bench_attend_work_varlen(const cpa_bench_options *options, const int64_t *shape,
                                        cpa_bench_attend_work *out, cpa_error *err) {
    int64_t *lengths = NULL;
    CPA_TRY(read_lengths(options, shape[0], &lengths, err));
    cpa_status status =
        options->as_one ? make_one(lengths, shape[0], out, err) : make_steps(lengths, shape[0], shape[1], out, err);
    free(lengths);
    return status;
}
