/* What the parts of a plain forward share: the sequence's rows in fp32, and how tensors of the files are read. */
#ifndef CPA_MODEL_PLAIN_INTERNAL_H
#define CPA_MODEL_PLAIN_INTERNAL_H

#include "src/model/plain_forward.h"

/* Heads as they are attended, of the keys and values of which every kind of attention has rows. */
typedef struct cpa_plain_heads {
    int32_t q_heads, kv_heads, k_dim, v_dim;
    float scale; /* of scores */
} cpa_plain_heads;
cpa_plain_heads cpa_plain_heads_of(const cpa_model_config *config);

typedef struct cpa_plain {
    const cpa_plain_question *question;
    const cpa_model_config *config;
    int64_t count;
    float *weight;    /* one matrix, or vector, of the files */
    float *bias;      /* the vector that goes with it */
    float *residual;  /* [count, hidden] */
    float *x;         /* [count, hidden] */
    float *q;         /* [count, q_heads, k_dim] */
    float *k;         /* [count, kv_heads, k_dim] */
    float *v;         /* [count, kv_heads, v_dim] */
    float *mixed;     /* [count, q_heads, v_dim]: the results of attention */
    float *gate, *up; /* [count, intermediate] */
    float *scores;    /* [CPA_PLAIN_SCORE_ROWS, count] */
    float *angles;    /* [max_position, rope.dim], of cpa_rope_table */
    float *q_latent;  /* [count, latent.q_latent] */
    float *latent;    /* [count, latent.latent], and while they are one product latent.rope more in each row */
    float *rotated;   /* [count, latent.rope]: what the keys of all heads have in common */
    float *expanded;  /* [count, q_heads, latent.nope + latent.value] */
    cpa_error *err;
} cpa_plain;
enum { CPA_PLAIN_SCORE_ROWS = 64 }; /* queries whose scores are computed at once */

/* The name of a layer's tensor. */
typedef struct cpa_plain_name {
    char text[128];
} cpa_plain_name;
cpa_plain_name cpa_plain_name_of(int32_t layer, const char *part, const char *kind);

/* The tensor of that name as floats; it has so many elements. */
cpa_status cpa_plain_read(const cpa_plain *f, const char *name, int64_t elements, float *out);

/* Rounds to the dtype of the question. */
void cpa_plain_round(const cpa_plain *f, float *values, int64_t n);

/* out [count, outputs] = x [count, inputs] * weight^T + bias, of the layer's linear part. */
cpa_status cpa_plain_linear(cpa_plain *f, int32_t layer, const char *part, int has_bias, const float *x, int64_t inputs,
                            int64_t outputs, float *out);

/* Rows of x, a stride apart, over the root mean square of their first `width` elements, times the weights. */
void cpa_plain_normalise(const float *x, int64_t rows, int64_t stride, int64_t width, const float *weight, float eps,
                         float *out, int64_t out_stride);
/* x = the norm of the residual. */
cpa_status cpa_plain_norm(cpa_plain *f, const char *name);
/* The residual += x. */
void cpa_plain_add(cpa_plain *f);

/* Attention of a layer, from its norm to its sum. */
cpa_status cpa_plain_attention(cpa_plain *f, int32_t layer);

#endif
