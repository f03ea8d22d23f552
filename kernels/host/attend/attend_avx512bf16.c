/* The inner loops of attend for AVX-512 with VDPBF16PS, of bf16 queries over bf16 keys and values. The instruction adds
 * the product of the second elements of two pairs to a sum in fp32, rounds, then that of the first; it takes denormals
 * for zeros and gives none (Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS). */
#include "kernels/host/isa/isa_avx512.h"

#define ISA_ROWS 12
#define ISA_PAIRS

#include "kernels/host/attend/attend_vector.h"

/* acc[r] += a[r * stride], a pair, times (left, right). */
INLINE void accumulate_pairs(const int rows, block *acc, const float *a, int64_t stride, vec left, vec right) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const __m512bh pair = (__m512bh)_mm512_set1_ps(a[r * stride]);
        acc->left[r] = _mm512_dpbf16_ps(acc->left[r], pair, (__m512bh)left);
        acc->right[r] = _mm512_dpbf16_ps(acc->right[r], pair, (__m512bh)right);
    }
}

INLINE void score_words(const int rows, const float *q, const float *k, int32_t words, float scale, float *s,
                        coming *next) {
    block acc;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc.left[r] = acc.right[r] = broadcast(0);
    for (int32_t word = 0; word < words; word++, k += PANEL) {
        if (next) request(next, 1);
        accumulate_pairs(rows, &acc, q + word, Q_WORDS, load(k), load(k + ISA_LANES));
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(s + r * TILE, acc.left[r] * scale);
        store(s + r * TILE + ISA_LANES, acc.right[r] * scale);
    }
}

INLINE void weigh_words(const int rows, const float *p, const float *v, int32_t pairs, float *o, int64_t o_stride,
                        coming *next) {
    block acc;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        acc.left[r] = load(o + r * o_stride);
        acc.right[r] = load(o + r * o_stride + ISA_LANES);
    }
    for (int32_t pair = 0; pair < pairs; pair++, v += PANEL) {
        if (next) request(next, 1);
        accumulate_pairs(rows, &acc, p + pair, P_STRIDE, load(v), load(v + ISA_LANES));
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(o + r * o_stride, acc.left[r]);
        store(o + r * o_stride + ISA_LANES, acc.right[r]);
    }
}

#include "kernels/host/attend/attend_twelve_rows.h"

static int supported(void) {
    return cpa_attend_avx512.supported() && __builtin_cpu_supports("avx512bf16");
}

const cpa_attend_isa cpa_attend_avx512bf16 = {
    .name = "VDPBF16PS",
    .rows = ISA_ROWS,
    .lanes = PANEL,
    .pairs = 1,
    .supported = supported,
    .pack = pack_tile,
    .attend = attend_group,
};
