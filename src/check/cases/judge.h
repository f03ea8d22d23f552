/* The judge of rows of attention: what float64 makes of one row of one head over the keys that it sees, wherever they
 * lie, and whether a result is that, within the tolerances of src/check/reference.h. The self-test, the benchmarks and
 * the tests all ask it. */
#ifndef CPA_CASES_JUDGE_H
#define CPA_CASES_JUDGE_H

#include "src/check/cases/inputs.h"
#include "src/check/cases/score.h"
#include "src/check/reference.h"

typedef struct cpa_case_row {
    cpa_dtype dtype; /* the coarser one of queries and cache, whose roundings are allowed */
    int32_t k_dim, v_dim;
    double scale; /* 0: 1 / sqrt(k_dim) */
    /* Elements of q_dtype and kv_dtype, fp32 or 16 bits: the query, and key i of the KV head so many elements behind k,
     * i * k_stride, with its value at v. */
    const void *q, *k, *v;
    cpa_dtype q_dtype, kv_dtype;
    /* 1: devices round keys and values to the queries' dtype, as those of CPA_TQ_, and of codes attended by blocks. */
    int32_t rounds_rows;
    int64_t k_stride, v_stride, n_keys;
    const int64_t *key_indices; /* index of key i in its sequence; NULL: i */
    int64_t index;              /* index of the query in its sequence */
    cpa_mask mask;
    const cpa_case_score *score; /* what happens to scores; NULL: nothing */
    int64_t score_row;           /* the row of `score` that this is */
    int32_t head;                /* the query head */
    double skip;                 /* skip_tiles of the attend */
    /* Whether the row is given the key of an index, as the owner of another shard is not; NULL: all are. */
    int (*given)(const void *given_ctx, int64_t key_index);
    const void *given_ctx;
} cpa_case_row;

/* The row and head of a sequence whose query has an index: all of its keys, without a mask. */
cpa_case_row cpa_case_row_of(const cpa_case_sequence *sequence, int64_t index, int32_t head, cpa_dtype dtype);

/* What a row has to be: O of its partial state; `out`, which sinks have made smaller; LSE, which knows no sinks. An
 * empty row is exactly 0 and -inf, one with a score that is no number is NaN. */
typedef struct cpa_case_expected {
    cpa_dtype dtype;
    int32_t v_dim;
    double o[CPA_MAX_HEAD_DIM], out[CPA_MAX_HEAD_DIM], lse;
    double o_tolerance, out_tolerance, lse_tolerance;
} cpa_case_expected;

void cpa_case_expect(const cpa_case_row *row, cpa_case_expected *out);

/* Parts of a result; NULL: there is none. */
typedef struct cpa_case_result {
    const float *o, *lse;
    const void *out; /* elements of out_dtype, fp32 or 16 bits */
    cpa_dtype out_dtype;
    double out_slack; /* allowed beside the tolerance of `out` */
} cpa_case_result;

/* Whether each part is right; *worst, unless it is NULL, is raised to the largest error over its tolerance. */
int cpa_case_is_right(const cpa_case_expected *expected, const cpa_case_result *result, double *worst);

#endif
