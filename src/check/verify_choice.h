/* What an indexer chose for a row, and what it should have: the score of every key that the row sees (cpattn/indexer.h),
 * in float64, from the index keys in the caches and from queries and weights as they were given to the choice.
 *
 * A list is another choice if it has not as many keys as there are to choose, if it does not ascend or names a key twice
 * or one behind the row, or if a key that is not on it is better than one that is: its score is higher by more than the
 * errors that both scores may have; or equal, where both are exact, and its index lower; or it is forced.
 *
 * The error of a score L = s sum_h w_h max(p_h, 0), with p_h = sum_d q_hd k_d. Rounding errors of a sum of n terms in
 * fp32 behave as a random walk: but for once in 1500 sums they stay below c sqrt(n) u sum |terms|, u = 2^-24, c = 4
 * (Higham and Mary 2019, doi:10.1137/18M1226312), so that
 *
 *     e_h = 4 u sqrt(dim) sum_d |q_hd k_d|
 *     |error of L| <= |s| sum_h |w_h| (e_h + 4 u (sqrt(heads) + 1) max(p_h, 0)),   over the h with p_h > -e_h
 *
 * where one more rounding is that of the products: 4.9e-6 of sum |s w q k| with 64 heads of 128. Tensor cores that multiply
 * codes align the addends of a sum to the largest, and keep 13 bits behind its leading one (DeepSeek-AI, DeepSeek-V3,
 * arXiv:2412.19437, section 3.5.2): each of the 33 addends of a product of 32 loses less than 2^-13 of the largest one,
 * which comes to e_h. A head whose product is surely negative gives exactly 0, and an L of such heads alone is exact. */
#ifndef CPA_VERIFY_CHOICE_H
#define CPA_VERIFY_CHOICE_H

#include "src/check/verify_gather.h"

enum { CPA_VERIFY_INDEX_AT_ONCE = 64 };

/* Some index keys of a piece, transposed, and their scales; zeros behind the last. */
typedef struct cpa_verify_index_keys {
    float elements[CPA_INDEX_MOST_DIM][CPA_VERIFY_INDEX_AT_ONCE];
    float scales[CPA_VERIFY_INDEX_AT_ONCE];
} cpa_verify_index_keys;

/* A key with its score, which is off by up to `slack`. */
typedef struct cpa_verify_scored {
    int64_t key; /* -1: there is none */
    double score, slack;
} cpa_verify_scored;

/* What keys have told of the choice of a row. */
typedef struct cpa_verify_choice {
    cpa_verify_scored listed; /* of the keys on the list the one that is most surely worse than others */
    cpa_verify_scored others; /* of the others the one that is most surely better; forced: infinite */
    int32_t undecided;        /* not 0: a score is no finite number, or may be none */
} cpa_verify_choice;

/* Whose choice it is: what a sample has of it (cpa_verify_list), and the position of the row. */
typedef struct cpa_verify_chooser {
    const cpa_verify *verify;
    const cpa_verify_list *list;
    int64_t position;
} cpa_verify_chooser;

/* The n tokens from `first` on of a piece. */
void cpa_verify_read_index(const cpa_verify *verify, const cpa_verify_piece *piece, int64_t first, int64_t n,
                           cpa_verify_index_keys *keys);

void cpa_verify_choice_begin(cpa_verify_choice *choice);
/* Adds n keys, at most CPA_VERIFY_INDEX_AT_ONCE, at these positions; those behind the row do not count. */
void cpa_verify_choice_add(cpa_verify_choice *choice, const cpa_verify_chooser *row, const cpa_verify_index_keys *keys,
                           int64_t n, const int64_t *positions);
/* Adds the keys that were added to `other`, of the same row. */
void cpa_verify_choice_join(cpa_verify_choice *choice, const cpa_verify_choice *other);

/* 1 if the list is what all keys call for, or nobody can say; 0 otherwise: `says` has what is wrong with it. */
int cpa_verify_choice_judge(const cpa_verify_choice *choice, const cpa_verify_chooser *row, char *says, size_t bytes);

#endif
