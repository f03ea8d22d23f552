#include "src/model/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>

#include "base/check.h"
#include "kernels/device.h"
#include "src/model/expert_weights.h"
#include "src/model/weight_loader.h"

/* Of a tensor in memory: as aligned as any operator asks for. */
#define ALIGNMENT 256

/* Gives out pieces of a memory; without one it only counts them. */
typedef struct arena {
    char *memory;
    int64_t used, element_bytes;
} arena;

static void *take(arena *a, int64_t elements) {
    char *piece = a->memory ? a->memory + a->used : NULL;
    a->used += (elements * a->element_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return piece;
}

static void *take_if(int present, arena *a, int64_t elements) {
    return present ? take(a, elements) : NULL;
}

static void *take_floats(arena *a, int64_t n) {
    return take(a, n * (int64_t)sizeof(float) / a->element_bytes);
}

static int64_t qkv_width(const cpa_model_config *c) {
    return (int64_t)(c->q_heads + 2 * c->kv_heads) * c->head_dim;
}

static int64_t q_width(const cpa_model_config *c) {
    return (int64_t)c->q_heads * c->head_dim;
}

/* Of the results of attention. */
static int64_t out_width(const cpa_model_config *c) {
    return c->latent.latent ? (int64_t)c->q_heads * c->latent.value : q_width(c);
}

/* What a rank has of the matrices that are sliced: rows of qkv, of gates, and of the head, columns of o and of down; and
 * its experts. */
typedef struct own_slices {
    cpa_slice qkv, o, inner, head, experts;
} own_slices;

cpa_slice cpa_own_experts(int32_t experts, int32_t ranks, int32_t rank) {
    const int64_t first = cpa_first_expert(experts, ranks, rank);
    return (cpa_slice){first, cpa_first_expert(experts, ranks, rank + 1) - first};
}

static own_slices slices_of(const cpa_model_config *c, cpa_weights_part part) {
    const cpa_slice none = {0, 0};
    return (own_slices){.qkv = c->latent.latent ? none : cpa_slice_of(qkv_width(c), part.ranks, part.rank),
                        .o = cpa_slice_of_units(c->q_heads, out_width(c) / c->q_heads, part.ranks, part.rank),
                        .inner = cpa_slice_of(c->intermediate, part.ranks, part.rank),
                        .head = cpa_slice_of(c->vocabulary, part.ranks, part.rank),
                        .experts = cpa_own_experts(c->moe.experts, part.expert_ranks, part.expert_rank)};
}

static cpa_feed_forward_weights lay_out_dense(const cpa_model_config *c, const own_slices *own, arena *a) {
    const int64_t hidden = c->hidden, inner = own->inner.count;
    cpa_feed_forward_weights w = {.is_slice = inner < c->intermediate};
    w.gate_up = take(a, 2 * inner * hidden);
    w.gate_up_bias = take_if(c->mlp_bias, a, 2 * inner);
    w.down = take(a, hidden * inner);
    w.down_bias = take_if(c->mlp_bias, a, hidden);
    return w;
}

static cpa_feed_forward_weights lay_out_experts(const cpa_model_config *c, const own_slices *own, arena *a) {
    const int64_t hidden = c->hidden, inner = c->moe.intermediate;
    cpa_feed_forward_weights w = {.is_slice = 0};
    w.router = take(a, c->moe.experts * hidden);
    w.expert_gate_up = take(a, own->experts.count * 2 * inner * hidden);
    w.expert_down = take(a, own->experts.count * hidden * inner);
    if (c->moe.has_bias) w.router_bias = take_floats(a, c->moe.experts);
    w.shared_gate_up = take_if(c->moe.shared > 0, a, 2 * c->moe.shared * hidden);
    w.shared_down = take_if(c->moe.shared > 0, a, hidden * c->moe.shared);
    return w;
}

static cpa_latent_weights lay_out_latent(const cpa_model_config *c, arena *a) {
    const cpa_latent_config *l = &c->latent;
    const int64_t heads = c->q_heads, queries = heads * (l->nope + l->rope);
    cpa_latent_weights w = {.front = NULL};
    if (!l->latent) return w;
    w.front = take(a, ((l->q_latent ? l->q_latent : queries) + l->latent + l->rope) * c->hidden);
    w.q_norm = take_if(l->q_latent > 0, a, l->q_latent);
    w.q_b = take_if(l->q_latent > 0, a, queries * l->q_latent);
    w.kv_norm = take(a, l->latent);
    w.kv_b = take(a, heads * (l->nope + l->value) * l->latent);
    w.k_up = take(a, heads * l->nope * l->latent);
    w.v_up = take(a, heads * l->value * l->latent);
    return w;
}

static cpa_indexer_weights lay_out_indexer(const cpa_model_config *c, arena *a) {
    const cpa_index_form *i = &c->index;
    cpa_indexer_weights w = {.q = NULL};
    if (!i->heads) return w;
    w.q = take(a, (int64_t)i->heads * i->dim * c->latent.q_latent);
    w.k = take(a, (int64_t)i->dim * c->hidden);
    w.k_scale = take_floats(a, i->dim);
    w.k_shift = take_floats(a, i->dim);
    w.weights = take(a, (int64_t)i->heads * c->hidden);
    return w;
}

static cpa_layer_weights lay_out_layer(const cpa_model_config *c, const own_slices *own, int32_t layer, arena *a) {
    const int64_t hidden = c->hidden;
    cpa_layer_weights w;
    w.is_slice = own->qkv.count < qkv_width(c);
    w.attention_norm = take(a, hidden);
    w.latent = lay_out_latent(c, a);
    w.indexer = lay_out_indexer(c, a);
    w.qkv = take_if(!c->latent.latent, a, own->qkv.count * hidden);
    w.qkv_bias = take_if(c->qkv_bias, a, own->qkv.count);
    w.q_norm = take_if(c->qk_norm, a, c->head_dim);
    w.k_norm = take_if(c->qk_norm, a, c->head_dim);
    w.o = take(a, hidden * own->o.count);
    w.o_bias = take_if(c->o_bias, a, hidden);
    w.mlp_norm = take(a, hidden);
    w.feed_forward = c->moe.sparse[layer] ? lay_out_experts(c, own, a) : lay_out_dense(c, own, a);
    return w;
}

/* Places all weights in the arena; `layers` [layers] may be NULL, to count. */
static void lay_out(const cpa_model_config *c, const own_slices *own, arena *a, cpa_weights *w,
                    cpa_layer_weights *layers) {
    w->embedding = take(a, (int64_t)c->vocabulary * c->hidden);
    w->final_norm = take(a, c->hidden);
    w->head_is_slice = !c->tied && own->head.count < c->vocabulary;
    w->lm_head = c->tied ? w->embedding : take(a, own->head.count * c->hidden);
    for (int32_t i = 0; i < cpa_config_all_layers(c); i++) {
        cpa_layer_weights layer = lay_out_layer(c, own, i, a);
        if (layers) layers[i] = layer;
    }
    const int drafts = c->draft_layers > 0;
    w->draft.token_norm = take_if(drafts, a, c->hidden);
    w->draft.hidden_norm = take_if(drafts, a, c->hidden);
    w->draft.join = take_if(drafts, a, 2 * (int64_t)c->hidden * c->hidden);
    w->draft.final_norm = take_if(drafts, a, c->hidden);
}

int64_t cpa_weights_bytes(const cpa_model_config *config, cpa_weights_part held, cpa_dtype dtype) {
    const own_slices own = slices_of(config, held);
    arena counted = {NULL, 0, cpa_dtype_bytes(dtype)};
    cpa_weights none;
    lay_out(config, &own, &counted, &none, NULL);
    return counted.used;
}

/* What the loading of a model reads. */
typedef struct loading {
    const cpa_model_config *config;
    own_slices own;
    cpa_weight_loader from;
} loading;

static cpa_status load_dense(const loading *l, const cpa_feed_forward_weights *w) {
    const cpa_model_config *c = l->config;
    const cpa_weight_part gate_up[] = {{"mlp.gate_proj", c->intermediate}, {"mlp.up_proj", c->intermediate}};
    const cpa_weight_part down = {"mlp.down_proj", c->hidden};
    CPA_TRY(cpa_load_rows(&l->from, "weight", gate_up, 2, c->hidden, l->own.inner, w->gate_up));
    CPA_TRY(cpa_load_rows(&l->from, "bias", gate_up, 2, 0, l->own.inner, w->gate_up_bias));
    CPA_TRY(cpa_load_block(&l->from, "weight", &down, 1, c->intermediate, (cpa_slice){0, c->hidden}, l->own.inner,
                           w->down));
    return cpa_load_whole(&l->from, "bias", &down, 0, w->down_bias);
}

static cpa_status load_attention(const loading *l, const cpa_layer_weights *w) {
    const cpa_model_config *c = l->config;
    const int64_t kv_width = (int64_t)c->kv_heads * c->head_dim;
    const cpa_weight_part qkv[] = {
        {"self_attn.q_proj", q_width(c)}, {"self_attn.k_proj", kv_width}, {"self_attn.v_proj", kv_width}};
    const cpa_weight_part o = {"self_attn.o_proj", c->hidden};
    const cpa_weight_part q_norm = {"self_attn.q_norm", c->head_dim}, k_norm = {"self_attn.k_norm", c->head_dim};
    const cpa_slice hidden = {0, c->hidden}, one = {0, 1};
    CPA_TRY(cpa_load_block(&l->from, "weight", qkv, 3, c->hidden, l->own.qkv, hidden, w->qkv));
    CPA_TRY(cpa_load_block(&l->from, "bias", qkv, 3, 0, l->own.qkv, one, w->qkv_bias));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &q_norm, 0, w->q_norm));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &k_norm, 0, w->k_norm));
    CPA_TRY(cpa_load_block(&l->from, "weight", &o, 1, q_width(c), hidden, l->own.o, w->o));
    return cpa_load_whole(&l->from, "bias", &o, 0, w->o_bias);
}

