#include "src/model/logits_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"

static const double TIMES_PLAIN = 3, OF_SPREAD = 1e-3;
enum {
    MOST_TRIES = 6, /* choices of a token that are tried, a forward each */
    MOST_TURNS = 32 /* of one request, that are known */
};

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

/* The entries of one token: of the rows of a tree those with other tokens before them are far off. */
typedef struct token_entries {
    const entry *first;
    int64_t count;
} token_entries;

/* How far the nearest of the entries is from a forward, and its logit that is farthest. */
static double nearest(token_entries token, const float *forward, int64_t vocabulary, double *largest) {
    double error = NAN;
    for (int64_t i = 0; i < token.count; i++) {
        double of_row = 0;
        const double d = distance(token.first[i].logits, forward, vocabulary, &of_row);
        if (i > 0 && !isnan(error) && !(d < error)) continue;
        error = d;
        *largest = of_row;
    }
    return error;
}

static void count_token(const cpa_logits_record *record, double error, double allowed, cpa_logits_verdict *verdict) {
    const int worst =
        !isnan(verdict->worst_error) && !(error * verdict->worst_allowed <= verdict->worst_error * allowed);
    verdict->tokens++;
    verdict->violations += !(error <= allowed);
    if (verdict->tokens > 1 && !worst) return;
    verdict->worst_request = record->request;
    verdict->worst_position = record->position;
    verdict->worst_error = error;
    verdict->worst_allowed = allowed;
}

/* What one request needs. */
typedef struct work {
    uint32_t *tokens;
    int64_t *positions;
    float *reference, *rounded; /* [n, vocabulary]; rounded is NULL in fp32 */
    float *turned;              /* [vocabulary] */
    /* [layers, n, experts] scores by which tokens choose experts, in the two forwards; NULL in fp32. */
    double *biased, *rounded_biased;
    /* The choices that tokens have been found to take; room for one more, that is tried. */
    cpa_turned_choice turns[MOST_TURNS + 1];
    int32_t n_turns;
} work;

static void release(work *w) {
    free(w->tokens);
    free(w->positions);
    free(w->reference);
    free(w->rounded);
    free(w->turned);
    free(w->biased);
    free(w->rounded_biased);
}

static cpa_status allocate(const cpa_plain_question *q, work *w, cpa_error *err) {
    const cpa_model_config *c = q->config;
    const size_t floats = (size_t)q->n_positions * (size_t)c->vocabulary;
    const size_t scores = (size_t)q->n_positions * (size_t)c->layers * (size_t)c->moe.experts;
    const int rounds = q->dtype != CPA_F32, chooses = rounds && scores > 0;
    w->tokens = malloc((size_t)q->count * sizeof *w->tokens);
    w->positions = malloc((size_t)q->n_positions * sizeof *w->positions);
    w->reference = malloc(floats * sizeof *w->reference);
    w->rounded = rounds ? malloc(floats * sizeof *w->rounded) : NULL;
    w->turned = chooses ? malloc((size_t)c->vocabulary * sizeof *w->turned) : NULL;
    w->biased = chooses ? malloc(scores * sizeof *w->biased) : NULL;
    w->rounded_biased = chooses ? malloc(scores * sizeof *w->rounded_biased) : NULL;
    if (w->tokens && w->positions && w->reference && (w->rounded || !rounds) &&
        ((w->turned && w->biased && w->rounded_biased) || !chooses))
        return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "no memory to check the logits of %lld tokens", (long long)q->n_positions);
}

/* By how much rounding moves the scores of a token in a layer, at so many elements of both forwards'. */
static double moved_by(const work *w, int64_t at, int32_t experts) {
    double moved = 0;
    for (int32_t e = 0; e < experts; e++) moved = fmax(moved, fabs(w->biased[at + e] - w->rounded_biased[at + e]));
    return moved;
}

/* The other choices of token i of a question that are near enough, the nearest first; returns how many. */
static int32_t nearest_turns(const cpa_plain_question *q, const work *w, int64_t i, cpa_turned_choice out[MOST_TRIES]) {
    const cpa_moe_config *moe = &q->config->moe;
    double distances[MOST_TRIES];
    int32_t n = 0;
    for (int32_t layer = 0; layer < q->config->layers; layer++) {
        const int64_t at = (layer * q->n_positions + i) * moe->experts;
        for (int turn = CPA_TURN_EXPERT; turn <= CPA_TURN_BOTH && moe->sparse[layer]; turn++) {
            const double distance =
                cpa_plain_turn_distance(moe, w->biased + at, (cpa_plain_turn)turn) / moved_by(w, at, moe->experts);
            int32_t place = n;
            while (place > 0 && distance < distances[place - 1]) place--;
            if (!(distance <= TIMES_PLAIN) || place == MOST_TRIES) continue;
            n = (int32_t)cpa_min64(n + 1, MOST_TRIES);
            for (int32_t k = n - 1; k > place; k--) distances[k] = distances[k - 1], out[k] = out[k - 1];
            distances[place] = distance;
            out[place] = (cpa_turned_choice){(cpa_plain_turn)turn, layer, q->positions[i]};
        }
    }
    return n;
}

