/* The reference: one row of attention in float64, key by key, beside a plain implementation in the working dtype.
 *
 * Whether a score is a number is decided in fp32, key by key, as cpattn/ops.h says of attend: NaN and +inf make the row
 * NaN, and -inf weighs nothing, whatever the value holds. Where a sum overflows in some orders only, or to either side,
 * or a score is beyond CPA_HIGHEST_EXPONENT, a result may rightly say otherwise: such a row is `undecided`.
 *
 * The tolerance of a result is 2 * (error of the plain implementation against float64) + 1e-5, where the plain
 * implementation accumulates in fp32 and rounds the probabilities and the result to the dtype. Both errors are the
 * largest over the elements of the row. Where the plain implementation is lucky in a row, its error counts as what
 * rounding may cost: (u + e) sum(p |v|) / sum(p), with u the unit roundoff of the dtype, for probabilities and result,
 * and e, for scores in fp32, sqrt(d) / 2 * 2^-24 * scale * sum |q k| of the keys with the highest scores: rounding
 * errors of a sum of d terms grow with sqrt(d) (Higham and Mary 2019, doi:10.1137/18M1226312). Pure; a row is used by
 * one thread. */
#ifndef CPA_REFERENCE_H
#define CPA_REFERENCE_H

#include <cpattn/owner_map.h>
#include <cpattn/types.h>

#include "src/check/skipped_mass.h"

/* What cpattn/score.h does to the scores of a row of a head; all zero is nothing. */
typedef struct cpa_reference_rules {
    double softcap, temperature_len, slope;
    double sink; /* a logit, if has_sink */
    int has_sink;
    int64_t index; /* index of the query in its sequence */
} cpa_reference_rules;

typedef struct cpa_reference_row {
    int32_t k_dim, v_dim;
    cpa_dtype dtype;
    double scale;
    float q[CPA_MAX_HEAD_DIM];
    float got[CPA_MAX_HEAD_DIM]; /* the caller's: the result to compare with */
    double max, sum, o[CPA_MAX_HEAD_DIM];
    float plain_max, plain_sum, plain_o[CPA_MAX_HEAD_DIM];
    float mass[CPA_MAX_HEAD_DIM]; /* sum of p |v|, relative to plain_max */
    float score_size;             /* fp32: scale * sum |q k| over the elements of a leading key, the largest */
    float element_size;           /* scale * |q k| of an element of a leading key, the largest */
    int32_t not_finite, undecided;
    cpa_reference_rules rules;
    cpa_skipped_mass skipped; /* scores, where tiles of keys may be left out of the result */
    float value_size;         /* the largest |v| then */
} cpa_reference_row;

/* Starts a row for the query q [k_dim]; scale 0 = 1 / sqrt(k_dim). */
void cpa_reference_begin(cpa_reference_row *row, const float *q, int32_t k_dim, int32_t v_dim, cpa_dtype dtype,
                         double scale);
/* Adds n keys that the query sees, k [n, k_dim] and v [n, v_dim]; and one key. */
void cpa_reference_add_keys(cpa_reference_row *row, int64_t n, const float *k, const float *v);
void cpa_reference_add(cpa_reference_row *row, const float *k, const float *v);
/* The rules of a row, before its first key; and n keys of these indices in the sequence, to whose scores the bias [n]
 * is added, unless it is NULL. Sinks count in the result of cpa_reference_end, not in its LSE. */
void cpa_reference_set_rules(cpa_reference_row *row, const cpa_reference_rules *rules);
void cpa_reference_add_ruled(cpa_reference_row *row, int64_t n, const float *k, const float *v, const int64_t *indices,
                             const float *bias);
/* The scores of n keys of these indices by the rules of the row, in float64; n is at most 64. Adds nothing. */
void cpa_reference_score_keys(const cpa_reference_row *row, int64_t n, const float *k, const int64_t *indices,
                              double *scores);
/* The result may lack tiles of keys, by a distance of scores (skipped_mass.h); before the first key. */
void cpa_reference_set_skip(cpa_reference_row *row, double distance);
/* Adds the keys that were added to `other`, a row of the same query. */
void cpa_reference_join(cpa_reference_row *row, const cpa_reference_row *other);
/* Ends the row: out [v_dim] (zeros if it saw no key), its LSE (-inf then), and the tolerance of a result in the dtype.
 * All NaN, with tolerance 0, if a score was NaN or +inf. */
void cpa_reference_end(cpa_reference_row *row, double *out, double *lse, double *tolerance);

/* The largest |got - want| over n elements; 0 for one that is NaN in both, infinity for one that is so in got alone. */
double cpa_reference_error(const float *got, const double *want, int32_t n);

/* The largest relative error of rounding to the dtype. */
double cpa_reference_unit_roundoff(cpa_dtype dtype);

/* The tolerance of a result in the dtype: see above. `plain_error` and `mass` are the largest of the row's elements,
 * mass being sum(p |v|) / sum(p); score_size: scale * sum |q k| of a key with the highest score. */
double cpa_reference_tolerance(cpa_dtype dtype, int32_t k_dim, double plain_error, double mass, double score_size);

/* What comes to the tolerance of an ended row whose keys and values are rounded products: sums of another order may be
 * rounded to the other side, which moves an element by two units of roundoff u. A score so moves by 2 u scale |q k|, and a
 * result by as much of sum(p |v|) / sum(p), or by 2 u of that where a value is; twice, for two keys that compete. */
double cpa_reference_product_tolerance(const cpa_reference_row *row);
/* The same of its scores alone, and so of its LSE. Rows of CPA_TQ_ are no numbers of the queries' dtype either: devices
 * round rotated queries, centroids and values to it, each by half a unit, which both tolerances allow for. */
double cpa_reference_rounded_score(const cpa_reference_row *row);

/* What comes to the tolerance of an ended row, and to that of its LSE, where tiles of keys may be left out; 0 elsewhere. */
double cpa_reference_skip_tolerance(const cpa_reference_row *row);
double cpa_reference_skip_lse_tolerance(const cpa_reference_row *row);

/* The tolerance of a result whose LSE is `lse`: 1e-5 (1 + |LSE|) for fp32, since its scores and the LSE itself are
 * numbers of 24 bits of that size; 2e-3 + 1e-5 |LSE| for bf16 and fp16. 0 for an LSE that is not finite: it has to be
 * met. */
double cpa_reference_lse_tolerance(cpa_dtype dtype, double lse);

/* Whether a query at position q sees the key at position k. */
int cpa_reference_sees(cpa_mask mask, int64_t q, int64_t k);

/* n elements of a dtype as floats, and a float rounded to a dtype (nearest even). */
void cpa_reference_widen(const void *src, cpa_dtype dtype, int64_t n, float *dst);
float cpa_reference_round(float value, cpa_dtype dtype);

#endif
