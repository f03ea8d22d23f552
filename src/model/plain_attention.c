#include "src/model/plain_attention.h"

#include <math.h>
#include <string.h>

#include <cblas.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/model/plain_index.h"

cpa_plain_heads cpa_plain_heads_of(const cpa_model_config *c) {
    const cpa_latent_config *l = &c->latent;
    if (l->latent) return (cpa_plain_heads){c->q_heads, c->q_heads, l->nope + l->rope, l->value, l->scale};
    return (cpa_plain_heads){c->q_heads, c->kv_heads, c->head_dim, c->head_dim, (float)(1 / sqrt(c->head_dim))};
}

/* The norms of heads, where the model has them, and rotary positions. */
static cpa_status place(cpa_plain *f, int32_t layer, const char *part, float *x, int32_t heads) {
    const int32_t dim = f->config->head_dim;
    const int64_t rows = f->count * heads;
    if (f->config->qk_norm) {
        CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, part, "weight").text, dim, f->weight));
        cpa_plain_normalise(x, rows, dim, f->weight, f->config->norm_eps, x);
    }
    cpa_plain_rotate(f, x, heads, dim, 0);
    cpa_plain_round(f, x, rows * dim);
    return CPA_OK;
}

static cpa_status ordinary_heads(cpa_plain *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    const int64_t q_width = (int64_t)c->q_heads * c->head_dim, kv_width = (int64_t)c->kv_heads * c->head_dim;
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.q_proj", c->qkv_bias, f->x, c->hidden, q_width, f->q));
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.k_proj", c->qkv_bias, f->x, c->hidden, kv_width, f->k));
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.v_proj", c->qkv_bias, f->x, c->hidden, kv_width, f->v));
    CPA_TRY(place(f, layer, "self_attn.q_norm", f->q, c->q_heads));
    return place(f, layer, "self_attn.k_norm", f->k, c->kv_heads);
}

/* Rows of the norms within attention, in place. */
static cpa_status norm_rows(cpa_plain *f, int32_t layer, const char *part, float *x, int64_t width) {
    CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, part, "weight").text, width, f->weight));
    cpa_plain_normalise(x, f->count, width, f->weight, f->config->latent.norm_eps, x);
    cpa_plain_round(f, x, f->count * width);
    return CPA_OK;
}

static cpa_status latent_queries(cpa_plain *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    const cpa_latent_config *l = &c->latent;
    const int64_t dim = l->nope + l->rope, width = c->q_heads * dim;
    if (l->q_latent) {
        CPA_TRY(cpa_plain_linear(f, layer, "self_attn.q_a_proj", 0, f->x, c->hidden, l->q_latent, f->q_latent));
        CPA_TRY(norm_rows(f, layer, "self_attn.q_a_layernorm", f->q_latent, l->q_latent));
        CPA_TRY(cpa_plain_linear(f, layer, "self_attn.q_b_proj", 0, f->q_latent, l->q_latent, width, f->q));
    } else {
        CPA_TRY(cpa_plain_linear(f, layer, "self_attn.q_proj", 0, f->x, c->hidden, width, f->q));
    }
    cpa_plain_rotate(f, f->q + l->nope, c->q_heads, dim, l->interleaved);
    cpa_plain_round(f, f->q, f->count * width);
    return CPA_OK;
}

/* What all heads share: a latent row, and behind it what is rotated. */
static cpa_status shared_rows(cpa_plain *f, int32_t layer) {
    const cpa_latent_config *l = &f->config->latent;
    const int64_t width = l->latent + l->rope, hidden = f->config->hidden;
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.kv_a_proj_with_mqa", 0, f->x, hidden, width, f->latent));
    for (int64_t row = 0; row < f->count; row++) {
        const float *from = f->latent + row * width;
        memcpy(f->rotated + row * l->rope, from + l->latent, (size_t)l->rope * sizeof *from);
        memmove(f->latent + row * l->latent, from, (size_t)l->latent * sizeof *from);
    }
    cpa_plain_rotate(f, f->rotated, 1, l->rope, l->interleaved);
    cpa_plain_round(f, f->rotated, f->count * l->rope);
    return norm_rows(f, layer, "self_attn.kv_a_layernorm", f->latent, l->latent);
}

