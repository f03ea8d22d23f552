/* Rows of entries (cpattn/compress.h): their sums, their rotation, and their way into a cache. */
#ifndef CPA_HOST_ENTRY_ROW_H
#define CPA_HOST_ENTRY_ROW_H

#include "kernels/compress.h"
#include "kernels/host/cache/row_writer.h"

/* The sum of squares of 2^k elements, at most CPA_ENTRY_DIM. */
static inline float cpa_entry_squares(const float *x, int32_t dim) {
    float sum[CPA_ENTRY_DIM];
    for (int32_t i = 0; i < dim; i++) sum[i] = x[i] * x[i];
    for (int32_t n = dim / 2; n > 0; n /= 2)
        for (int32_t i = 0; i < n; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
    return sum[0];
}

/* Rotates a row in place; `sign` -1: back. NaN where the position lies outside of the table. */
static inline void cpa_entry_turn(float *x, int32_t dim, const cpa_rope *rope, int64_t position, float sign) {
    if (position < 0 || position >= rope->max_position) {
        for (int32_t i = 0; i < dim; i++) x[i] = NAN;
        return;
    }
    const float *cosines = rope->table + position * rope->dim, *sines = cosines + rope->dim / 2;
    for (int32_t i = 0; i < rope->dim / 2; i++) {
        float *pair = x + rope->first + 2 * i;
        cpa_turn_pair(&pair[0], &pair[1], cosines[i], sign * sines[i]);
    }
}

/* Codes of a row of bf16 with a power of two, which goes behind the rows of its block. */
static inline void cpa_entry_put_codes(const cpa_row_writer *writer, int64_t slot, const float *x) {
    const cpa_kv_pool *pool = &writer->pools[CPA_KEYS];
    const int64_t block_size = writer->kv.block_size, offset = slot % block_size;
    char *block = pool->memory + slot / block_size * pool->block_stride;
    const float scale = cpa_power_of(cpa_power_exponent(cpa_largest_of(x, pool->dim), CPA_ENTRY_FLOOR));
    uint8_t *codes = (uint8_t *)block + offset * pool->token_stride;
    for (int32_t i = 0; i < pool->dim; i++) codes[i] = cpa_to_e4m3(x[i] / scale);
    memcpy(block + pool->scales_at + offset * pool->scale_bytes, &scale, sizeof scale);
}

/* The row, rounded to bf16, into the cache; the writer takes bf16. */
static inline void cpa_entry_put(const cpa_row_writer *writer, int64_t slot, const float *x) {
    uint16_t row[CPA_ENTRY_DIM];
    float rounded[CPA_ENTRY_DIM];
    const cpa_kv_pool *pool = &writer->pools[CPA_KEYS];
    cpa_narrow(row, x, CPA_BF16, pool->dim);
    if (writer->kv.dtype != CPA_FP8_E4M3 || !pool->scale_bytes) {
        cpa_row_writer_put(writer, CPA_KEYS, slot, 0, row, NULL);
        return;
    }
    cpa_widen(rounded, row, CPA_BF16, pool->dim);
    cpa_entry_put_codes(writer, slot, rounded);
}

/* Whether each slot is below `end`; those below 0 skip their token. */
static inline cpa_status cpa_entry_check_slots(const char *where, const int64_t *slots, int64_t n, int64_t end,
                                               cpa_error *err) {
    for (int64_t i = 0; i < n; i++) {
        if (slots[i] >= end)
            return cpa_fail(err, CPA_INVALID, "%s: slots[%lld] is %lld, expected at most %lld", where, (long long)i,
                            (long long)slots[i], (long long)end - 1);
    }
    return CPA_OK;
}

#endif
