/* The inputs of bench attend, and the reference that its results are checked against. */
#ifndef CPA_LAUNCHER_BENCH_ATTEND_H
#define CPA_LAUNCHER_BENCH_ATTEND_H

#include "launcher/bench.h"

typedef struct cpa_bench_attend_case {
    int64_t sequences, new_tokens, context;
} cpa_bench_attend_case;

typedef enum cpa_bench_tensor { CPA_BENCH_Q = 0, CPA_BENCH_K, CPA_BENCH_V } cpa_bench_tensor;

/* One token's row of a tensor, all its heads, rounded to the dtype, to dst [heads, head_dim]. Heavy hitters lie near
 * and far: the keys of some tokens share a direction with every query of their head, and the keys and queries of
 * neighbouring tokens share another one. Pure. */
void cpa_bench_attend_token(const cpa_bench_options *options, cpa_bench_tensor tensor, int64_t sequence, int64_t token,
                            float *dst);

/* Compares sampled rows of out [rows, q_heads, head_dim] and lse [rows, q_heads] with unfused float64 attention. */
cpa_status cpa_bench_attend_check(const cpa_bench_options *options, const cpa_bench_attend_case *shape, const void *out,
                                  const float *lse, int64_t *checked, int64_t *wrong, cpa_error *err);

#endif
