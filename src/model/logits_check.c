#include "src/model/logits_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"

static const double TIMES_PLAIN = 3, OF_SPREAD = 1e-3;

/* A record, with the place of its logits. */
typedef struct entry {
    cpa_logits_record record;
    const float *logits;
} entry;

static int by_request_and_position(const void *a, const void *b) {
    const cpa_logits_record *left = &((const entry *)a)->record, *right = &((const entry *)b)->record;
    if (left->request != right->request) return left->request < right->request ? -1 : 1;
    return (left->position > right->position) - (left->position < right->position);
}

/* Root mean square of a - b, or of a's deviation from its mean where b is NULL; NaN where a value is none. */
static double distance(const float *a, const float *b, int64_t n, double *largest) {
    double mean = 0, sum = 0;
    for (int64_t i = 0; !b && i < n; i++) mean += a[i] / (double)n;
    for (int64_t i = 0; i < n; i++) {
        const double d = fabs(a[i] - (b ? (double)b[i] : mean));
        sum += d * d;
        if (largest && (d > *largest || isnan(d))) *largest = d; /* a NaN stays */
    }
    return sqrt(sum / (double)n);
}

/* The n entries of one token: of the rows of a tree those with other tokens before them are far off. */
static void judge(const entry *e, int64_t n, const float *reference, const float *rounded, int64_t vocabulary,
                  cpa_logits_verdict *verdict) {
    double error = NAN, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        double of_row = 0;
        const double d = distance(e[i].logits, reference, vocabulary, &of_row);
        if (i > 0 && !isnan(error) && !(d < error)) continue;
        error = d;
        largest = of_row;
    }
    if (largest > verdict->max_error || isnan(largest)) verdict->max_error = largest; /* a NaN stays */
    const double plain = rounded ? distance(rounded, reference, vocabulary, NULL) : 0;
    const double allowed = TIMES_PLAIN * plain + OF_SPREAD * distance(reference, NULL, vocabulary, NULL);
    const int worst =
        !isnan(verdict->worst_error) && !(error * verdict->worst_allowed <= verdict->worst_error * allowed);
    verdict->tokens++;
    verdict->violations += !(error <= allowed);
    if (verdict->tokens > 1 && !worst) return;
    verdict->worst_request = e->record.request;
    verdict->worst_position = e->record.position;
    verdict->worst_error = error;
    verdict->worst_allowed = allowed;
}

/* What one request needs. */
typedef struct work {
    uint32_t *tokens;
    int64_t *positions;
    float *reference, *rounded; /* [n, vocabulary]; rounded is NULL in fp32 */
} work;

static void release(work *w) {
    free(w->tokens);
    free(w->positions);
    free(w->reference);
    free(w->rounded);
}

static cpa_status allocate(int64_t tokens, int64_t n, int64_t vocabulary, cpa_dtype dtype, work *w, cpa_error *err) {
    const size_t floats = (size_t)(n * vocabulary);
    w->tokens = malloc((size_t)tokens * sizeof *w->tokens);
    w->positions = malloc((size_t)n * sizeof *w->positions);
    w->reference = malloc(floats * sizeof *w->reference);
    w->rounded = dtype == CPA_F32 ? NULL : malloc(floats * sizeof *w->rounded);
    if (w->tokens && w->positions && w->reference && (w->rounded || dtype == CPA_F32)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "no memory to check the logits of %lld tokens", (long long)n);
}

/* Checks n entries of one request. */
static cpa_status check_request(const cpa_plain_question *with, const entry *entries, int64_t n,
                                const cpa_logits_tokens *tokens, cpa_logits_verdict *verdict, cpa_error *err) {
    const uint64_t request = entries[0].record.request;
    const int64_t known = tokens->count(tokens->ctx, request), vocabulary = with->config->vocabulary;
    while (n > 0 && entries[n - 1].record.position + 1 >= known) n--;
    if (n == 0) return CPA_OK;
    work w = {NULL, NULL, NULL, NULL};
    cpa_plain_question question = *with;
    question.count = entries[n - 1].record.position + 1;
    question.n_positions = n;
    cpa_status status = allocate(question.count, n, vocabulary, with->dtype, &w, err);
    if (status == CPA_OK) {
        for (int64_t i = 0; i < question.count; i++) w.tokens[i] = tokens->token_at(tokens->ctx, request, i);
        for (int64_t i = 0; i < n; i++) w.positions[i] = entries[i].record.position;
        question.tokens = w.tokens;
        question.positions = w.positions;
        if (w.rounded) status = cpa_plain_forward(&question, w.rounded, err);
        question.dtype = CPA_F32;
        if (status == CPA_OK) status = cpa_plain_forward(&question, w.reference, err);
    }
    for (int64_t i = 0, end; i < n && status == CPA_OK; i = end) {
        for (end = i + 1; end < n && entries[end].record.position == entries[i].record.position;) end++;
        judge(&entries[i], end - i, w.reference + i * vocabulary, w.rounded ? w.rounded + i * vocabulary : NULL,
              vocabulary, verdict);
    }
    release(&w);
    return status;
}

cpa_status cpa_logits_check(const cpa_model_config *config, const cpa_safetensors *files, cpa_dtype dtype,
                            const cpa_logits_sample *sample, const cpa_logits_tokens *tokens, cpa_logits_verdict *out,
                            cpa_error *err) {
    const cpa_plain_question with = {.config = config, .files = files, .dtype = dtype};
    cpa_logits_verdict verdict = {.tokens = 0};
    entry *entries = calloc((size_t)cpa_max64(sample->count, 1), sizeof *entries);
    if (!entries) return cpa_fail(err, CPA_NO_MEMORY, "no memory to check logits");
    for (int64_t i = 0; i < sample->count; i++)
        entries[i] = (entry){sample->records[i], sample->logits + i * sample->vocabulary};
    qsort(entries, (size_t)sample->count, sizeof *entries, by_request_and_position);
    cpa_status status = CPA_OK;
    for (int64_t first = 0, last = 0; first < sample->count && status == CPA_OK; first = last) {
        while (last < sample->count && entries[last].record.request == entries[first].record.request) last++;
        status = check_request(&with, entries + first, last - first, tokens, &verdict, err);
    }
    free(entries);
    if (status == CPA_OK) *out = verdict;
    return status;
}
