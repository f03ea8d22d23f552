/* The rotation of heads, in fp64. */
#ifndef CPA_HOST_TURN_H
#define CPA_HOST_TURN_H

#include <math.h>

#include "base/convert.h"
#include "kernels/rope.h"

/* Rotates the head [rope->first, ...) of a row, whose positions lie in the table. */
static inline void cpa_turn_head(double *head, const cpa_rope *rope, const int64_t *positions, int64_t rows,
                                 int64_t row) {
    const int32_t half = rope->dim / 2;
    const double sign = rope->inverse ? -1 : 1;
    for (int32_t i = 0; i < half; i++) {
        const float *cosines = rope->table + positions[cpa_rope_stream_of(rope, i) * rows + row] * rope->dim;
        double *x = &head[rope->first + (rope->interleaved ? 2 * i : i)], *y = x + (rope->interleaved ? 1 : half);
        const double a = *x, b = *y, c = (double)cosines[i], s = sign * (double)cosines[half + i];
        *x = a * c - b * s;
        *y = b * c + a * s;
    }
}

/* A head of a row from src, rotated, to out, rounded once; NaN where a position lies outside of the table, which it
 * returns. */
static inline int cpa_turn_row(const cpa_rope *rope, const int64_t *positions, int64_t rows, int64_t row,
                               const void *src, void *out, cpa_dtype dtype, int32_t dim) {
    float narrow[CPA_MAX_HEAD_DIM];
    double head[CPA_MAX_HEAD_DIM];
    const int is_outside = !cpa_rope_is_in_table(rope, positions, rows, row);
    cpa_widen(narrow, src, dtype, dim);
    for (int32_t i = 0; i < dim; i++) head[i] = is_outside ? (double)NAN : (double)narrow[i];
    if (!is_outside) cpa_turn_head(head, rope, positions, rows, row);
    for (int32_t i = 0; i < dim; i++) narrow[i] = (float)head[i];
    cpa_narrow(out, narrow, dtype, dim);
    return is_outside;
}

/* The heads of a row of rotate. */
static inline void cpa_turn_heads(const cpa_rotate_args *a, int64_t row) {
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    for (int32_t head = 0; head < a->heads; head++) {
        const char *x = (const char *)a->x + (row * a->x_stride + head * a->x_head_stride) * bytes;
        char *out = (char *)a->out + (row * a->out_stride + head * a->out_head_stride) * bytes;
        const int is_outside = cpa_turn_row(&a->rope, a->positions, a->rows, row, x, out, a->dtype, a->dim);
        if (is_outside && a->outside) a->outside[row] = 1;
    }
}

#endif
