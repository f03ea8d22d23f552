/* The lists and the blocks of keys that a case selects (cpattn/selection.h). */
#ifndef CPA_CASES_SELECTION_H
#define CPA_CASES_SELECTION_H

#include "src/check/cases/score.h"

/* Random lists for each row and KV head of the keys [0, keys), one in five, less behind them; some rows attend all keys,
 * others none. */
cpa_status cpa_case_score_add_lists(cpa_case_score *score, int32_t kv_heads, int32_t unit, int64_t keys,
                                    cpa_error *err);
/* Random blocks of so many tokens of these keys, less the last, for each query head, every second one; neighbouring rows
 * have the same, some rows all keys. */
cpa_status cpa_case_score_add_blocks(cpa_case_score *score, int32_t block, int64_t keys, cpa_error *err);
/* Whether the lists and blocks of a row and query head have a key. */
int cpa_case_score_selects(const cpa_case_score *score, int64_t row, int32_t head, int64_t key);

#endif
