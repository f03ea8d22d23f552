/* Which position of a row turns which pair (cpa_rope of cpattn/nn.h), and the queries of latent_norm_rope as heads of
 * rotate, for every back end. */
#ifndef CPA_KERNELS_ROPE_H
#define CPA_KERNELS_ROPE_H

#include <cpattn/nn.h>

/* The positions that a row has: 3 with sections, of time, height and width. */
CPA_HOST_DEVICE static inline int32_t cpa_rope_streams(const cpa_rope *rope) {
    return rope->sections[0] | rope->sections[1] | rope->sections[2] ? 3 : 1;
}

/* Which of them turns a pair. */
CPA_HOST_DEVICE static inline int32_t cpa_rope_stream_of(const cpa_rope *rope, int32_t pair) {
    const int32_t *sections = rope->sections;
    if (rope->sections_interleaved) {
        const int32_t stream = pair % 3;
        return pair < 3 * sections[stream] ? stream : 0;
    }
    if (cpa_rope_streams(rope) == 1 || pair < sections[0]) return 0;
    return pair < sections[0] + sections[1] ? 1 : 2;
}

/* Whether each position of a row, of [streams, rows], lies in the table. */
CPA_HOST_DEVICE static inline int cpa_rope_is_in_table(const cpa_rope *rope, const int64_t *positions, int64_t rows,
                                                       int64_t row) {
    for (int32_t stream = 0; stream < cpa_rope_streams(rope); stream++) {
        const int64_t position = positions[stream * rows + row];
        if (position < 0 || position >= rope->max_position) return 0;
    }
    return 1;
}

/* What latent_norm_rope does to queries. */
static inline cpa_rotate_args cpa_latent_queries(const cpa_latent_norm_rope_args *a) {
    cpa_rotate_args q = {0};
    q.rows = a->rows;
    q.heads = a->shape.q_heads;
    q.dim = a->shape.k_dim - a->shape.v_dim;
    q.dtype = a->shape.dtype;
    q.x = a->q;
    q.x_stride = a->q_stride, q.x_head_stride = a->q_head_stride;
    q.rope = a->rope;
    q.positions = a->positions;
    q.out = a->q_out;
    q.out_stride = a->q_out_stride, q.out_head_stride = a->q_out_head_stride;
    return q;
}

#endif
