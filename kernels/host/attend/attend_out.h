/* How `out` of attend holds the result of a row: in the dtype of the queries, or as codes of one scale. */
#ifndef CPA_HOST_ATTEND_OUT_H
#define CPA_HOST_ATTEND_OUT_H

#include <cpattn/ops.h>

#include "base/convert.h"
#include "kernels/host/cache/quantise.h"

static inline int64_t cpa_host_out_bytes(const cpa_attend_args *args) {
    return args->out_scale ? 1 : cpa_dtype_bytes(args->q_dtype);
}

/* A row as codes of that scale, or where that is NULL as elements of the dtype. */
static inline void cpa_host_store_row(void *out, const float *o, cpa_dtype dtype, const float *scale, int64_t n) {
    if (scale)
        cpa_quantise_scaled(out, o, *scale, n);
    else
        cpa_narrow(out, o, dtype, n);
}

static inline void cpa_host_store_out(const cpa_attend_args *args, void *out, const float *o, int64_t n) {
    cpa_host_store_row(out, o, args->q_dtype, args->out_scale, n);
}

#endif
