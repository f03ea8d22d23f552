/* The cases of bench attend, and the reference that its results are checked against. */
#ifndef CPA_LAUNCHER_BENCH_ATTEND_H
#define CPA_LAUNCHER_BENCH_ATTEND_H

#include "launcher/bench.h"

typedef struct cpa_bench_attend_case {
    int64_t sequences, new_tokens, context;
} cpa_bench_attend_case;

/* The tokens of a sequence of the case, new ones included. Pure. */
int64_t cpa_bench_attend_context(const cpa_bench_options *options, const cpa_bench_attend_case *shape,
                                 int64_t sequence);

/* Compares sampled rows of out [rows, q_heads, v_dim] and lse [rows, q_heads], on the host, with unfused float64
 * attention over inputs that are synthesized again. */
cpa_status cpa_bench_attend_check(cpa_bench_site *site, const cpa_bench_attend_case *shape, const void *out,
                                  const float *lse, int64_t *checked, int64_t *wrong, cpa_error *err);

#endif
