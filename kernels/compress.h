/* The arithmetic of cpattn/compress.h, for every back end: operations in the order written, each rounded once; compiled
 * without contraction (CUDA: -fmad=false), so that all have the same bits. */
#ifndef CPA_KERNELS_COMPRESS_H
#define CPA_KERNELS_COMPRESS_H

#include <math.h>
#include <string.h>

#include <cpattn/compress.h>

/* Sums over a window are those of rows w with the same w modulo this, ascending; then (s0 + s1) + (s2 + s3). */
enum { CPA_WINDOW_PARTS = 4 };

/* Elements that share a scale of inverse_rope_quant, and the floors of largest magnitudes. */
enum { CPA_RESULT_TILE = 128 };
#define CPA_RESULT_FLOOR 1e-10f
#define CPA_ENTRY_FLOOR 1e-4f

/* e^x for x <= 0; NaN for NaN. With ln(2) = 0.693359375 - 0.000212194..., n times the first part is exact. */
CPA_HOST_DEVICE static inline float cpa_compress_exp(float x) {
    const float log2_e = 0x1.715476p+0f, round = 0x1.8p+23f, ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f;
    const float terms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1, 1};
    if (x < -87.0f) return 0;
    const float shifted = x * log2_e + round, n = shifted - round;
    const float r = (x - n * ln2_high) - n * ln2_low;
    float sum = terms[0];
    for (int i = 1; i < 8; i++) sum = sum * r + terms[i];
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127) << 23; /* what was added to the bits of 1.5 2^23 is n */
    float power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

/* The exponent, with the bias of fp32, of the scale of elements of that largest magnitude, that over 448 = 1.75 * 2^8
 * rounded up to a power of two; and the scale. A mantissa up to that of 1.75 needs no rounding up. */
CPA_HOST_DEVICE static inline uint32_t cpa_power_exponent(float largest, float floor) {
    const float most = largest > floor ? largest : floor;
    uint32_t bits;
    memcpy(&bits, &most, sizeof bits);
    return ((bits + 0x1fffff) >> 23) - 8;
}
CPA_HOST_DEVICE static inline float cpa_power_of(uint32_t exponent) {
    const uint32_t bits = exponent << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* What a row of that sum of squares is multiplied by. */
CPA_HOST_DEVICE static inline float cpa_entry_norm(float squares, int32_t dim, float eps) {
    return 1 / sqrtf(squares / (float)dim + eps);
}

CPA_HOST_DEVICE static inline void cpa_turn_pair(float *x, float *y, float cosine, float sine) {
    const float a = *x, b = *y;
    *x = a * cosine - b * sine;
    *y = b * cosine + a * sine;
}

/* Elements of a row of the state in front of its scores. */
CPA_HOST_DEVICE static inline int32_t cpa_compress_width(const cpa_compress_state *state) {
    return state->overlap ? 2 * state->head : state->head;
}

/* Whether a token ends an entry. */
CPA_HOST_DEVICE static inline int cpa_compress_ends(const cpa_compress_state *state, int64_t position) {
    return position >= 0 && (position + 1) % state->ratio == 0;
}

/* A row of the window of a token that ends an entry: its keys, of one head, and how many elements behind them its
 * scores lie; NULL: it would lie in front of position 0. */
typedef struct cpa_window_row {
    const float *keys;
    int64_t scores;
} cpa_window_row;

CPA_HOST_DEVICE static inline int32_t cpa_window_rows(const cpa_compress_state *state) {
    return state->overlap ? 2 * state->ratio : state->ratio;
}

/* The index of its `w`-th row in its sequence, whether that row lies in a halo, and whether it is none. */
CPA_HOST_DEVICE static inline int64_t cpa_window_index(const cpa_compress_write_args *a, int64_t token, int32_t w) {
    return (a->indices ? a->indices[token] : a->positions[token]) - cpa_window_rows(&a->state) + 1 + w;
}
CPA_HOST_DEVICE static inline int cpa_window_is_halo(const cpa_compress_write_args *a, int64_t token, int32_t w) {
    return a->halo_slots && a->state.overlap && w < a->state.ratio && a->halo_slots[token] >= 0;
}
CPA_HOST_DEVICE static inline int cpa_window_is_before(const cpa_compress_write_args *a, int64_t token, int32_t w) {
    return a->positions[token] - cpa_window_rows(&a->state) + 1 + w < 0;
}

/* What is out of range by which the row is found, with its name; -1: nothing is. */
CPA_HOST_DEVICE static inline int64_t cpa_window_fault(const cpa_compress_write_args *a, int64_t token, int32_t w,
                                                       const char **what) {
    const cpa_compress_state *s = &a->state;
    const int64_t sequence = a->sequences[token], below = (int64_t)1 << 62; /* stands for what is negative */
    *what = "sequence";
    if (sequence < 0 || sequence >= a->n_sequences) return sequence < 0 ? below : sequence;
    if (cpa_window_is_before(a, token, w)) return -1;
    *what = "halo slot";
    if (cpa_window_is_halo(a, token, w)) return a->halo_slots[token] < a->n_halos ? -1 : a->halo_slots[token];
    const int64_t index = cpa_window_index(a, token, w);
    *what = "index of the window";
    if (index < 0 || index / s->block_size >= a->table_stride) return index < 0 ? below : index;
    const int64_t block = a->tables[sequence * a->table_stride + index / s->block_size];
    *what = "block of the state";
    return block >= 0 && block < s->num_blocks ? -1 : block < 0 ? below : block;
}

CPA_HOST_DEVICE static inline cpa_window_row cpa_window_row_of(const cpa_compress_write_args *a, int64_t token,
                                                               int32_t w) {
    const cpa_compress_state *s = &a->state;
    const int64_t width = cpa_compress_width(s);
    cpa_window_row row = {NULL, width};
    if (cpa_window_is_before(a, token, w)) return row;
    if (cpa_window_is_halo(a, token, w)) {
        row.keys = a->halo + ((int64_t)a->halo_slots[token] * s->ratio + w) * 2 * s->head;
        row.scores = s->head;
        return row;
    }
    const int64_t index = cpa_window_index(a, token, w);
    const int64_t block = a->tables[a->sequences[token] * a->table_stride + index / s->block_size];
    row.keys = s->rows + (block * s->block_size + index % s->block_size) * 2 * width;
    if (s->overlap && w >= s->ratio) row.keys += s->head;
    return row;
}

#endif
