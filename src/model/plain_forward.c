#include "src/model/plain_forward.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cblas.h>

#include <cpattn/experts.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"

/* Queries whose scores are computed at once. */
enum { SCORE_ROWS = 64 };

typedef struct forward {
    const cpa_plain_question *question;
    const cpa_model_config *config;
    int64_t count;
    float *weight;    /* one matrix, or vector, of the files */
    float *bias;      /* the vector that goes with it */
    float *residual;  /* [count, hidden] */
    float *x;         /* [count, hidden] */
    float *q;         /* [count, q_heads, head_dim] */
    float *k, *v;     /* [count, kv_heads, head_dim] */
    float *mixed;     /* [count, q_heads, head_dim]: the results of attention */
    float *gate, *up; /* [count, intermediate], of an expert the same */
    float *shares;    /* [count, experts]: how much an expert counts for a token, 0 where that does not choose it */
    float *chosen;    /* [count, hidden]: rows of the tokens that choose an expert, then what it gives for them */
    float *summed;    /* [count, hidden]: what experts have given, by their shares */
    float *scores;    /* [SCORE_ROWS, count] */
    float *angles;    /* [max_position, rope.dim], of cpa_rope_table */
    cpa_error *err;
} forward;

/* Rounds to the dtype of the question. */
static void round_all(const forward *f, float *values, int64_t n) {
    enum { AT_ONCE = 1024 };
    uint16_t narrow[AT_ONCE];
    if (f->question->dtype == CPA_F32) return;
    for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t part = cpa_min64(AT_ONCE, n - at);
        cpa_narrow(narrow, values + at, f->question->dtype, part);
        cpa_widen(values + at, narrow, f->question->dtype, part);
    }
}

/* The elements [first, first + elements) of the tensor of that name, which has `whole`, as floats. */
static cpa_status read_part(const forward *f, const char *name, int64_t whole, int64_t first, int64_t elements,
                            float *out) {
    enum { AT_ONCE = 1024 };
    float aligned[AT_ONCE]; /* wide enough for any dtype */
    const cpa_tensor *tensor = cpa_safetensors_find(f->question->files, name);
    if (!tensor || !tensor->plain || tensor->elements != whole) {
        return cpa_fail(f->err, CPA_INVALID, "%s: found %s, expected a tensor of %lld elements", name,
                        tensor ? "another shape or dtype" : "nothing", (long long)whole);
    }
    const int64_t bytes = cpa_dtype_bytes(tensor->dtype);
    for (int64_t at = 0; at < elements; at += AT_ONCE) {
        const int64_t part = cpa_min64(AT_ONCE, elements - at);
        memcpy(aligned, (const char *)tensor->data + (first + at) * bytes, (size_t)(part * bytes));
        cpa_widen(out + at, aligned, tensor->dtype, part);
    }
    round_all(f, out, elements);
    return CPA_OK;
}

static cpa_status read_tensor(const forward *f, const char *name, int64_t elements, float *out) {
    return read_part(f, name, elements, 0, elements, out);
}

/* The name of a layer's tensor. */
typedef struct tensor_name {
    char text[128];
} tensor_name;
static tensor_name name_of(int32_t layer, const char *part, const char *kind) {
    tensor_name name;
    snprintf(name.text, sizeof name.text, "model.layers.%d.%s.%s", layer, part, kind);
    return name;
}

/* out [rows, outputs] = x [rows, inputs] * weight^T + bias, of the layer's linear part. */
static cpa_status linear(forward *f, int32_t layer, const char *part, int has_bias, const float *x, int64_t inputs,
                         int64_t outputs, float *out) {
    const int64_t rows = f->count;
    CPA_TRY(read_tensor(f, name_of(layer, part, "weight").text, outputs * inputs, f->weight));
    for (int64_t o = 0; o < outputs; o++) f->bias[o] = 0;
    if (has_bias) CPA_TRY(read_tensor(f, name_of(layer, part, "bias").text, outputs, f->bias));
    for (int64_t row = 0; row < rows; row++) memcpy(out + row * outputs, f->bias, (size_t)outputs * sizeof *out);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)outputs, (int)inputs, 1, x, (int)inputs,
                f->weight, (int)inputs, 1, out, (int)outputs);
    round_all(f, out, rows * outputs);
    return CPA_OK;
}

