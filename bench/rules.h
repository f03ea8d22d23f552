/* What the cases of bench attend do to scores (cpattn/score.h): a rule by name. */
#ifndef CPA_BENCH_RULES_H
#define CPA_BENCH_RULES_H

#include "bench/attend.h"

/* The choices of --rules; NULL past the last. */
typedef enum cpa_bench_rule {
    CPA_BENCH_NO_RULE = 0,
    CPA_BENCH_SOFTCAP,     /* 30 */
    CPA_BENCH_TEMPERATURE, /* from 1K tokens on */
    CPA_BENCH_ALIBI,
    CPA_BENCH_SINK_LOGITS, /* of each head */
    CPA_BENCH_BITS,        /* a causal mask for all keys of a row, as bits */
    CPA_BENCH_TREE         /* a causal mask for the new tokens of a row alone, as trees of drafts have them */
} cpa_bench_rule;
extern const char *const cpa_bench_rules[];

typedef struct cpa_bench_score {
    cpa_case_score host;
    cpa_case_score checked; /* the host's without bits, which say what causality says */
    cpa_case_score_on_device device;
    double selected; /* share of the pairs of queries and keys that blocks leave */
} cpa_bench_score;

/* host and device are to be released whatever the status. */
cpa_status cpa_bench_score_make(cpa_bench_site *site, const cpa_bench_attend_work *work, cpa_bench_score *out,
                                cpa_error *err);

#endif
