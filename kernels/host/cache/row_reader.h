/* Rows of a cache as fp32, for the operators that take them out of their pages. */
#ifndef CPA_HOST_ROW_READER_H
#define CPA_HOST_ROW_READER_H

#include "kernels/host/cache/row_codes.h"
#include "kernels/host/cache/row_runs.h"
#include "kernels/host/device/host.h"

/* The key or the value of one token and head. `kv` is resolved, and `pool` that of its keys or values. */
static inline void cpa_row_read(const cpa_kv_view *kv, const cpa_kv_pool *pool, int64_t block, int64_t offset,
                                int32_t head, float *out) {
    const char *at = pool->memory + block * pool->block_stride;
    const char *words = at + pool->scales_at + (head * (int64_t)kv->block_size + offset) * pool->scale_bytes;
    char row[CPA_MAX_HEAD_DIM * sizeof(float)];
    cpa_runs_gather(row, at + offset * pool->token_stride + head * pool->head_stride, pool->run_bytes, pool->run_stride,
                    pool->row_bytes);
    if (cpa_dtype_is_quantised(kv->dtype))
        cpa_dequantise_row(out, row, pool->scale_bytes ? words : NULL, kv->dtype, pool->part,
                           cpa_kv_head_scale(pool, head), pool->row_dim, pool->dim);
    else
        cpa_widen(out, row, kv->dtype, pool->dim);
}

#endif
