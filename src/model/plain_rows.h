/* The rows of a plain forward, in fp32, and what its parts do to them with the tensors of the files. */
#ifndef CPA_MODEL_PLAIN_ROWS_H
#define CPA_MODEL_PLAIN_ROWS_H

#include "src/model/model_config.h"
#include "src/model/plain_choice.h"
#include "src/model/safetensors.h"

typedef struct cpa_plain {
    const cpa_model_config *config;
    const cpa_safetensors *files;
    cpa_dtype dtype;          /* what weights and every result are rounded to */
    int64_t count;            /* tokens of the sequence */
    const int64_t *positions; /* [n_positions] of the tokens that are asked for */
    int64_t n_positions;
    cpa_plain_choices choices;
    float *weight;   /* one matrix, or vector, of the files */
    float *bias;     /* the vector that goes with it */
    float *residual; /* [count, hidden] */
    float *x;        /* [count, hidden] */
    float *q;        /* [count, q_heads, k_dim], as all that follows of the heads that are attended */
    float *k;        /* [count, kv_heads, k_dim] */
    float *v;        /* [count, kv_heads, v_dim] */
    float *mixed;    /* [count, q_heads, v_dim]: the results of attention */
    /* Of latent attention. */
    float *q_latent; /* [count, latent.q_latent] */
    float *latent;   /* [count, latent.latent], and while they are one product latent.rope more in each row */
    float *rotated;  /* [count, latent.rope]: what the keys of all heads have in common */
    float *expanded; /* [count, q_heads, latent.nope + latent.value] */
    /* Of an indexer. */
    float *index_q;       /* [count, index.heads, index.dim] */
    float *index_k;       /* [count, index.dim] */
    float *index_weights; /* [count, index.heads] */
    float *index_scores;  /* [cpa_plain_index_room(count)] */
    float *index_chosen;  /* [CPA_PLAIN_SCORE_ROWS, count]: 1 for the keys that a row attends, else 0 */
    /* Of feed-forwards. */
    float *gate, *up; /* [count, intermediate], of an expert the same */
    float *shares;    /* [count, experts]: how much an expert counts for a token, 0 where that does not choose it */
    float *chosen;    /* [count, hidden]: rows of the tokens that choose an expert, then what it gives for them */
    float *summed;    /* [count, hidden]: what experts have given, by their shares */
    float *scores;    /* [CPA_PLAIN_SCORE_ROWS, count] */
    float *angles;    /* [max_position, rope.dim], of cpa_rope_table */
    cpa_error *err;
} cpa_plain;
enum { CPA_PLAIN_SCORE_ROWS = 64 }; /* queries whose scores are computed at once */

/* The name of a layer's tensor. */
typedef struct cpa_plain_name {
    char text[128];
} cpa_plain_name;
cpa_plain_name cpa_plain_name_of(int32_t layer, const char *part, const char *kind);

/* Rounds to a dtype that is no codes, and to that of the forward. */
void cpa_plain_round_to(cpa_dtype dtype, float *values, int64_t n);
void cpa_plain_round(const cpa_plain *f, float *values, int64_t n);

/* The elements [first, first + elements) of the tensor of that name, which has `whole`, as floats. */
cpa_status cpa_plain_read_part(const cpa_plain *f, const char *name, int64_t whole, int64_t first, int64_t elements,
                               float *out);
cpa_status cpa_plain_read(const cpa_plain *f, const char *name, int64_t elements, float *out);

/* out [rows, outputs] = x [rows, inputs] * f->weight^T, not rounded. */
void cpa_plain_multiply(const cpa_plain *f, int64_t rows, const float *x, int64_t inputs, int64_t outputs, float *out);
/* out [count, outputs] = x [count, inputs] * weight^T + bias, of the layer's linear part. */
cpa_status cpa_plain_linear(cpa_plain *f, int32_t layer, const char *part, int has_bias, const float *x, int64_t inputs,
                            int64_t outputs, float *out);
/* The first n of f->gate = silu(gate) * up. */
void cpa_plain_activate(cpa_plain *f, int64_t n);

/* Each of `rows` rows of x, a width apart, over its root mean square, times the weights. */
void cpa_plain_normalise(const float *x, int64_t rows, int64_t width, const float *weight, float eps, float *out);
/* Rotates the elements [0, rope.dim) of each of count * heads rows, a stride apart: pairs (i, i + rope.dim / 2), or
 * (2 i, 2 i + 1). */
void cpa_plain_rotate(const cpa_plain *f, float *x, int32_t heads, int64_t stride, int interleaved);
/* f->x = the norm of the residual. */
cpa_status cpa_plain_norm(cpa_plain *f, const char *name);
/* The residual += f->x. */
void cpa_plain_add(cpa_plain *f);

#endif
