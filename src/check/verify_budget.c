#include "src/check/verify_budget.h"

#include <math.h>

void cpa_verify_budget_begin(cpa_verify_budget *budget, double rate) {
    *budget = (cpa_verify_budget){.most = rate, .rate = rate};
    if (rate < 0) *budget = (cpa_verify_budget){.most = CPA_VERIFY_MOST, .share = CPA_VERIFY_SHARE};
}

void cpa_verify_budget_attend(cpa_verify_budget *budget, int64_t rows, int32_t heads, int64_t keys) {
    budget->attended += (double)rows * heads * ((double)keys + 0.5 * (double)(rows - 1));
}

int cpa_verify_budget_spend(cpa_verify_budget *budget, int64_t keys, int must) {
    if (budget->share > 0 && !must && budget->left <= 0) return 0;
    budget->left -= (double)keys;
    budget->checked += (double)keys;
    return 1;
}

void cpa_verify_budget_agree(cpa_verify_budget *budget, double run_s, double check_s) {
    if (budget->share == 0) return;
    if (budget->checked > 0 && check_s > budget->check_s) {
        budget->recent_keys = budget->recent_keys / 2 + budget->checked;
        budget->recent_s = budget->recent_s / 2 + check_s - budget->check_s;
        budget->checked = 0;
        budget->last_s = check_s - budget->check_s;
        budget->check_s = check_s;
    }
    if (budget->recent_s == 0) return;
    double keys_per_s = budget->recent_keys / budget->recent_s;
    budget->rate = fmin(budget->most, budget->share * run_s / budget->attended * keys_per_s);
    budget->left = (budget->share * run_s - check_s) * keys_per_s;
    budget->due = budget->share * run_s - check_s > budget->last_s;
}
