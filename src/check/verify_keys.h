/* Keys and values that a part brings, as floats: as they lie in the cache, and as rows of a form attend them. Values of
 * latents are the first columns of these; keys and values that are expanded from them are computed here in float64 and
 * rounded to the dtype, as they are in a workspace of the device. */
#ifndef CPA_VERIFY_KEYS_H
#define CPA_VERIFY_KEYS_H

#include "src/check/verify_gather.h"

enum { CPA_VERIFY_KEYS_AT_ONCE = 64 };

/* Some tokens of a piece. */
typedef struct cpa_verify_keys {
    /* Rows as they lie, [n, k_dim] and [n, v_dim] of the cache; of latents there are no values. */
    float k_raw[CPA_VERIFY_KEYS_AT_ONCE * CPA_MAX_HEAD_DIM], v_raw[CPA_VERIFY_KEYS_AT_ONCE * CPA_MAX_HEAD_DIM];
    /* [n, k_dim] and [n, v_dim] of the form. */
    float k[CPA_VERIFY_KEYS_AT_ONCE * CPA_MAX_HEAD_DIM], v[CPA_VERIFY_KEYS_AT_ONCE * CPA_MAX_HEAD_DIM];
} cpa_verify_keys;

/* Brings what the keys of a head of a form are expanded by, if they are: cpa_form_rows.expansion of the head. */
cpa_status cpa_verify_expansion_take(cpa_verify_tensor *tensor, const cpa_worker *worker, int32_t form, int32_t layer,
                                     int32_t head, cpa_error *err);

/* The n tokens from `first` on of a piece: k_raw and v_raw. */
void cpa_verify_read_keys(const cpa_verify *verify, const cpa_verify_part *part, int32_t rank, int64_t first, int64_t n,
                          cpa_verify_keys *keys);
/* What a form makes of them: k and v. `expansion`: the matrix of the head; read where the form is expanded. */
void cpa_verify_shape_keys(const cpa_verify *verify, const cpa_form *form, const float *expansion, int64_t n,
                           cpa_verify_keys *keys);

#endif
