#include "src/model/plain_forward.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/model/plain_attention.h"
#include "src/model/plain_index.h"
#include "src/model/plain_mixture.h"

static cpa_status dense(cpa_plain *f, int32_t layer) {
    const cpa_model_config *c = f->config;
    CPA_TRY(cpa_plain_linear(f, layer, "mlp.gate_proj", c->mlp_bias, f->x, c->hidden, c->intermediate, f->gate));
    CPA_TRY(cpa_plain_linear(f, layer, "mlp.up_proj", c->mlp_bias, f->x, c->hidden, c->intermediate, f->up));
    cpa_plain_activate(f, f->count * c->intermediate);
    return cpa_plain_linear(f, layer, "mlp.down_proj", c->mlp_bias, f->gate, c->intermediate, c->hidden, f->x);
}

static cpa_status feed_forward(cpa_plain *f, int32_t layer) {
    CPA_TRY(cpa_plain_norm(f, cpa_plain_name_of(layer, "post_attention_layernorm", "weight").text));
    CPA_TRY(f->config->moe.sparse[layer] ? cpa_plain_mixture(f, layer) : dense(f, layer));
    cpa_plain_add(f);
    return CPA_OK;
}

static cpa_status embed(cpa_plain *f, const uint32_t *tokens) {
    const int64_t hidden = f->config->hidden;
    CPA_TRY(cpa_plain_read(f, "model.embed_tokens.weight", (int64_t)f->config->vocabulary * hidden, f->weight));
    for (int64_t row = 0; row < f->count; row++)
        memcpy(f->residual + row * hidden, f->weight + tokens[row] * hidden, (size_t)hidden * sizeof *f->weight);
    return CPA_OK;
}

static cpa_status head(cpa_plain *f, const cpa_plain_question *q, float *logits) {
    const int64_t hidden = f->config->hidden, vocabulary = f->config->vocabulary;
    const char *name = f->config->tied ? "model.embed_tokens.weight" : "lm_head.weight";
    CPA_TRY(cpa_plain_norm(f, "model.norm.weight"));
    for (int64_t i = 0; i < q->n_positions; i++) /* the rows that are wanted; what the residual was is done with */
        memcpy(f->residual + i * hidden, f->x + q->positions[i] * hidden, (size_t)hidden * sizeof *f->x);
    CPA_TRY(cpa_plain_read(f, name, vocabulary * hidden, f->weight));
    cpa_plain_multiply(f, q->n_positions, f->residual, hidden, vocabulary, logits);
    return CPA_OK;
}

static cpa_status run(cpa_plain *f, const cpa_plain_question *question, float *logits) {
    cpa_rope_config rope = f->config->rope;
    rope.max_position = f->count;
    CPA_TRY(cpa_rope_table(&rope, f->angles, f->err));
    CPA_TRY(embed(f, question->tokens));
    for (int32_t layer = 0; layer < f->config->layers; layer++) {
        CPA_TRY(cpa_plain_attention(f, layer));
        CPA_TRY(feed_forward(f, layer));
    }
    return head(f, question, logits);
}

/* The floats of each member, one allocation for all. */
static int64_t lay_out(cpa_plain *f, int64_t positions, float *memory) {
    const cpa_model_config *c = f->config;
    const cpa_latent_config *l = &c->latent;
    const cpa_plain_heads heads = cpa_plain_heads_of(c);
    const int64_t tokens = f->count, mixed = c->moe.experts ? tokens * c->hidden : 0;
    const int64_t inner =
        cpa_max64(c->intermediate, c->moe.experts ? cpa_max64(c->moe.intermediate, c->moe.shared) : 0);
    const int64_t expanded = l->latent ? (int64_t)c->q_heads * (l->nope + l->value) : 0;
    const int64_t attended = (int64_t)heads.q_heads * cpa_max64(heads.k_dim, heads.v_dim);
    const int64_t indexed = (int64_t)c->index.heads * c->index.dim;
    const int64_t outputs[] = {c->vocabulary, c->hidden,           inner,  c->moe.experts, attended, l->q_latent,
                               expanded,      l->latent + l->rope, indexed};
    int64_t widest = 0;
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) widest = cpa_max64(widest, outputs[i]);
    const struct {
        float **member;
        int64_t floats;
    } parts[] = {
        {&f->weight, widest * cpa_max64(c->hidden, cpa_max64(l->q_latent, l->latent))},
        {&f->bias, widest},
        {&f->residual, cpa_max64(tokens, positions) * c->hidden},
        {&f->x, tokens * c->hidden},
        {&f->q, tokens * heads.q_heads * heads.k_dim},
        {&f->k, tokens * heads.kv_heads * heads.k_dim},
        {&f->v, tokens * heads.kv_heads * heads.v_dim},
        {&f->mixed, tokens * heads.q_heads * heads.v_dim},
        {&f->q_latent, tokens * l->q_latent},
        {&f->latent, tokens * (l->latent + l->rope)},
        {&f->rotated, tokens * l->rope},
        {&f->expanded, tokens * expanded},
        {&f->index_q, tokens * c->index.heads * c->index.dim},
        {&f->index_k, tokens * c->index.dim},
        {&f->index_weights, tokens * c->index.heads},
        {&f->index_scores, c->index.heads ? cpa_plain_index_room(tokens) : 0},
        {&f->index_chosen, c->index.heads ? CPA_PLAIN_SCORE_ROWS * tokens : 0},
        {&f->gate, tokens * inner},
        {&f->up, tokens * inner},
        {&f->shares, tokens * c->moe.experts},
        {&f->chosen, mixed},
        {&f->summed, mixed},
        {&f->scores, CPA_PLAIN_SCORE_ROWS * tokens},
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
    cpa_plain f = {.config = question->config,
                   .files = question->files,
                   .dtype = question->dtype,
                   .count = question->count,
                   .positions = question->positions,
                   .n_positions = question->n_positions,
                   .choices = question->choices,
                   .err = err};
    CPA_TRY(check(question, err));
    if (question->count == 0 || question->n_positions == 0) return CPA_OK;
    const int64_t floats = lay_out(&f, question->n_positions, NULL);
    float *memory = malloc((size_t)floats * sizeof *memory);
    if (!memory)
        return cpa_fail(err, CPA_NO_MEMORY, "a plain forward of %lld tokens needs %lld MiB, which are not there",
                        (long long)question->count, (long long)(floats >> 18));
    lay_out(&f, question->n_positions, memory);
    cpa_status status = run(&f, question, logits);
    free(memory);
    return status;
}