static cpa_status latent_heads(cpa_plain *f, int32_t layer) {
    const cpa_latent_config *l = &f->config->latent;
    const int32_t heads = f->config->q_heads;
    const int64_t both = l->nope + l->value, dim = l->nope + l->rope;
    CPA_TRY(latent_queries(f, layer));
    CPA_TRY(shared_rows(f, layer));
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.kv_b_proj", 0, f->latent, l->latent, heads * both, f->expanded));
    for (int64_t i = 0; i < f->count * heads; i++) {
        const float *from = f->expanded + i * both;
        memcpy(f->k + i * dim, from, (size_t)l->nope * sizeof *from);
        memcpy(f->k + i * dim + l->nope, f->rotated + i / heads * l->rope, (size_t)l->rope * sizeof *from);
        memcpy(f->v + i * l->value, from + l->nope, (size_t)l->value * sizeof *from);
    }
    return CPA_OK;
}

/* Turns the scores of a query at a position into weights: 0 for keys that it does not see, or has not chosen. */
static void softmax(float *scores, int64_t position, int64_t window, int64_t count, const float *chosen) {
    const int64_t first = window > 0 ? cpa_max64(0, position - window + 1) : 0;
    float most = -INFINITY;
    double sum = 0;
    for (int64_t key = first; key <= position; key++)
        if (!chosen || chosen[key] > 0) most = fmaxf(most, scores[key]);
    for (int64_t key = 0; key < count; key++) {
        const int attended = key >= first && key <= position && (!chosen || chosen[key] > 0);
        scores[key] = attended ? expf(scores[key] - most) : 0;
        sum += scores[key];
    }
    for (int64_t key = first; key <= position; key++) scores[key] = (float)(scores[key] / sum);
}

/* The rows [first, first + rows) of a head. */
static void attend_head(cpa_plain *f, int64_t window, int32_t head, int64_t first, int64_t rows) {
    const cpa_plain_heads h = cpa_plain_heads_of(f->config);
    const int q_width = h.q_heads * h.k_dim, k_width = h.kv_heads * h.k_dim;
    const int v_width = h.kv_heads * h.v_dim, out_width = h.q_heads * h.v_dim;
    const int64_t kv = head / (h.q_heads / h.kv_heads), keys = first + rows;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)keys, h.k_dim, h.scale,
                f->q + first * q_width + head * h.k_dim, q_width, f->k + kv * h.k_dim, k_width, 0, f->scores,
                (int)keys);
    for (int64_t row = 0; row < rows; row++) {
        const float *chosen = f->config->index.heads ? f->index_chosen + row * f->count : NULL;
        softmax(f->scores + row * keys, first + row, window, keys, chosen);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, h.v_dim, (int)keys, 1, f->scores, (int)keys,
                f->v + kv * h.v_dim, v_width, 0, f->mixed + first * out_width + head * h.v_dim, out_width);
}

static void attend(cpa_plain *f, int64_t window) {
    const cpa_plain_heads h = cpa_plain_heads_of(f->config);
    for (int64_t first = 0; first < f->count; first += CPA_PLAIN_SCORE_ROWS) {
        const int64_t rows = cpa_min64(CPA_PLAIN_SCORE_ROWS, f->count - first);
        for (int64_t row = 0; row < rows && f->config->index.heads; row++)
            cpa_plain_index_choose(f, first + row, f->index_chosen + row * f->count);
        for (int32_t head = 0; head < h.q_heads; head++) attend_head(f, window, head, first, rows);
    }
    cpa_plain_round(f, f->mixed, f->count * h.q_heads * h.v_dim);
}

cpa_status cpa_plain_attention(cpa_plain *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    const cpa_plain_heads h = cpa_plain_heads_of(c);
    CPA_TRY(cpa_plain_norm(f, cpa_plain_name_of(layer, "input_layernorm", "weight").text));
    CPA_TRY(c->latent.latent ? latent_heads(f, layer) : ordinary_heads(f, layer));
    if (c->index.heads) CPA_TRY(cpa_plain_index(f, layer));
    attend(f, c->windows[layer]);
    CPA_TRY(cpa_plain_linear(f, layer, "self_attn.o_proj", c->o_bias, f->mixed, (int64_t)h.q_heads * h.v_dim, c->hidden,
                             f->x));
    cpa_plain_add(f);
    return CPA_OK;
}
