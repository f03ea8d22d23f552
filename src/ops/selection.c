/* Masks of bytes, and patterns of blocks, become masks of bits. */
#include <cpattn/selection.h>

#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/ops/check_args.h"

cpa_status cpa_mask_pack(const uint8_t *visible, int64_t rows, int64_t width, int64_t row_stride, uint32_t *bits) {
    const int64_t words = width > 0 ? cpa_mask_words(width) : 0;
    if (rows < 0 || width < 0 || row_stride < 0 || (row_stride > 0 && row_stride < width)) return CPA_INVALID;
    if (rows == 0 || width == 0) return CPA_OK;
    if (!visible || !bits) return CPA_INVALID;
    memset(bits, 0, (size_t)(rows * words) * sizeof *bits);
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *from = visible + row * (row_stride ? row_stride : width);
        for (int64_t i = 0; i < width; i++) bits[row * words + i / 32] |= (uint32_t)(from[i] != 0) << (i % 32);
    }
    return CPA_OK;
}

static cpa_status check_pattern(const cpa_block_pattern *p, const uint32_t *bits, cpa_error *err) {
    const char *where = "block pattern";
    CPA_TRY(cpa_check_heads(where, p->q_heads, p->kv_heads, err));
    REQUIRE(err, p->first_head >= 0 && p->first_head <= CPA_MOST_HEADS - p->q_heads,
            "%s: first_head is %d with %d heads, expected 0 to %d", where, p->first_head, p->q_heads,
            CPA_MOST_HEADS - p->q_heads);
    REQUIRE(err, p->local_blocks >= 0 && p->vert_stride >= 1,
            "%s: local_blocks is %d and vert_stride %d, expected 0 or more, and at least 1", where, p->local_blocks,
            p->vert_stride);
    REQUIRE(err, p->head_step > -CPA_MOST_HEADS && p->head_step < CPA_MOST_HEADS,
            "%s: head_step is %d, expected less than %d either way", where, p->head_step, CPA_MOST_HEADS);
    REQUIRE(err, p->first_row >= 0 && p->first_row <= CPA_MOST_TOKENS && p->rows >= 0 && p->rows <= INT32_MAX,
            "%s: %lld rows from block %lld on, expected 0 or more, up to 2^31 - 1, from one up to 2^44", where,
            (long long)p->rows, (long long)p->first_row);
    REQUIRE(err, p->k_blocks >= 0 && p->k_blocks <= INT32_MAX, "%s: k_blocks is %lld, expected 0 to 2^31 - 1", where,
            (long long)p->k_blocks);
    REQUIRE(err, bits || p->rows == 0 || p->k_blocks == 0, "%s: bits is NULL", where);
    return cpa_check_aligned(where, "bits", bits, sizeof *bits, err);
}

static int shows(const cpa_block_pattern *p, int64_t offset, int64_t row, int64_t block) {
    return block <= row && (block > row - p->local_blocks || (block + offset) % p->vert_stride == 0);
}

cpa_status cpa_block_pattern_bits(const cpa_block_pattern *given, uint32_t *bits, cpa_error *err) {
    cpa_block_pattern p;
    CPA_TRY(CPA_STRUCT_TAKE("block pattern", given, cpa_block_pattern, k_blocks, &p, err));
    CPA_TRY(check_pattern(&p, bits, err));
    const int64_t words = cpa_mask_words(p.k_blocks), group = p.q_heads / p.kv_heads;
    for (int64_t head = 0; head < p.q_heads; head++) {
        const int64_t number = p.first_head + head;
        const int64_t offset = (p.head_step >= 0 ? number * p.head_step : number / group * -p.head_step) + 1;
        for (int64_t row = 0; row < p.rows; row++) {
            uint32_t *of = bits + (head * p.rows + row) * words;
            for (int64_t word = 0; word < words; word++) of[word] = 0;
            for (int64_t block = 0; block < p.k_blocks && block <= p.first_row + row; block++)
                of[block / 32] |= (uint32_t)shows(&p, offset, p.first_row + row, block) << block % 32;
        }
    }
    return CPA_OK;
}
