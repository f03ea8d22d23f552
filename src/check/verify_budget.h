/* How many rows the sampled check takes: a fixed rate, or as many as a share of the run time pays for.
 *
 * A row costs as many keys as lie before it, so a fixed rate costs a fixed share of the time only on one device and
 * shape. With a budget the rate follows from what was measured:
 *     rate = share * (run seconds / attended row-keys) * (checked keys / check seconds),   at most `most`
 * where the last factor forgets half of itself at every check. Between two agreements the check may take what
 * share * run seconds - check seconds pays for, and at most one row more: nothing until that is paid back. What a check
 * takes whatever its rows makes the rate low where rows are short: a check is due whenever the time that is left pays
 * for another one like the last.
 * Pure: every rank feeds the same numbers and makes the same choices. */
#ifndef CPA_VERIFY_BUDGET_H
#define CPA_VERIFY_BUDGET_H

#include <stdint.h>

typedef struct cpa_verify_budget {
    double most;     /* the highest rate, or the rate itself without a bound */
    double share;    /* share of the run's time that the check may take; 0: no bound */
    double rate;     /* share of the rows that are checked now */
    double left;     /* keys that may be checked before the next agreement */
    double attended; /* (row, head, key) triples of the run */
    double checked;  /* keys of the rows checked since the last agreement */
    double recent_keys, recent_s, check_s, last_s;
    int due; /* a row is to be checked in the next step */
} cpa_verify_budget;

/* rate < 0: CPA_VERIFY_MOST of the rows, bounded by CPA_VERIFY_SHARE of the run time. */
#define CPA_VERIFY_MOST 0.001
#define CPA_VERIFY_SHARE 0.02
void cpa_verify_budget_begin(cpa_verify_budget *budget, double rate);

/* Notes the attention of `rows` rows of a layer whose first sees `keys` keys, each row one more than the one before. */
void cpa_verify_budget_attend(cpa_verify_budget *budget, int64_t rows, int32_t heads, int64_t keys);

/* Whether a row over `keys` keys may be checked; pays for it. `must`: it is checked in any case. */
int cpa_verify_budget_spend(cpa_verify_budget *budget, int64_t keys, int must);

/* The seconds so far, agreed between the ranks. */
void cpa_verify_budget_agree(cpa_verify_budget *budget, double run_s, double check_s);

#endif