static cpa_status load_latent(const loading *l, const cpa_layer_weights *layer) {
    const cpa_model_config *c = l->config;
    const cpa_latent_config *k = &c->latent;
    const cpa_latent_weights *w = &layer->latent;
    const int64_t heads = c->q_heads, both = k->nope + k->value, queries = heads * (k->nope + k->rope);
    const cpa_weight_part front[] = {
        {k->q_latent ? "self_attn.q_a_proj" : "self_attn.q_proj", k->q_latent ? k->q_latent : queries},
        {"self_attn.kv_a_proj_with_mqa", k->latent + k->rope}};
    const cpa_weight_part q_norm = {"self_attn.q_a_layernorm", k->q_latent}, q_b = {"self_attn.q_b_proj", queries};
    const cpa_weight_part kv_norm = {"self_attn.kv_a_layernorm", k->latent};
    const cpa_weight_part kv_b = {"self_attn.kv_b_proj", heads * both}, o = {"self_attn.o_proj", c->hidden};
    const cpa_head_rows keys = {heads, both, 0, k->nope}, values = {heads, both, k->nope, k->value};
    const cpa_slice all = {0, front[0].rows + front[1].rows}, hidden = {0, c->hidden};
    CPA_TRY(cpa_load_block(&l->from, "weight", front, 2, c->hidden, all, hidden, w->front));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &q_norm, 0, w->q_norm));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &q_b, k->q_latent, w->q_b));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &kv_norm, 0, w->kv_norm));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &kv_b, k->latent, w->kv_b));
    CPA_TRY(cpa_load_transposed(&l->from, "self_attn.kv_b_proj.weight", keys, k->latent, w->k_up));
    CPA_TRY(cpa_load_transposed(&l->from, "self_attn.kv_b_proj.weight", values, k->latent, w->v_up));
    return cpa_load_whole(&l->from, "weight", &o, out_width(c), layer->o);
}

