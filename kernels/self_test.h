/* The table of what the self-test asks of a device: its kernels one by one, and a reference of another make. */
#ifndef CPA_KERNELS_SELF_TEST_H
#define CPA_KERNELS_SELF_TEST_H

#include <cpattn/ops.h>

#include "kernels/device.h"

/* reference_attend: attend by whole matrices in fp32, for the self-test: S = Q K^T, masked softmax, O = P V by a BLAS.
 * It knows no pages, shards, tiles or partial states: positions and limits come row by row and key by key. */
typedef struct cpa_reference_blas cpa_reference_blas;
typedef struct cpa_reference_attend_args {
    int64_t rows, keys;
    cpa_attention_shape shape;                /* heads and widths alone */
    const float *q;                           /* [rows, q_heads, k_dim], device, as all that follows */
    const float *k;                           /* [keys, kv_heads, k_dim] */
    const float *v;                           /* [keys, kv_heads, v_dim] */
    const int64_t *q_positions, *k_positions; /* [rows], [keys] */
    const int64_t *limits; /* [rows]: a row sees keys of an index below limit_base + limits[row] alone */
    int64_t limit_base;
    cpa_mask mask;
    float scale;
    float *o, *mass; /* [rows, q_heads, v_dim]: sum of p v, sum of p |v|; 0 for a row that sees no key */
    float *lse;      /* [rows, q_heads]; -inf then */
} cpa_reference_attend_args;

struct cpa_self_test_table {
    /* Makes attend take its path `index` wherever that fits, from the next call on, and gives its name; path 0 is the
     * best one. NULL past the last, and for -1: the best one again, as before the first call. */
    const char *(*attend_path)(cpa_device *device, int32_t index);
    /* A reference for attend, in devices whose capabilities have one. reference_open fails with CPA_UNSUPPORTED where
     * its library is missing. reference_attend allocates and synchronises. */
    cpa_status (*reference_open)(cpa_device *device, cpa_reference_blas **out, cpa_error *err);
    cpa_status (*reference_attend)(cpa_reference_blas *reference, const cpa_reference_attend_args *args,
                                   cpa_stream *stream);
    void (*reference_close)(cpa_reference_blas *reference);
};

#endif
