/* The choices of experts of a plain forward, the nearest others, and how near these are. */
#include "src/model/plain_choice.h"

#include <math.h>
#include <string.h>

#include "tests/fixtures/unit.h"

enum { EXPERTS = 6 };

/* Sigmoids of logits that give these scores. */
static void set_scores(const double *scores, float *row) {
    for (int e = 0; e < EXPERTS; e++) row[e] = (float)log(scores[e] / (1 - scores[e]));
}

/* The experts with a share, as digits from the first on. */
static int chosen(const float *row) {
    int number = 0;
    for (int e = 0; e < EXPERTS; e++)
        if (row[e] > 0) number = 10 * number + e;
    return number;
}

static int choose(const cpa_moe_config *moe, const double *scores, cpa_plain_turn turn, float *row, double *distance) {
    double biased[EXPERTS];
    set_scores(scores, row);
    cpa_plain_choose(moe, NULL, turn, row, biased);
    *distance = cpa_plain_turn_distance(moe, biased, turn);
    return chosen(row);
}

static void the_next_expert_takes_the_place_of_the_last(void) {
    static const double scores[EXPERTS] = {0.2, 0.9, 0.5, 0.6, 0.1, 0.46};
    cpa_moe_config moe = {.experts = EXPERTS, .top_k = 3, .scores = CPA_SCORES_SIGMOID, .renormalise = 1, .scale = 2};
    float row[EXPERTS];
    double distance;
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_NONE, row, &distance), 123);
    CU_ASSERT(fabs((double)row[2] - 2 * 0.5 / 2.0) < 1e-6 && distance == 0);
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_EXPERT, row, &distance), 135);
    CU_ASSERT(fabs((double)row[5] - 2 * 0.46 / 1.96) < 1e-6 && fabs(distance - 0.02) < 1e-6);
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_GROUP, row, &distance), 123); /* there are no groups */
    CU_ASSERT(isinf(distance));
    moe.top_k = EXPERTS;
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_EXPERT, row, &distance), 12345); /* and none is left */
    CU_ASSERT(isinf(distance));
}

/* Groups {0, 1}, {2, 3}, {4, 5} by the sums of their two: 1.1, 1.08, 0.56; by their best 0.9, 0.6, 0.46. */
static void the_next_group_takes_the_place_of_the_last(void) {
    static const double scores[EXPERTS] = {0.2, 0.9, 0.48, 0.6, 0.1, 0.46};
    cpa_moe_config moe = {.experts = EXPERTS,
                          .top_k = 2,
                          .scores = CPA_SCORES_SIGMOID,
                          .group_scores = CPA_GROUP_BEST_TWO,
                          .n_group = 3,
                          .topk_group = 1,
                          .scale = 1};
    float row[EXPERTS];
    double distance;
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_NONE, row, &distance), 1);
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_GROUP, row, &distance), 23);
    CU_ASSERT(fabs(distance - 0.02 / 4) < 1e-6);
    moe.top_k = 1;
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_BOTH, row, &distance), 2);
    CU_ASSERT(fabs(distance - 0.12 / 2) < 1e-6); /* of the expert, which is farther */
    moe.group_scores = CPA_GROUP_BEST;
    moe.topk_group = 2;
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_GROUP, row, &distance), 1);
    CU_ASSERT(fabs(distance - 0.14 / 2) < 1e-6);
    CU_ASSERT_EQUAL(choose(&moe, scores, CPA_TURN_BOTH, row, &distance), 5);
}

static const cpa_test TESTS[] = {
    {"the next expert takes the place of the last", the_next_expert_takes_the_place_of_the_last},
    {"the next group takes the place of the last", the_next_group_takes_the_place_of_the_last},
};

CPA_TEST_MAIN("choices of a plain forward", TESTS)
