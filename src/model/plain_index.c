#include "src/model/plain_index.h"

#include <math.h>
#include <stdlib.h>

#include "base/check.h"

/* LayerNorm (Ba et al., arXiv:1607.06450) of each key. */
static cpa_status norm_keys(cpa_plain *f, int32_t layer) {
    const int32_t dim = f->config->index.dim;
    CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, "self_attn.indexer.k_norm", "weight").text, dim, f->weight));
    CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, "self_attn.indexer.k_norm", "bias").text, dim, f->bias));
    for (int64_t row = 0; row < f->count; row++) {
        float *k = f->index_k + row * dim;
        double mean = 0, variance = 0;
        for (int32_t i = 0; i < dim; i++) mean += k[i];
        mean /= dim;
        for (int32_t i = 0; i < dim; i++) variance += (k[i] - mean) * (k[i] - mean);
        const double scale = 1 / sqrt(variance / dim + (double)CPA_INDEX_NORM_EPS);
        for (int32_t i = 0; i < dim; i++) k[i] = (float)((k[i] - mean) * scale * f->weight[i] + f->bias[i]);
    }
    cpa_plain_round(f, f->index_k, f->count * dim);
    return CPA_OK;
}

cpa_status cpa_plain_index(cpa_plain *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    const int64_t heads = c->index.heads, dim = c->index.dim;
    const cpa_dtype kept = c->index.dtype == CPA_F32 ? CPA_F32 : CPA_BF16; /* by caches */
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.indexer.wk", 0, f->x, c->hidden, dim, f->index_k));
    CPA_TRY(norm_keys(f, layer));
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.indexer.wq_b", 0, f->q_latent, c->latent.q_latent, heads * dim,
                             f->index_q));
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.indexer.weights_proj", 0, f->x, c->hidden, heads, f->index_weights));
    cpa_plain_rotate(f, f->index_k, 1, dim, 0);
    cpa_plain_rotate(f, f->index_q, (int32_t)heads, dim, 0);
    cpa_plain_round_to(kept, f->index_k, f->count * dim);
    cpa_plain_round_to(kept, f->index_q, f->count * heads * dim);
    return CPA_OK;
}

typedef struct scored_key {
    float score;
    int32_t index;
} scored_key;

int64_t cpa_plain_index_room(int64_t keys) {
    return keys * (int64_t)(sizeof(scored_key) / sizeof(float));
}

static int by_score(const void *a, const void *b) {
    const scored_key *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

/* The sum over heads of weight * max(query . key, 0); what the weights are divided by changes no order. */
static float score_of(const cpa_plain *f, int64_t position, int64_t key) {
    const cpa_index_form *c = &f->config->index;
    const float *q = f->index_q + position * c->heads * c->dim, *k = f->index_k + key * c->dim;
    double sum = 0;
    for (int32_t h = 0; h < c->heads; h++, q += c->dim) {
        double product = 0;
        for (int32_t i = 0; i < c->dim; i++) product += (double)q[i] * k[i];
        if (product > 0) sum += product * f->index_weights[position * c->heads + h];
    }
    return (float)sum;
}

void cpa_plain_index_choose(const cpa_plain *f, int64_t position, float *chosen) {
    const int64_t keys = position + 1, most = f->config->index.k;
    scored_key *scored = (scored_key *)(void *)f->index_scores;
    for (int64_t key = 0; key < keys; key++) chosen[key] = keys <= most;
    if (keys <= most) return;
    for (int64_t key = 0; key < keys; key++) scored[key] = (scored_key){score_of(f, position, key), (int32_t)key};
    qsort(scored, (size_t)keys, sizeof *scored, by_score);
    for (int64_t i = 0; i < most; i++) chosen[scored[i].index] = 1;
}