/* Each of `rows` rows of x, a width apart, over its root mean square, times the weights. */
static void normalise(const forward *f, const float *x, int64_t rows, int64_t width, const float *weight, float *out) {
    for (int64_t row = 0; row < rows; row++) {
        double sum = 0;
        for (int64_t i = 0; i < width; i++) sum += (double)x[row * width + i] * x[row * width + i];
        const double scale = 1 / sqrt(sum / (double)width + f->config->norm_eps);
        for (int64_t i = 0; i < width; i++) out[row * width + i] = (float)(x[row * width + i] * scale * weight[i]);
    }
}

static cpa_status norm(forward *f, const char *name, float *out) {
    CPA_TRY(read_tensor(f, name, f->config->hidden, f->weight));
    normalise(f, f->residual, f->count, f->config->hidden, f->weight, out);
    round_all(f, out, f->count * f->config->hidden);
    return CPA_OK;
}

/* The norms of heads, where the model has them, and rotary positions (neox pairs). */
static cpa_status place(forward *f, int32_t layer, const char *part, float *x, int32_t heads) {
    const int32_t dim = f->config->head_dim, rotated = f->config->rope.dim, half = rotated / 2;
    const int64_t rows = f->count * heads;
    if (f->config->qk_norm) {
        CPA_TRY(read_tensor(f, name_of(layer, part, "weight").text, dim, f->weight));
        normalise(f, x, rows, dim, f->weight, x);
    }
    for (int64_t row = 0; row < rows; row++) {
        const float *cosines = f->angles + row / heads * rotated, *sines = cosines + half;
        float *head = x + row * dim;
        for (int32_t i = 0; i < half; i++) {
            const float a = head[i], b = head[i + half];
            head[i] = a * cosines[i] - b * sines[i];
            head[i + half] = b * cosines[i] + a * sines[i];
        }
    }
    round_all(f, x, rows * dim);
    return CPA_OK;
}

/* Turns the scores of a query at a position into weights: 0 for keys that it does not see. */
static void softmax(float *scores, int64_t position, int64_t window, int64_t count) {
    const int64_t first = window > 0 ? cpa_max64(0, position - window + 1) : 0;
    float most = -INFINITY;
    double sum = 0;
    for (int64_t key = first; key <= position; key++) most = fmaxf(most, scores[key]);
    for (int64_t key = 0; key < count; key++) {
        scores[key] = key >= first && key <= position ? expf(scores[key] - most) : 0;
        sum += scores[key];
    }
    for (int64_t key = first; key <= position; key++) scores[key] = (float)(scores[key] / sum);
}

static void attend(forward *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    const int dim = c->head_dim, q_width = c->q_heads * dim, kv_width = c->kv_heads * dim;
    const float scale = (float)(1 / sqrt(dim));
    for (int32_t head = 0; head < c->q_heads; head++) {
        const int64_t kv = (int64_t)(head / (c->q_heads / c->kv_heads)) * dim;
        for (int64_t first = 0; first < f->count; first += SCORE_ROWS) {
            const int64_t rows = cpa_min64(SCORE_ROWS, f->count - first), keys = first + rows;
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)keys, dim, scale,
                        f->q + first * q_width + head * dim, q_width, f->k + kv, kv_width, 0, f->scores, (int)keys);
            for (int64_t row = 0; row < rows; row++)
                softmax(f->scores + row * keys, first + row, c->windows[layer], keys);
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, dim, (int)keys, 1, f->scores, (int)keys,
                        f->v + kv, kv_width, 0, f->mixed + first * q_width + head * dim, q_width);
        }
    }
    round_all(f, f->mixed, f->count * q_width);
}

static void add_to_residual(forward *f) {
    const int64_t n = f->count * f->config->hidden;
    for (int64_t i = 0; i < n; i++) f->residual[i] += f->x[i];
    round_all(f, f->residual, n);
}