static cpa_status load_indexer(const loading *l, const cpa_indexer_weights *w) {
    const cpa_model_config *c = l->config;
    const cpa_index_form *i = &c->index;
    const cpa_weight_part q = {"self_attn.indexer.wq_b", (int64_t)i->heads * i->dim};
    const cpa_weight_part k = {"self_attn.indexer.wk", i->dim}, weights = {"self_attn.indexer.weights_proj", i->heads};
    CPA_TRY(cpa_load_whole(&l->from, "weight", &q, c->latent.q_latent, w->q));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &k, c->hidden, w->k));
    CPA_TRY(cpa_load_floats(&l->from, "self_attn.indexer.k_norm.weight", i->dim, w->k_scale));
    CPA_TRY(cpa_load_floats(&l->from, "self_attn.indexer.k_norm.bias", i->dim, w->k_shift));
    return cpa_load_whole(&l->from, "weight", &weights, c->hidden, w->weights);
}

static cpa_status load_layer(const loading *l, int32_t layer, const cpa_layer_weights *w) {
    const cpa_model_config *c = l->config;
    const cpa_weight_part attention_norm = {"input_layernorm", c->hidden};
    const cpa_weight_part mlp_norm = {"post_attention_layernorm", c->hidden};
    CPA_TRY(cpa_load_whole(&l->from, "weight", &attention_norm, 0, w->attention_norm));
    CPA_TRY(c->latent.latent ? load_latent(l, w) : load_attention(l, w));
    if (c->index.heads) CPA_TRY(load_indexer(l, &w->indexer));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &mlp_norm, 0, w->mlp_norm));
    if (!c->moe.sparse[layer]) return load_dense(l, &w->feed_forward);
    return cpa_expert_weights_load(&l->from, c, l->own.experts, &w->feed_forward);
}

