#include "src/model/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "kernels/device.h"

/* Of a tensor in memory: as aligned as any operator asks for. */
#define ALIGNMENT 256
/* Elements that are converted at once. */
enum { STAGED = 1 << 20 };

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

static int64_t qkv_width(const cpa_model_config *c) {
    return (int64_t)(c->q_heads + 2 * c->kv_heads) * c->head_dim;
}

static int64_t q_width(const cpa_model_config *c) {
    return (int64_t)c->q_heads * c->head_dim;
}

static cpa_layer_weights lay_out_layer(const cpa_model_config *c, arena *a) {
    const int64_t hidden = c->hidden, inner = c->intermediate;
    cpa_layer_weights w;
    w.attention_norm = take(a, hidden);
    w.qkv = take(a, qkv_width(c) * hidden);
    w.qkv_bias = take_if(c->qkv_bias, a, qkv_width(c));
    w.q_norm = take_if(c->qk_norm, a, c->head_dim);
    w.k_norm = take_if(c->qk_norm, a, c->head_dim);
    w.o = take(a, hidden * q_width(c));
    w.o_bias = take_if(c->o_bias, a, hidden);
    w.mlp_norm = take(a, hidden);
    w.gate_up = take(a, 2 * inner * hidden);
    w.gate_up_bias = take_if(c->mlp_bias, a, 2 * inner);
    w.down = take(a, hidden * inner);
    w.down_bias = take_if(c->mlp_bias, a, hidden);
    return w;
}

/* Places all weights in the arena; `layers` [layers] may be NULL, to count. */
static void lay_out(const cpa_model_config *c, arena *a, cpa_weights *w, cpa_layer_weights *layers) {
    w->embedding = take(a, (int64_t)c->vocabulary * c->hidden);
    w->final_norm = take(a, c->hidden);
    w->lm_head = c->tied ? w->embedding : take(a, (int64_t)c->vocabulary * c->hidden);
    for (int32_t i = 0; i < c->layers; i++) {
        cpa_layer_weights layer = lay_out_layer(c, a);
        if (layers) layers[i] = layer;
    }
}

int64_t cpa_weights_bytes(const cpa_model_config *config, cpa_dtype dtype) {
    arena counted = {NULL, 0, cpa_dtype_bytes(dtype)};
    cpa_weights none;
    lay_out(config, &counted, &none, NULL);
    return counted.used;
}

/* What the loading of all tensors shares. */
typedef struct loader {
    const cpa_model_config *config;
    const cpa_safetensors *files;
    cpa_dtype dtype;
    cpa_stream *stream;
    float *wide;    /* [STAGED], and */
    void *staged;   /* [STAGED], page-locked: tensors of another dtype pass through these */
    char layer[32]; /* what the names of a layer's tensors begin with */
    cpa_error *err;
} loader;

static cpa_status failed(const loader *l, const char *name, cpa_status status) {
    return cpa_fail(l->err, status, "%s: %s", name, l->stream->error.message);
}

static cpa_status convert(const loader *l, const cpa_tensor *tensor, void *out) {
    const cpa_device_table *table = l->stream->device->table;
    const int64_t from_bytes = cpa_dtype_bytes(tensor->dtype), to_bytes = cpa_dtype_bytes(l->dtype);
    for (int64_t at = 0; at < tensor->elements; at += STAGED) {
        const int64_t n = tensor->elements - at < STAGED ? tensor->elements - at : STAGED;
        memcpy(l->staged, (const char *)tensor->data + at * from_bytes, (size_t)(n * from_bytes)); /* for alignment */
        cpa_widen(l->wide, l->staged, tensor->dtype, n);
        cpa_narrow(l->staged, l->wide, l->dtype, n);
        cpa_status status = table->copy((char *)out + at * to_bytes, l->staged, n * to_bytes, l->stream);
        if (status == CPA_OK) status = table->stream_sync(l->stream);
        if (status != CPA_OK) return failed(l, tensor->name, status);
    }
    return CPA_OK;
}