static cpa_status attention(forward *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    const int64_t q_width = (int64_t)c->q_heads * c->head_dim, kv_width = (int64_t)c->kv_heads * c->head_dim;
    CPA_TRY(norm(f, name_of(layer, "input_layernorm", "weight").text, f->x));
    CPA_TRY(linear(f, layer, "self_attn.q_proj", c->qkv_bias, f->x, c->hidden, q_width, f->q));
    CPA_TRY(linear(f, layer, "self_attn.k_proj", c->qkv_bias, f->x, c->hidden, kv_width, f->k));
    CPA_TRY(linear(f, layer, "self_attn.v_proj", c->qkv_bias, f->x, c->hidden, kv_width, f->v));
    CPA_TRY(place(f, layer, "self_attn.q_norm", f->q, c->q_heads));
    CPA_TRY(place(f, layer, "self_attn.k_norm", f->k, c->kv_heads));
    attend(f, layer);
    CPA_TRY(linear(f, layer, "self_attn.o_proj", c->o_bias, f->mixed, q_width, c->hidden, f->x));
    add_to_residual(f);
    return CPA_OK;
}

/* gate = silu(gate) * up, of rows of a width. */
static void activate(forward *f, int64_t n) {
    for (int64_t i = 0; i < n; i++) f->gate[i] = f->gate[i] / (1 + expf(-f->gate[i])) * f->up[i];
    round_all(f, f->gate, n);
}

static cpa_status dense(forward *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    CPA_TRY(linear(f, layer, "mlp.gate_proj", c->mlp_bias, f->x, c->hidden, c->intermediate, f->gate));
    CPA_TRY(linear(f, layer, "mlp.up_proj", c->mlp_bias, f->x, c->hidden, c->intermediate, f->up));
    activate(f, f->count * c->intermediate);
    return linear(f, layer, "mlp.down_proj", c->mlp_bias, f->gate, c->intermediate, c->hidden, f->x);
}

/* Of those that are not taken; the first of equal ones. */
static int32_t index_of_largest(const float *values, int32_t n, const uint8_t *taken) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* From a token's router logits to the shares of its experts: softmax; the largest, of equal ones the first; and what
 * the others have is left out. */
static void choose(const cpa_moe_config *moe, float *row) {
    uint8_t taken[CPA_MOST_EXPERTS] = {0};
    double sum = 0, kept = 0;
    const float most = row[index_of_largest(row, moe->experts, taken)];
    for (int32_t e = 0; e < moe->experts; e++) sum += exp((double)row[e] - most);
    for (int32_t k = 0; k < moe->top_k; k++) {
        const int32_t e = index_of_largest(row, moe->experts, taken);
        kept += exp((double)row[e] - most) / sum;
        taken[e] = 1;
    }
    for (int32_t e = 0; e < moe->experts; e++) {
        const double share = exp((double)row[e] - most) / sum;
        row[e] = taken[e] ? (float)(moe->renormalise ? share / kept : share) : 0;
    }
}

/* The matrix [outputs, inputs] of an expert, to f->weight. Gates and what they scale are one tensor where a layer's
 * experts are. */
typedef enum expert_part { EXPERT_GATE, EXPERT_UP, EXPERT_DOWN } expert_part;
static cpa_status read_expert(forward *f, int32_t layer, int32_t expert, expert_part part, int64_t elements) {
    static const char *const names[][3] = {
        [CPA_MOE_MIXTRAL] = {"w1", "w3", "w2"}, [CPA_MOE_QWEN3] = {"gate_proj", "up_proj", "down_proj"}};
    const cpa_moe_config *moe = &f->config->moe;
    const tensor_name joined = name_of(layer, "mlp.experts", part == EXPERT_DOWN ? "down_proj" : "gate_up_proj");
    char name[64];
    if (cpa_safetensors_find(f->question->files, joined.text)) {
        const int64_t parts = part == EXPERT_DOWN ? 1 : 2, first = parts * expert + (part == EXPERT_UP);
        return read_part(f, joined.text, parts * moe->experts * elements, first * elements, elements, f->weight);
    }
    snprintf(name, sizeof name, "%s.experts.%d.%s", moe->names == CPA_MOE_MIXTRAL ? "block_sparse_moe" : "mlp", expert,
             names[moe->names][part]);
    return read_tensor(f, name_of(layer, name, "weight").text, elements, f->weight);
}

