/* The inputs of cases: queries, keys and values as peaky as those of real models (kernels/synthesize.c), the same
 * whenever they are made from the same seed. Noise would hide a lost shard or a wrong mask. */
#ifndef CPA_CASES_INPUTS_H
#define CPA_CASES_INPUTS_H

#include "kernels/operators.h"

/* Rows of one tensor, [rows, heads, dim] in args.dtype to `out` on the host: those of args.positions, whose tokens are
 * made from them and the seed. */
cpa_status cpa_case_synthesize(cpa_synth_args args, void *out, cpa_error *err);

/* A whole sequence as floats that a dtype holds: q [length, q_heads, k_dim], k [length, kv_heads, k_dim],
 * v [length, kv_heads, v_dim], or NULL where values are the first v_dim elements of their keys. */
typedef struct cpa_case_sequence {
    int64_t length;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    float *q, *k, *v;
    int32_t v_in_k; /* 1: there are no values but those in keys */
} cpa_case_sequence;

/* Of runs of CPA_CASE_LIGHT_RUN tokens a share, evenly spread and not the first, may have light keys: times
 * CPA_CASE_LIGHT, so that their scores are next to 0 where others are peaky, and attention may leave them out. Whether a
 * position lies in such a run; and the keys [n, row] of these positions made so. */
enum { CPA_CASE_LIGHT_RUN = 256 };
#define CPA_CASE_LIGHT 0x1p-4f
int cpa_case_is_light(int64_t position, double share);
void cpa_case_lighten(void *keys, cpa_dtype dtype, int64_t row, const int64_t *positions, int64_t n, double share);

/* Makes the sequence, whose length, heads and widths are set; of its queries those from position q_first on, the others
 * are NaN. Released by cpa_case_sequence_release whatever the status. */
cpa_status cpa_case_sequence_make(cpa_case_sequence *sequence, uint64_t seed, int64_t q_first, cpa_dtype dtype,
                                  cpa_error *err);
void cpa_case_sequence_release(cpa_case_sequence *sequence);

#endif