/* A tensor that files may have once more is the same one there. */
static cpa_status check_copy(const cpa_weight_loader *from, const char *name, const char *of, const char *why) {
    const cpa_tensor *copy = cpa_safetensors_find(from->files, name), *own = cpa_safetensors_find(from->files, of);
    if (!copy || !own) return CPA_OK;
    if (copy->dtype == own->dtype && copy->bytes == own->bytes &&
        memcmp(copy->data, own->data, (size_t)copy->bytes) == 0)
        return CPA_OK;
    return cpa_fail(from->err, CPA_INVALID, "%s: found another matrix than %s, expected the same %s", name, of, why);
}

/* Some files of a tied model have a copy of the embedding as their head. Another head would be what transformers takes,
 * whatever config.json says. */
static cpa_status check_tied(const cpa_weight_loader *from) {
    return check_copy(from, "lm_head.weight", "model.embed_tokens.weight", "with tie_word_embeddings: true");
}

/* The embedding and the head of what drafts are those of the model, of which files have copies or nothing. */
static cpa_status load_draft(const loading *l, const cpa_draft_weights *w) {
    const cpa_model_config *c = l->config;
    const cpa_weight_part token_norm = {"enorm", c->hidden}, hidden_norm = {"hnorm", c->hidden};
    const cpa_weight_part join = {"eh_proj", c->hidden}, final_norm = {"shared_head.norm", c->hidden};
    const char *const head = c->tied ? "model.embed_tokens.weight" : "lm_head.weight";
    char name[64];
    snprintf(name, sizeof name, "%sembed_tokens.weight", l->from.layer);
    CPA_TRY(check_copy(&l->from, name, "model.embed_tokens.weight", "in a layer that drafts"));
    snprintf(name, sizeof name, "%sshared_head.head.weight", l->from.layer);
    CPA_TRY(check_copy(&l->from, name, head, "in a layer that drafts"));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &token_norm, 0, w->token_norm));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &hidden_norm, 0, w->hidden_norm));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &join, 2 * (int64_t)c->hidden, w->join));
    return cpa_load_whole(&l->from, "weight", &final_norm, 0, w->final_norm);
}

static cpa_status load_all(loading *l, const cpa_weights *w) {
    const cpa_model_config *c = l->config;
    const cpa_weight_part embedding = {"model.embed_tokens", c->vocabulary}, norm = {"model.norm", c->hidden};
    const cpa_weight_part head = {"lm_head", c->vocabulary};
    CPA_TRY(cpa_load_whole(&l->from, "weight", &embedding, c->hidden, w->embedding));
    CPA_TRY(cpa_load_whole(&l->from, "weight", &norm, 0, w->final_norm));
    if (c->tied) CPA_TRY(check_tied(&l->from));
    if (!c->tied) CPA_TRY(cpa_load_rows(&l->from, "weight", &head, 1, c->hidden, l->own.head, w->lm_head));
    for (int32_t i = 0; i < cpa_config_all_layers(c); i++) {
        snprintf(l->from.layer, sizeof l->from.layer, "model.layers.%d.", i);
        CPA_TRY(load_layer(l, i, &w->layers[i]));
    }
    if (c->draft_layers > 0) CPA_TRY(load_draft(l, &w->draft));
    return cpa_weight_loader_wait(&l->from);
}

static cpa_status allocate(const loading *l, int64_t bytes, cpa_weights *w, cpa_error *err) {
    w->layers = calloc((size_t)cpa_config_all_layers(l->config), sizeof *w->layers);
    if (!w->layers) return cpa_fail(err, CPA_NO_MEMORY, "weights: no memory");
    w->bytes = bytes;
    CPA_TRY(w->device->table->alloc(w->device, w->bytes, &w->memory, err));
    arena memory = {w->memory, 0, cpa_dtype_bytes(l->from.dtype)};
    lay_out(l->config, &l->own, &memory, w, w->layers);
    return CPA_OK;
}

cpa_status cpa_weights_load(const cpa_model_config *config, cpa_weights_part held, const cpa_safetensors *files,
                            cpa_dtype dtype, cpa_stream *stream, cpa_weights *out, cpa_error *err) {
    loading l = {.config = config, .own = slices_of(config, held)};
    cpa_weights weights = {.device = stream->device};
    cpa_status status = cpa_weight_loader_open(files, dtype, stream, &l.from, err);
    if (status == CPA_OK) status = allocate(&l, cpa_weights_bytes(config, held, dtype), &weights, err);
    if (status == CPA_OK) status = load_all(&l, &weights);
    cpa_weight_loader_close(&l.from);
    if (status != CPA_OK) {
        cpa_weights_release(&weights);
        return status;
    }
    *out = weights;
    return CPA_OK;
}

void cpa_weights_release(cpa_weights *weights) {
    if (weights->device) weights->device->table->free(weights->device, weights->memory);
    free(weights->layers);
    *weights = (cpa_weights){.bytes = 0};
}
