/* What the cases of bench attend do to scores (cpattn/score.h): a rule by name, its arrays on the device, and what the
 * check expects of it. */
#ifndef CPA_BENCH_RULES_H
#define CPA_BENCH_RULES_H

#include <cpattn/score.h>

#include "bench/attend.h"

/* The choices of --rules; NULL past the last. */
typedef enum cpa_bench_rule {
    CPA_BENCH_NO_RULE = 0,
    CPA_BENCH_SOFTCAP,     /* 30 */
    CPA_BENCH_TEMPERATURE, /* from 1K tokens on */
    CPA_BENCH_ALIBI,
    CPA_BENCH_SINK_LOGITS, /* of each head */
    CPA_BENCH_BITS,        /* a causal mask for all keys of a row, as bits, */
    CPA_BENCH_TREE         /* and for its new tokens alone, as trees of drafts have them */
} cpa_bench_rule;
extern const char *const cpa_bench_rules[];

typedef struct cpa_bench_score {
    cpa_score_rules rules;
    cpa_custom_mask custom;
    int has_rules, has_custom;
} cpa_bench_score;

/* To be released whatever the status. */
cpa_status cpa_bench_score_make(cpa_bench_site *site, const cpa_bench_attend_work *work, cpa_bench_score *out,
                                cpa_error *err);
void cpa_bench_score_release(const cpa_bench_site *site, cpa_bench_score *score);

/* The score of a key at index t for a query at index p, of a head. */
double cpa_bench_ruled(const cpa_bench_options *options, int64_t head, int64_t p, int64_t t, double score);
/* What a sink leaves of a result with that LSE. */
double cpa_bench_kept(const cpa_bench_options *options, int64_t head, double lse);

#endif
