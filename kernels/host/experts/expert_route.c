/* expert_route: a token is an item of work. */
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/route.h"

/* What a token's experts are compared by. */
typedef struct token_scores {
    float score[CPA_MOST_EXPERTS];
    float biased[CPA_MOST_EXPERTS]; /* score + bias, or the score where there is none */
    float key[CPA_MOST_EXPERTS];    /* orders experts; -infinity: takes no part */
} token_scores;

static void softmax(float *score, const float *logits, int32_t n) {
    double sums[CPA_ROUTE_SUMS] = {0};
    float largest = logits[0];
    for (int32_t e = 1; e < n; e++) largest = logits[e] > largest ? logits[e] : largest;
    for (int32_t e = 0; e < n; e++) sums[e % CPA_ROUTE_SUMS] += cpa_route_exp(logits[e], largest);
    for (int half = CPA_ROUTE_SUMS / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    }
    for (int32_t e = 0; e < n; e++) score[e] = (float)(cpa_route_exp(logits[e], largest) / sums[0]);
}

/* 0 if a number is wild. */
static int score_experts(const cpa_expert_route_args *a, const float *logits, token_scores *t) {
    for (int32_t e = 0; e < a->experts; e++) {
        if (cpa_route_is_wild(logits[e])) return 0;
    }
    if (a->scores == CPA_SCORES_SOFTMAX) softmax(t->score, logits, a->experts);
    for (int32_t e = 0; e < a->experts; e++) {
        if (a->scores == CPA_SCORES_SIGMOID) t->score[e] = cpa_route_sigmoid(logits[e]);
        t->biased[e] = a->bias ? t->score[e] + a->bias[e] : t->score[e];
        t->key[e] = a->bias ? t->biased[e] : logits[e];
        if (cpa_route_is_wild(t->biased[e])) return 0;
    }
    return 1;
}

static int32_t first_of(const float *keys, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) best = cpa_route_is_before(keys[i], i, keys[best], best) ? i : best;
    return best;
}

static float group_score(const cpa_expert_route_args *a, const token_scores *t, int32_t first, int32_t n) {
    float best = -(float)INFINITY, second = -(float)INFINITY;
    if (a->group_scores == CPA_GROUP_BEST || n == 1) return t->key[first + first_of(t->key + first, n)];
    for (int32_t e = first; e < first + n; e++) {
        const float x = t->biased[e];
        second = x > best ? best : x > second ? x : second;
        best = x > best ? x : best;
    }
    return best + second;
}

/* Takes the experts of all groups out but for those of the best ones. */
static void limit_groups(const cpa_expert_route_args *a, token_scores *t) {
    const int32_t of_group = a->experts / a->n_group;
    float groups[CPA_MOST_EXPERTS];
    int takes_part[CPA_MOST_EXPERTS] = {0};
    for (int32_t g = 0; g < a->n_group; g++) groups[g] = group_score(a, t, g * of_group, of_group);
    for (int32_t i = 0; i < a->topk_group; i++) {
        const int32_t g = first_of(groups, a->n_group);
        takes_part[g] = 1;
        groups[g] = -(float)INFINITY;
    }
    for (int32_t e = 0; e < a->experts; e++) {
        if (!takes_part[e / of_group]) t->key[e] = -(float)INFINITY;
    }
}

static void route_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_expert_route_args *a = ctx;
    int32_t *ids = a->ids + row * a->top_k;
    float *weights = a->weights + row * a->top_k, sum = 0;
    token_scores t;
    (void)thread;
    if (!score_experts(a, a->logits + row * a->logits_stride, &t)) {
        for (int32_t k = 0; k < a->top_k; k++) ids[k] = k, weights[k] = NAN;
        return;
    }
    if (a->topk_group < a->n_group) limit_groups(a, &t);
    for (int32_t k = 0; k < a->top_k; k++) {
        ids[k] = first_of(t.key, a->experts);
        t.key[ids[k]] = -(float)INFINITY;
        sum += t.score[ids[k]];
    }
    for (int32_t k = 0; k < a->top_k; k++) weights[k] = cpa_route_weight(t.score[ids[k]], sum, a->normalise, a->scale);
}

cpa_status cpa_host_expert_route(const cpa_expert_route_args *args, cpa_stream *stream) {
    cpa_expert_route_args copy = *args;
    cpa_host_run(stream, args->rows, route_row, &copy);
    return CPA_OK;
}
