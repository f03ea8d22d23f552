/* What steps cost, as seen from when plans are asked for: so many seconds a step, a sequence that decodes, and a token of
 * a prompt, none of them below 0. They minimise the sum of squared errors over the steps so far, of which the last two
 * hundred or so count, and of one more that has nothing and takes no time: as long as all steps are alike, a step costs
 * nothing by itself. Pure logic. */
#ifndef CPA_STEP_COST_H
#define CPA_STEP_COST_H

#include <stdint.h>

typedef enum cpa_step_part { CPA_STEP_ITSELF = 0, CPA_STEP_DECODE, CPA_STEP_PROMPT, CPA_STEP_PARTS } cpa_step_part;

/* What a plan has. */
typedef struct cpa_step_load {
    int64_t decoding; /* sequences */
    int64_t prompt_tokens;
} cpa_step_load;

/* Zeros to begin with. */
typedef struct cpa_step_cost {
    double seconds[CPA_STEP_PARTS]; /* seconds of a step, a sequence, a token; 0: unknown, or nothing */
    double weight;                  /* weight of the steps so far, each 1 to begin with */
    double products[CPA_STEP_PARTS][CPA_STEP_PARTS], sums[CPA_STEP_PARTS]; /* normal equations, both sides */
    double asked;                                                          /* when the last plan was asked for */
    cpa_step_load last[2]; /* the loads of the last plan and of the one before */
    int in_a_row;          /* plans with a load, up to two */
} cpa_step_cost;

/* A plan that was asked for at that time has this load. A plan is made when the step before it begins, so the time since
 * the last one is that of the step of the plan before that, if there was no pause. */
void cpa_step_cost_note(cpa_step_cost *cost, double now, cpa_step_load load);

/* Whether enough steps have been seen. */
int cpa_step_cost_is_known(const cpa_step_cost *cost);

#endif
