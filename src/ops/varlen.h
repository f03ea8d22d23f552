/* What attention without a cache is made of, for those who deal segments over ranks. */
#ifndef CPA_OPS_VARLEN_H
#define CPA_OPS_VARLEN_H

#include <cpattn/varlen.h>

#include "kernels/operators.h"

/* The checked batch, with k_starts, and its shape, whose dtypes are left to the caller; device NULL: any. */
cpa_status cpa_varlen_check_batch(const cpa_device *device, const cpa_varlen_batch *given, cpa_varlen_batch *out,
                                  cpa_attention_shape *shape, cpa_error *err);

/* Some rows, from q_row on, of a segment of n_q queries and n_k keys against all of its keys; the row of the first key
 * is entry `table`. The first rows of a segment sit before its first key if they are more than the keys. */
static inline cpa_attend_item cpa_varlen_item(const cpa_varlen_part *part, int64_t q_row, int64_t n_q, int64_t n_k,
                                              int64_t table) {
    return (cpa_attend_item){.q_row = q_row,
                             .q_count = part->q_count,
                             .q_first = part->q_first + n_k - n_q,
                             .k_count = n_k,
                             .table = table,
                             .q_set = {CPA_TOKENS_ALL, 0},
                             .k_set = {CPA_TOKENS_ALL, 0}};
}

/* Makes a plan that of these items, whose keys begin at rows first_keys [n] of tensors of `keys` rows; `rows` ends
 * those of q. For cpa_varlen_attend. */
cpa_status cpa_varlen_set_items(cpa_attend_plan *plan, const cpa_attention_shape *shape, const cpa_attend_item *items,
                                const int32_t *first_keys, int64_t n, int64_t rows, int64_t keys, int causal,
                                cpa_error *err);

/* Whether a plan and a stream take the arguments. */
cpa_status cpa_varlen_check_args(const cpa_attend_plan *plan, const cpa_varlen_attend_args *args,
                                 const cpa_stream *stream, cpa_error *err);

#endif