enum { SHAPE_TEXT = 24 * CPA_TENSOR_MAX_DIMS };
static const char *format_shape(const int64_t *shape, int32_t dims, char text[SHAPE_TEXT]) {
    int n = snprintf(text, SHAPE_TEXT, "[");
    for (int32_t i = 0; i < dims; i++)
        n += snprintf(text + n, (size_t)(SHAPE_TEXT - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + n, (size_t)(SHAPE_TEXT - n), "]");
    return text;
}

/* The tensor [rows, columns], or with columns = 0 [rows], to the place *at, which moves behind it. */
static cpa_status load(const loader *l, const char *name, int64_t rows, int64_t columns, char **at) {
    const cpa_tensor *tensor = cpa_safetensors_find(l->files, name);
    const int64_t elements = rows * (columns ? columns : 1);
    if (!tensor) return cpa_fail(l->err, CPA_INVALID, "the weights have no tensor %s", name);
    const int64_t shape[2] = {rows, columns};
    const int32_t dims = columns ? 2 : 1;
    if (tensor->dims != dims || memcmp(tensor->shape, shape, (size_t)dims * sizeof *shape) != 0) {
        char found[SHAPE_TEXT], expected[SHAPE_TEXT];
        return cpa_fail(l->err, CPA_INVALID, "%s: found shape %s, expected %s", name,
                        format_shape(tensor->shape, tensor->dims, found), format_shape(shape, dims, expected));
    }
    if (!tensor->plain) {
        return cpa_fail(l->err, CPA_UNSUPPORTED, "%s: found dtype %s, supported are F32, BF16 and F16", name,
                        tensor->type);
    }
    void *out = *at;
    *at += elements * cpa_dtype_bytes(l->dtype);
    if (tensor->dtype != l->dtype) return convert(l, tensor, out);
    cpa_status status = l->stream->device->table->copy(out, tensor->data, tensor->bytes, l->stream);
    return status == CPA_OK ? CPA_OK : failed(l, name, status);
}

/* Tensors of a layer that follow each other in one matrix, or one bias, in that order. */
typedef struct part {
    const char *name;
    int64_t rows;
} part;

static cpa_status load_parts(const loader *l, const char *kind, const part *parts, int n, int64_t columns, void *out) {
    char *at = out, name[128];
    for (int i = 0; out && i < n; i++) {
        snprintf(name, sizeof name, "%s%s.%s", l->layer, parts[i].name, kind);
        CPA_TRY(load(l, name, parts[i].rows, columns, &at));
    }
    return CPA_OK;
}

static cpa_status load_layer(const loader *l, const cpa_layer_weights *w) {
    const cpa_model_config *c = l->config;
    const int64_t kv_width = (int64_t)c->kv_heads * c->head_dim;
    const part qkv[] = {
        {"self_attn.q_proj", q_width(c)}, {"self_attn.k_proj", kv_width}, {"self_attn.v_proj", kv_width}};
    const part gate_up[] = {{"mlp.gate_proj", c->intermediate}, {"mlp.up_proj", c->intermediate}};
    const part o = {"self_attn.o_proj", c->hidden}, down = {"mlp.down_proj", c->hidden};
    const part attention_norm = {"input_layernorm", c->hidden}, mlp_norm = {"post_attention_layernorm", c->hidden};
    const part q_norm = {"self_attn.q_norm", c->head_dim}, k_norm = {"self_attn.k_norm", c->head_dim};
    CPA_TRY(load_parts(l, "weight", &attention_norm, 1, 0, w->attention_norm));
    CPA_TRY(load_parts(l, "weight", qkv, 3, c->hidden, w->qkv));
    CPA_TRY(load_parts(l, "bias", qkv, 3, 0, w->qkv_bias));
    CPA_TRY(load_parts(l, "weight", &q_norm, 1, 0, w->q_norm));
    CPA_TRY(load_parts(l, "weight", &k_norm, 1, 0, w->k_norm));
    CPA_TRY(load_parts(l, "weight", &o, 1, q_width(c), w->o));
    CPA_TRY(load_parts(l, "bias", &o, 1, 0, w->o_bias));
    CPA_TRY(load_parts(l, "weight", &mlp_norm, 1, 0, w->mlp_norm));
    CPA_TRY(load_parts(l, "weight", gate_up, 2, c->hidden, w->gate_up));
    CPA_TRY(load_parts(l, "bias", gate_up, 2, 0, w->gate_up_bias));
    CPA_TRY(load_parts(l, "weight", &down, 1, c->intermediate, w->down));
    return load_parts(l, "bias", &down, 1, 0, w->down_bias);
}

static cpa_status load_all(loader *l, const cpa_weights *w) {
    const cpa_model_config *c = l->config;
    const part embedding = {"model.embed_tokens", c->vocabulary}, norm = {"model.norm", c->hidden};
    const part head = {"lm_head", c->vocabulary};
    CPA_TRY(load_parts(l, "weight", &embedding, 1, c->hidden, w->embedding));
    CPA_TRY(load_parts(l, "weight", &norm, 1, 0, w->final_norm));
    if (!c->tied) CPA_TRY(load_parts(l, "weight", &head, 1, c->hidden, w->lm_head));
    for (int32_t i = 0; i < c->layers; i++) {
        snprintf(l->layer, sizeof l->layer, "model.layers.%d.", i);
        CPA_TRY(load_layer(l, &w->layers[i]));
    }
    cpa_status status = l->stream->device->table->stream_sync(l->stream);
    return status == CPA_OK ? CPA_OK : failed(l, "weights", status);
}

static cpa_status allocate(loader *l, cpa_weights *w) {
    const cpa_device_table *table = w->device->table;
    w->layers = calloc((size_t)l->config->layers, sizeof *w->layers);
    l->wide = malloc(STAGED * sizeof *l->wide);
    if (!w->layers || !l->wide) return cpa_fail(l->err, CPA_NO_MEMORY, "weights: no memory");
    CPA_TRY(table->alloc_host(w->device, STAGED * (int64_t)sizeof(float), &l->staged, l->err));
    w->bytes = cpa_weights_bytes(l->config, l->dtype);
    CPA_TRY(table->alloc(w->device, w->bytes, &w->memory, l->err));
    arena memory = {w->memory, 0, cpa_dtype_bytes(l->dtype)};
    lay_out(l->config, &memory, w, w->layers);
    return CPA_OK;
}

cpa_status cpa_weights_load(const cpa_model_config *config, const cpa_safetensors *files, cpa_dtype dtype,
                            cpa_stream *stream, cpa_weights *out, cpa_error *err) {
    loader l = {.config = config, .files = files, .dtype = dtype, .stream = stream, .layer = "", .err = err};
    cpa_weights weights = {.device = stream->device};
    cpa_status status = allocate(&l, &weights);
    if (status == CPA_OK) status = load_all(&l, &weights);
    stream->device->table->free_host(stream->device, l.staged);
    free(l.wide);
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