/* Whether token i of a question, whose logits are wrong, is right by other choices of experts: those that tokens before
 * it have been found to take, and one of its own at most. *error is then how far it is from that forward. */
static cpa_status try_turns(const cpa_plain_question *q, work *w, int64_t i, token_entries token, double allowed,
                            double *error, int *right, cpa_error *err) {
    cpa_turned_choice own[MOST_TRIES];
    const int32_t n = nearest_turns(q, w, i, own);
    cpa_plain_question turned = *q;
    turned.dtype = CPA_F32;
    turned.count = q->positions[i] + 1;
    turned.positions = &q->positions[i];
    turned.n_positions = 1;
    turned.choices.turned = w->turns;
    for (int32_t k = w->n_turns > 0 ? -1 : 0; k < n && !*right; k++) { /* -1: none of its own */
        double ignored;
        if (k >= 0) w->turns[w->n_turns] = own[k];
        turned.choices.n_turned = w->n_turns + (k >= 0);
        CPA_TRY(cpa_plain_forward(&turned, w->turned, err));
        const double d = nearest(token, w->turned, q->config->vocabulary, &ignored);
        if (!(d <= allowed)) continue;
        *right = 1;
        *error = d;
        if (w->n_turns < MOST_TURNS) w->n_turns = turned.choices.n_turned;
    }
    return CPA_OK;
}

/* Token i of a question whose forwards are there. */
static cpa_status judge(const cpa_plain_question *q, work *w, int64_t i, token_entries token,
                        cpa_logits_verdict *verdict, cpa_error *err) {
    const int64_t vocabulary = q->config->vocabulary;
    const float *reference = w->reference + i * vocabulary;
    double largest = 0, error = nearest(token, reference, vocabulary, &largest);
    const double plain = w->rounded ? distance(w->rounded + i * vocabulary, reference, vocabulary, NULL) : 0;
    const double allowed = TIMES_PLAIN * plain + OF_SPREAD * distance(reference, NULL, vocabulary, NULL);
    int turned = 0;
    if (error > allowed && w->biased) CPA_TRY(try_turns(q, w, i, token, allowed, &error, &turned, err));
    if (largest > verdict->max_error || isnan(largest)) verdict->max_error = largest; /* a NaN stays */
    verdict->turned += turned;
    count_token(&token.first->record, error, allowed, verdict);
    return CPA_OK;
}

/* The logits of a question's tokens in fp32, and rounded where the dtype is another. */
static cpa_status run_forwards(const cpa_plain_question *given, work *w, cpa_error *err) {
    cpa_plain_question q = *given;
    q.choices.biased = w->rounded_biased;
    if (w->rounded) CPA_TRY(cpa_plain_forward(&q, w->rounded, err));
    q.choices.biased = w->biased;
    q.dtype = CPA_F32;
    return cpa_plain_forward(&q, w->reference, err);
}

/* Checks n entries of one request. */
static cpa_status check_request(const cpa_plain_question *with, const entry *entries, int64_t n,
                                const cpa_logits_tokens *tokens, cpa_logits_verdict *verdict, cpa_error *err) {
    const uint64_t request = entries[0].record.request;
    const int64_t known = tokens->count(tokens->ctx, request);
    while (n > 0 && entries[n - 1].record.position + 1 >= known) n--;
    if (n == 0) return CPA_OK;
    work w = {.tokens = NULL};
    cpa_plain_question question = *with;
    question.count = entries[n - 1].record.position + 1;
    question.n_positions = n;
    cpa_status status = allocate(&question, &w, err);
    if (status == CPA_OK) {
        for (int64_t i = 0; i < question.count; i++) w.tokens[i] = tokens->token_at(tokens->ctx, request, i);
        for (int64_t i = 0; i < n; i++) w.positions[i] = entries[i].record.position;
        question.tokens = w.tokens;
        question.positions = w.positions;
        status = run_forwards(&question, &w, err);
    }
    for (int64_t i = 0, end; i < n && status == CPA_OK; i = end) {
        for (end = i + 1; end < n && entries[end].record.position == entries[i].record.position;) end++;
        status = judge(&question, &w, i, (token_entries){entries + i, end - i}, verdict, err);
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
