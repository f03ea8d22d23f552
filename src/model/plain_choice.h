/* Which experts a token chooses in a plain forward, and how near it is to another choice. Where two scores are nearer to
 * each other than roundings are large, two right computations may choose differently. */
#ifndef CPA_MODEL_PLAIN_CHOICE_H
#define CPA_MODEL_PLAIN_CHOICE_H

#include "src/model/moe_config.h"

/* Another choice; bits. */
typedef enum cpa_plain_turn {
    CPA_TURN_NONE = 0,
    CPA_TURN_EXPERT = 1, /* in the place of the last of the chosen experts the next one */
    CPA_TURN_GROUP = 2,  /* in the place of the last of the groups that take part the next one */
    CPA_TURN_BOTH = 3
} cpa_plain_turn;

/* One that a token takes in a layer. */
typedef struct cpa_turned_choice {
    cpa_plain_turn turn;
    int32_t layer;
    int64_t position; /* of the token */
} cpa_turned_choice;

/* What is asked of the choices of a plain forward; zeros: nothing. */
typedef struct cpa_plain_choices {
    /* To fill [layers, n_positions, experts], in layers that have experts: the scores by which the tokens at the wanted
     * positions choose; NULL: they are not wanted. */
    double *biased;
    const cpa_turned_choice *turned; /* [n_turned] */
    int32_t n_turned;
} cpa_plain_choices;

/* From a token's router logits, in `row` [experts], to the shares of its experts, 0 for those that it does not choose.
 * `bias` [experts] counts for the choice alone; NULL: there is none. Fills biased [experts]: the scores by which it
 * chooses. */
void cpa_plain_choose(const cpa_moe_config *moe, const float *bias, cpa_plain_turn turn, float *row, double *biased);

/* By how much scores have to move, each up or down, for a turn: half of the distance from what gives way to what takes
 * its place, a quarter where these are sums of two. INFINITY where nothing is left that could take it. */
double cpa_plain_turn_distance(const cpa_moe_config *moe, const double *biased, cpa_plain_turn turn);

#endif
