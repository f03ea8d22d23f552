/* The inner loops of linear in GCC vector code. A file that has the vectors of an instruction set (isa/vector.h),
 * defines
 *     ISA_OUTPUTS              outputs at a time: their accumulators, a vector for each ISA_LANES rows, fit the registers
 * and includes this one gets multiply_tile. An output is the sum over blocks of inputs of the sums over a block, both
 * in ascending order: blocks keep the error of long sums small, and x in the first cache. */
#include "base/convert.h"
#include "kernels/host/isa/vector.h"
#include "kernels/host/nn/linear_tile.h"

enum { ROWS = CPA_LINEAR_ROWS, VECTORS = ROWS / ISA_LANES, BLOCK = 256 };

/* Inputs [first, first + n) of the tile's rows, transposed. */
INLINE void pack_x(float *packed, const cpa_linear_tile *tile, int64_t first, int64_t n) {
    const int64_t bytes = cpa_dtype_bytes(tile->dtype), whole = n - n % ISA_CELL;
    for (int row = 0; row < ROWS; row += ISA_CELL) {
        for (int64_t d = 0; d < whole; d += ISA_CELL)
            isa_transpose(packed + d * ROWS + row, ROWS, &tile->x[row], tile->dtype, (int32_t)(first + d));
    }
    for (int row = 0; row < ROWS; row++) {
        for (int64_t d = whole; d < n; d++)
            cpa_widen(&packed[d * ROWS + row], tile->x[row] + (first + d) * bytes, tile->dtype, 1);
    }
}

/* n elements of a row as floats. */
INLINE void widen_row(float *wide, const char *row, cpa_dtype dtype, int64_t n) {
    const int64_t bytes = cpa_dtype_bytes(dtype), whole = n - n % ISA_LANES;
    for (int64_t d = 0; d < whole; d += ISA_LANES) store(wide + d, isa_load(row + d * bytes, dtype));
    cpa_widen(wide + whole, row + whole * bytes, dtype, n - whole);
}

/* The bits of e4m3 in the places of those of fp16, whose bias is 8 more: 2^-8 of the code, subnormals as well; NaN is
 * NaN. */
INLINE uint16_t half_of_code(uint8_t code) {
    const uint16_t magnitude = code & 0x7f, sign = (uint16_t)((code & 0x80) << 8);
    return (uint16_t)(sign | magnitude << 7 | (magnitude == 0x7f ? 0x7c00 : 0));
}

/* Inputs [first, first + n) of an output's weights, which are codes, as floats; n is at most BLOCK. */
INLINE void widen_codes(float *wide, const cpa_linear_tile *tile, int64_t output, int64_t first, int64_t n) {
    const uint8_t *codes = (const uint8_t *)tile->weight + output * tile->weight_stride + first;
    uint16_t halves[BLOCK];
    for (int64_t d = 0; d < n; d++) halves[d] = half_of_code(codes[d]);
    for (int64_t d = 0, end; d < n; d = end) { /* a scale after the other */
        const int64_t block = (first + d) / tile->scale_inputs;
        const float scale = tile->scales[output * tile->scale_stride + block] * 0x1p8f;
        end = (block + 1) * tile->scale_inputs - first;
        if (end > n) end = n;
        for (; d + ISA_LANES <= end; d += ISA_LANES)
            store(wide + d, isa_load((const char *)(halves + d), CPA_F16) * broadcast(scale));
        for (; d < end; d++) wide[d] = cpa_from_f16(halves[d]) * scale;
    }
}

/* sums[o][row] += the products of a block, for `outputs` outputs. */
INLINE void multiply_block(int outputs, float *sums, const float *x, const float *const *weights, int64_t n) {
    vec acc[ISA_OUTPUTS][VECTORS];
    for (int o = 0; o < outputs; o++) {
        for (int v = 0; v < VECTORS; v++) acc[o][v] = (vec){0};
    }
    for (int64_t d = 0; d < n; d++) {
        for (int o = 0; o < outputs; o++) {
            const vec w = broadcast(weights[o][d]);
            for (int v = 0; v < VECTORS; v++) acc[o][v] = isa_fma(load(x + d * ROWS + v * ISA_LANES), w, acc[o][v]);
        }
    }
    for (int o = 0; o < outputs; o++) {
        for (int v = 0; v < VECTORS; v++) *(loose_vec *)(sums + o * ROWS + v * ISA_LANES) += acc[o][v];
    }
}

#include "kernels/host/nn/linear_few_vector.h"

static void multiply_tile(const cpa_linear_tile *tile) {
    if (tile->rows <= CPA_LINEAR_FEW_ROWS) {
        multiply_few(tile);
        return;
    }
    const int64_t bytes = cpa_dtype_bytes(tile->dtype);
    float x[BLOCK * ROWS], wide[ISA_OUTPUTS][BLOCK];
    memset(tile->sums, 0, (size_t)(tile->outputs * ROWS) * sizeof *tile->sums);
    for (int64_t first = 0; first < tile->inputs; first += BLOCK) {
        const int64_t n = tile->inputs - first < BLOCK ? tile->inputs - first : BLOCK;
        pack_x(x, tile, first, n);
        for (int64_t o = 0; o < tile->outputs; o += ISA_OUTPUTS) {
            const char *weight = tile->weight + o * tile->weight_stride + first * bytes;
            const int64_t outputs = tile->outputs - o < ISA_OUTPUTS ? tile->outputs - o : ISA_OUTPUTS;
            const float *weights[ISA_OUTPUTS];
            for (int i = 0; i < outputs; i++, weight += tile->weight_stride) {
                weights[i] = tile->scales || tile->dtype != CPA_F32 ? wide[i] : (const float *)(const void *)weight;
                if (tile->scales) {
                    widen_codes(wide[i], tile, o + i, first, n);
                } else if (tile->dtype != CPA_F32) {
                    widen_row(wide[i], weight, tile->dtype, n);
                }
            }
            float *sums = tile->sums + o * ROWS;
            if (outputs == ISA_OUTPUTS) {
                multiply_block(ISA_OUTPUTS, sums, x, weights, n);
            } else {
                for (int i = 0; i < outputs; i++) multiply_block(1, sums + i * ROWS, x, &weights[i], n);
            }
        }
    }
}