/* out [rows, outputs] = x [rows, inputs] * f->weight^T, not rounded. */
static void multiply(const forward *f, int64_t rows, const float *x, int64_t inputs, int64_t outputs, float *out) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)outputs, (int)inputs, 1, x, (int)inputs,
                f->weight, (int)inputs, 0, out, (int)outputs);
}

/* What an expert gives for the tokens that choose it in f->chosen, in their place. */
static cpa_status run_expert(forward *f, int32_t layer, int32_t expert, int64_t rows) {
    const int64_t hidden = f->config->hidden, inner = f->config->moe.intermediate;
    CPA_TRY(read_expert(f, layer, expert, EXPERT_GATE, inner * hidden));
    multiply(f, rows, f->chosen, hidden, inner, f->gate);
    round_all(f, f->gate, rows * inner);
    CPA_TRY(read_expert(f, layer, expert, EXPERT_UP, inner * hidden));
    multiply(f, rows, f->chosen, hidden, inner, f->up);
    round_all(f, f->up, rows * inner);
    activate(f, rows * inner);
    CPA_TRY(read_expert(f, layer, expert, EXPERT_DOWN, hidden * inner));
    multiply(f, rows, f->gate, inner, hidden, f->chosen);
    round_all(f, f->chosen, rows * hidden);
    return CPA_OK;
}

static cpa_status mixture(forward *f, int32_t layer) {
    const cpa_moe_config *moe = &f->config->moe;
    const int64_t hidden = f->config->hidden;
    const int joined =
        cpa_safetensors_find(f->question->files, name_of(layer, "mlp.experts", "down_proj").text) != NULL;
    const char *router = moe->names == CPA_MOE_MIXTRAL && !joined ? "block_sparse_moe.gate" : "mlp.gate";
    CPA_TRY(read_tensor(f, name_of(layer, router, "weight").text, moe->experts * hidden, f->weight));
    multiply(f, f->count, f->x, hidden, moe->experts,
             f->shares); /* in fp32 whatever the dtype, as choices hang on it */
    for (int64_t row = 0; row < f->count; row++) choose(moe, f->shares + row * moe->experts);
    memset(f->summed, 0, (size_t)(f->count * hidden) * sizeof *f->summed);
    for (int32_t e = 0; e < moe->experts; e++) {
        int64_t rows = 0, taken = 0;
        for (int64_t row = 0; row < f->count; row++) {
            if (f->shares[row * moe->experts + e] == 0) continue;
            memcpy(f->chosen + rows++ * hidden, f->x + row * hidden, (size_t)hidden * sizeof *f->x);
        }
        if (rows > 0) CPA_TRY(run_expert(f, layer, e, rows));
        for (int64_t row = 0; row < f->count; row++) {
            const float share = f->shares[row * moe->experts + e];
            if (share == 0) continue;
            for (int64_t i = 0; i < hidden; i++) f->summed[row * hidden + i] += share * f->chosen[taken * hidden + i];
            taken++;
        }
    }
    memcpy(f->x, f->summed, (size_t)(f->count * hidden) * sizeof *f->x);
    round_all(f, f->x, f->count * hidden);
    return CPA_OK;
}

static cpa_status feed_forward(forward *f, int32_t layer) {
    CPA_TRY(norm(f, name_of(layer, "post_attention_layernorm", "weight").text, f->x));
    CPA_TRY(f->config->moe.sparse[layer] ? mixture(f, layer) : dense(f, layer));
    add_to_residual(f);
    return CPA_OK;
}

static cpa_status embed(forward *f) {
    const int64_t hidden = f->config->hidden;
    CPA_TRY(read_tensor(f, "model.embed_tokens.weight", (int64_t)f->config->vocabulary * hidden, f->weight));
    for (int64_t row = 0; row < f->count; row++)
        memcpy(f->residual + row * hidden, f->weight + f->question->tokens[row] * hidden,
               (size_t)hidden * sizeof *f->weight);
    return CPA_OK;
}

