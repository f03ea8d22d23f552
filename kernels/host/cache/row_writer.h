/* Rows of keys and values into their pages, for the operators that write a cache. */
#ifndef CPA_HOST_ROW_WRITER_H
#define CPA_HOST_ROW_WRITER_H

#include "base/check.h"
#include "kernels/host/cache/row_codes.h"
#include "kernels/host/cache/row_runs.h"
#include "kernels/host/device/host.h"

typedef struct cpa_row_writer {
    cpa_kv_view kv; /* strides resolved */
    cpa_kv_pool pools[2];
    cpa_dtype dtype; /* dtype of the rows that are written */
} cpa_row_writer;

static inline cpa_row_writer cpa_row_writer_of(const cpa_kv_view *kv, cpa_dtype dtype) {
    cpa_row_writer writer = {.kv = cpa_kv_view_resolve(*kv), .dtype = dtype};
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++)
        writer.pools[part] = cpa_kv_pool_of(&writer.kv, (cpa_kv_part)part);
    return writer;
}

/* Whether each slot is one of the cache, or -1. */
static inline cpa_status cpa_row_writer_check(const char *where, const cpa_row_writer *writer, const int64_t *slots,
                                              int64_t n, cpa_error *err) {
    const int64_t end = writer->kv.num_blocks * writer->kv.block_size;
    for (int64_t i = 0; i < n; i++) {
        if (slots[i] < -1 || slots[i] >= end)
            return cpa_fail(err, CPA_INVALID, "%s: slot_mapping[%lld] is %lld, expected -1..%lld", where, (long long)i,
                            (long long)slots[i], (long long)end - 1);
    }
    return CPA_OK;
}

/* Whether all of n elements, at most CPA_MAX_HEAD_DIM, are numbers. */
static inline int cpa_row_is_finite(const void *row, cpa_dtype dtype, int64_t n) {
    float wide[CPA_MAX_HEAD_DIM];
    int nonfinite = 0;
    cpa_widen(wide, row, dtype, n);
    for (int64_t i = 0; i < n; i++) nonfinite |= (cpa_float_bits(wide[i]) & 0x7f800000) == 0x7f800000;
    return !nonfinite;
}

/* The key or the value of one token and head. *nonfinite becomes 1 where it is not finite; NULL: nobody asks. */
static inline void cpa_row_writer_put(const cpa_row_writer *writer, cpa_kv_part part, int64_t slot, int32_t head,
                                      const void *row, uint8_t *nonfinite) {
    const cpa_kv_pool *pool = &writer->pools[part];
    const int64_t block_size = writer->kv.block_size, offset = slot % block_size;
    char *block = pool->memory + slot / block_size * pool->block_stride;
    char *place = block + offset * pool->token_stride + head * pool->head_stride;
    char whole[CPA_MAX_HEAD_DIM * sizeof(float)], *to = pool->runs == 1 ? place : whole;
    if (nonfinite && !cpa_row_is_finite(row, writer->dtype, pool->dim)) *nonfinite = 1;
    if (!cpa_dtype_is_quantised(writer->kv.dtype)) {
        cpa_convert(to, writer->kv.dtype, row, writer->dtype, pool->dim);
    } else {
        float wide[CPA_MAX_HEAD_DIM];
        cpa_widen(wide, row, writer->dtype, pool->dim);
        char *words = block + pool->scales_at + (head * block_size + offset) * pool->scale_bytes;
        cpa_quantise_row(to, words, pool->scale_bytes, wide, writer->kv.dtype, part, cpa_kv_head_scale(pool, head),
                         pool->dim);
    }
    if (pool->runs > 1) cpa_runs_scatter(place, whole, pool->run_bytes, pool->run_stride, pool->row_bytes);
}

#endif
