#include "src/model/plain_choice.h"

#include <math.h>

/* Of those that are not taken; the first of equal ones, -1 if there are none. */
static int32_t index_of_largest(const double *values, int32_t n, const uint8_t *taken) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* Takes the n largest, the largest first; with a turn the one behind them, if there is any, in the place of the last.
 * Returns by how much the last is larger than that one; INFINITY if there is none. */
static double take_largest(const double *values, int32_t count, int32_t n, int turned, uint8_t *taken,
                           int32_t *chosen) {
    for (int32_t k = 0; k < n; k++) {
        chosen[k] = index_of_largest(values, count, taken);
        taken[chosen[k]] = 1;
    }
    const int32_t next = index_of_largest(values, count, taken), last = chosen[n - 1];
    if (next < 0) return INFINITY;
    if (turned) {
        taken[last] = 0;
        taken[next] = 1;
        chosen[n - 1] = next;
    }
    return values[last] - values[next];
}

static void score(const cpa_moe_config *moe, const float *logits, double *scores) {
    double most = -INFINITY, sum = 0;
    for (int32_t e = 0; e < moe->experts; e++) most = fmax(most, logits[e]);
    for (int32_t e = 0; e < moe->experts; e++) {
        scores[e] = moe->scores == CPA_SCORES_SIGMOID ? 1 / (1 + exp(-(double)logits[e])) : exp(logits[e] - most);
        sum += scores[e];
    }
    for (int32_t e = 0; moe->scores == CPA_SCORES_SOFTMAX && e < moe->experts; e++) scores[e] /= sum;
}

/* Marks the experts of groups that take no part: all but the topk_group groups whose best, or best two, are largest.
 * Returns by how much the last of these is larger than the next. */
static double leave_out_groups(const cpa_moe_config *moe, const double *biased, int turned, uint8_t *taken) {
    const int32_t size = moe->experts / moe->n_group;
    double of_groups[CPA_MOST_EXPERTS];
    int32_t chosen[CPA_MOST_EXPERTS];
    uint8_t takes_part[CPA_MOST_EXPERTS] = {0};
    for (int32_t g = 0; g < moe->n_group; g++) {
        const double *group = biased + g * size;
        uint8_t seen[CPA_MOST_EXPERTS] = {0};
        const int32_t first = index_of_largest(group, size, seen);
        seen[first] = 1;
        const int32_t second = index_of_largest(group, size, seen);
        of_groups[g] = group[first];
        if (moe->group_scores == CPA_GROUP_BEST_TWO && second >= 0) of_groups[g] += group[second];
    }
    const double margin = take_largest(of_groups, moe->n_group, moe->topk_group, turned, takes_part, chosen);
    for (int32_t e = 0; e < moe->experts; e++) taken[e] = !takes_part[e / size];
    return margin;
}

/* The experts; returns the distance of the turn. */
static double choose(const cpa_moe_config *moe, const double *biased, cpa_plain_turn turn, int32_t *chosen) {
    uint8_t taken[CPA_MOST_EXPERTS] = {0};
    double of_groups = INFINITY;
    if (moe->n_group > 1) of_groups = leave_out_groups(moe, biased, turn & CPA_TURN_GROUP, taken);
    const double of_experts = take_largest(biased, moe->experts, moe->top_k, turn & CPA_TURN_EXPERT, taken, chosen) / 2;
    of_groups /= moe->group_scores == CPA_GROUP_BEST_TWO ? 4 : 2;
    return fmax(turn & CPA_TURN_GROUP ? of_groups : 0, turn & CPA_TURN_EXPERT ? of_experts : 0);
}

void cpa_plain_choose(const cpa_moe_config *moe, const float *bias, cpa_plain_turn turn, float *row, double *biased) {
    double scores[CPA_MOST_EXPERTS], kept = 0;
    int32_t chosen[CPA_MOST_TOP_K];
    score(moe, row, scores);
    for (int32_t e = 0; e < moe->experts; e++) biased[e] = scores[e] + (double)(bias ? bias[e] : 0);
    choose(moe, biased, turn, chosen);
    for (int32_t k = 0; k < moe->top_k; k++) kept += scores[chosen[k]];
    for (int32_t e = 0; e < moe->experts; e++) row[e] = 0;
    for (int32_t k = 0; k < moe->top_k; k++)
        row[chosen[k]] = (float)(scores[chosen[k]] / (moe->renormalise ? kept : 1) * (double)moe->scale);
}

double cpa_plain_turn_distance(const cpa_moe_config *moe, const double *biased, cpa_plain_turn turn) {
    int32_t chosen[CPA_MOST_TOP_K];
    return choose(moe, biased, turn, chosen);
}