static cpa_status head(forward *f, float *logits) {
    const cpa_plain_question *q = f->question;
    const int64_t hidden = f->config->hidden, vocabulary = f->config->vocabulary;
    const char *name = f->config->tied ? "model.embed_tokens.weight" : "lm_head.weight";
    CPA_TRY(norm(f, "model.norm.weight", f->x));
    for (int64_t i = 0; i < q->n_positions; i++) /* the rows that are wanted; what the residual was is done with */
        memcpy(f->residual + i * hidden, f->x + q->positions[i] * hidden, (size_t)hidden * sizeof *f->x);
    CPA_TRY(read_tensor(f, name, vocabulary * hidden, f->weight));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)q->n_positions, (int)vocabulary, (int)hidden, 1,
                f->residual, (int)hidden, f->weight, (int)hidden, 0, logits, (int)vocabulary);
    return CPA_OK;
}

static cpa_status run(forward *f, float *logits) {
    cpa_rope_config rope = f->config->rope;
    rope.max_position = f->count;
    CPA_TRY(cpa_rope_table(&rope, f->angles, f->err));
    CPA_TRY(embed(f));
    for (int32_t layer = 0; layer < f->config->layers; layer++) {
        CPA_TRY(attention(f, layer));
        CPA_TRY(feed_forward(f, layer));
    }
    return head(f, logits);
}

/* The floats of each member of `forward`, one allocation for all. */
static int64_t lay_out(forward *f, float *memory) {
    const cpa_model_config *c = f->config;
    const int64_t q_width = (int64_t)c->q_heads * c->head_dim, kv_width = (int64_t)c->kv_heads * c->head_dim;
    const int64_t tokens = f->count, mixed = c->moe.experts ? tokens * c->hidden : 0;
    const int64_t inner = cpa_max64(c->intermediate, c->moe.experts ? c->moe.intermediate : 0);
    const int64_t widest = cpa_max64(cpa_max64(c->vocabulary, c->moe.experts), cpa_max64(inner, q_width));
    const int64_t matrix = cpa_max64(widest, 1) * c->hidden;
    const struct {
        float **member;
        int64_t floats;
    } parts[] = {
        {&f->weight, matrix},
        {&f->bias, cpa_max64(widest, c->hidden)},
        {&f->residual, cpa_max64(tokens, f->question->n_positions) * c->hidden},
        {&f->x, tokens * c->hidden},
        {&f->q, tokens * q_width},
        {&f->k, tokens * kv_width},
        {&f->v, tokens * kv_width},
        {&f->mixed, tokens * q_width},
        {&f->gate, tokens * inner},
        {&f->up, tokens * inner},
        {&f->shares, tokens * c->moe.experts},
        {&f->chosen, mixed},
        {&f->summed, mixed},
        {&f->scores, SCORE_ROWS * tokens},
        {&f->angles, tokens * c->rope.dim},
    };
    int64_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].member = memory ? memory + used : NULL;
        used += parts[i].floats;
    }
    return used;
}

static cpa_status check(const cpa_plain_question *q, cpa_error *err) {
    for (int64_t i = 0; i < q->count; i++) {
        if (q->tokens[i] < (uint32_t)q->config->vocabulary) continue;
        return cpa_fail(err, CPA_INVALID, "token %lld: found %u, expected less than the vocabulary, %d", (long long)i,
                        q->tokens[i], q->config->vocabulary);
    }
    for (int64_t i = 0; i < q->n_positions; i++) {
        if (q->positions[i] < 0 || q->positions[i] >= q->count)
            return cpa_fail(err, CPA_INVALID, "position %lld of %lld tokens", (long long)q->positions[i],
                            (long long)q->count);
    }
    return CPA_OK;
}

cpa_status cpa_plain_forward(const cpa_plain_question *question, float *logits, cpa_error *err) {
    forward f = {.question = question, .config = question->config, .count = question->count, .err = err};
    CPA_TRY(check(question, err));
    if (question->count == 0 || question->n_positions == 0) return CPA_OK;
    const int64_t floats = lay_out(&f, NULL);
    float *memory = malloc((size_t)floats * sizeof *memory);
    if (!memory)
        return cpa_fail(err, CPA_NO_MEMORY, "a plain forward of %lld tokens needs %lld MiB, which are not there",
                        (long long)question->count, (long long)(floats >> 18));
    lay_out(&f, memory);
    cpa_status status = run(&f, logits);
    free(memory);
    return status;
}
