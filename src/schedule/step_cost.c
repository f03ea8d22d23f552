#include "src/schedule/step_cost.h"

#include <math.h>
#include <string.h>

/* What is left of the weight of a step one step later. */
static const double FADING = 0.995;
/* So many steps are enough. */
static const double ENOUGH = 8;
/* A step that took more than so many times as long as was to be expected, and as the mean, was held up by something else,
 * and counts as that. */
static const double MOST_TIMES = 4;
/* Added to the diagonal, relative to it: where two parts cannot be told apart they share. */
static const double RIDGE = 1e-6;

/* Solves the normal equations for the parts of a mask, by elimination; the others are 0. */
static void solve(const cpa_step_cost *cost, unsigned parts, double *x) {
    double a[CPA_STEP_PARTS][CPA_STEP_PARTS], b[CPA_STEP_PARTS];
    memcpy(a, cost->products, sizeof a);
    memcpy(b, cost->sums, sizeof b);
    a[CPA_STEP_ITSELF][CPA_STEP_ITSELF] += 1; /* the step that has nothing */
    for (int i = 0; i < CPA_STEP_PARTS; i++) {
        if (parts & 1u << i) {
            a[i][i] *= 1 + RIDGE;
            continue;
        }
        for (int j = 0; j < CPA_STEP_PARTS; j++) a[i][j] = a[j][i] = i == j;
        b[i] = 0;
    }
    for (int k = 0; k < CPA_STEP_PARTS; k++) {
        for (int i = k + 1; i < CPA_STEP_PARTS; i++) {
            const double factor = a[i][k] / a[k][k];
            for (int j = k; j < CPA_STEP_PARTS; j++) a[i][j] -= factor * a[k][j];
            b[i] -= factor * b[k];
        }
    }
    for (int k = CPA_STEP_PARTS - 1; k >= 0; k--) {
        x[k] = b[k];
        for (int j = k + 1; j < CPA_STEP_PARTS; j++) x[k] -= a[k][j] * x[j];
        x[k] /= a[k][k];
    }
}

/* Leaves out what would be below 0, one after the other, and what no step had. */
static void solve_without_negative(cpa_step_cost *cost) {
    unsigned parts = 0;
    int least;
    for (int i = 0; i < CPA_STEP_PARTS; i++)
        if (cost->products[i][i] > 0) parts |= 1u << i;
    do {
        solve(cost, parts, cost->seconds);
        least = CPA_STEP_ITSELF;
        for (int i = 1; i < CPA_STEP_PARTS; i++)
            if (cost->seconds[i] < cost->seconds[least]) least = i;
        parts &= ~(1u << least);
    } while (cost->seconds[least] < 0);
}

/* A step with this load took so long. */
static void add(cpa_step_cost *cost, cpa_step_load load, double seconds) {
    const double x[CPA_STEP_PARTS] = {1, (double)load.decoding, (double)load.prompt_tokens};
    double expected = 0;
    for (int i = 0; i < CPA_STEP_PARTS; i++) expected += cost->seconds[i] * x[i];
    if (cpa_step_cost_is_known(cost)) {
        const double mean = cost->sums[CPA_STEP_ITSELF] / cost->weight;
        seconds = fmin(seconds, MOST_TIMES * fmax(expected, mean));
    }
    cost->weight = FADING * cost->weight + 1;
    for (int i = 0; i < CPA_STEP_PARTS; i++) {
        cost->sums[i] = FADING * cost->sums[i] + x[i] * seconds;
        for (int j = 0; j < CPA_STEP_PARTS; j++) cost->products[i][j] = FADING * cost->products[i][j] + x[i] * x[j];
    }
    solve_without_negative(cost);
}

void cpa_step_cost_note(cpa_step_cost *cost, double now, cpa_step_load load) {
    const int is_empty = load.decoding + load.prompt_tokens == 0;
    if (cost->in_a_row == 2 && now > cost->asked) add(cost, cost->last[1], now - cost->asked);
    cost->in_a_row = is_empty ? 0 : cost->in_a_row < 2 ? cost->in_a_row + 1 : 2;
    cost->last[1] = cost->last[0];
    cost->last[0] = load;
    cost->asked = now;
}

int cpa_step_cost_is_known(const cpa_step_cost *cost) {
    return cost->weight >= ENOUGH;
}
