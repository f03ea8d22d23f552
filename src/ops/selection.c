/* Masks of bytes become masks of bits. */
#include <cpattn/selection.h>

#include <string.h>

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
