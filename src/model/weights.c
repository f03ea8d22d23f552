#include "src/model/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/device.h"
#include "src/model/sliced_linear.h"

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

/* What a rank has of the matrices that are sliced: rows of qkv, of gates, and of the head, columns of o and of down. */
typedef struct own_slices {
    cpa_slice qkv, o, inner, head;
} own_slices;

static own_slices slices_of(const cpa_model_config *c, cpa_weights_part part) {
    return (own_slices){.qkv = cpa_slice_of(qkv_width(c), part.ranks, part.rank),
                        .o = cpa_slice_of_units(c->q_heads, c->head_dim, part.ranks, part.rank),
                        .inner = cpa_slice_of(c->intermediate, part.ranks, part.rank),
                        .head = cpa_slice_of(c->vocabulary, part.ranks, part.rank)};
}

static cpa_layer_weights lay_out_layer(const cpa_model_config *c, const own_slices *own, arena *a) {
    const int64_t hidden = c->hidden, inner = own->inner.count;
    cpa_layer_weights w;
    w.is_slice = own->qkv.count < qkv_width(c);
    w.attention_norm = take(a, hidden);
    w.qkv = take(a, own->qkv.count * hidden);
    w.qkv_bias = take_if(c->qkv_bias, a, own->qkv.count);
    w.q_norm = take_if(c->qk_norm, a, c->head_dim);
    w.k_norm = take_if(c->qk_norm, a, c->head_dim);
    w.o = take(a, hidden * own->o.count);
    w.o_bias = take_if(c->o_bias, a, hidden);
    w.mlp_norm = take(a, hidden);
    w.gate_up = take(a, 2 * inner * hidden);
    w.gate_up_bias = take_if(c->mlp_bias, a, 2 * inner);
    w.down = take(a, hidden * inner);
    w.down_bias = take_if(c->mlp_bias, a, hidden);
    return w;
}

/* Places all weights in the arena; `layers` [layers] may be NULL, to count. */
static void lay_out(const cpa_model_config *c, const own_slices *own, arena *a, cpa_weights *w,
                    cpa_layer_weights *layers) {
    w->embedding = take(a, (int64_t)c->vocabulary * c->hidden);
    w->final_norm = take(a, c->hidden);
    w->head_is_slice = !c->tied && own->head.count < c->vocabulary;
    w->lm_head = c->tied ? w->embedding : take(a, own->head.count * c->hidden);
    for (int32_t i = 0; i < c->layers; i++) {
        cpa_layer_weights layer = lay_out_layer(c, own, a);
        if (layers) layers[i] = layer;
    }
}

int64_t cpa_weights_bytes(const cpa_model_config *config, cpa_weights_part held, cpa_dtype dtype) {
    const own_slices own = slices_of(config, held);
    arena counted = {NULL, 0, cpa_dtype_bytes(dtype)};
    cpa_weights none;
    lay_out(config, &own, &counted, &none, NULL);
    return counted.used;
}

/* What the loading of all tensors shares. */
typedef struct loader {
    const cpa_model_config *config;
    own_slices own;
    const cpa_safetensors *files;
    cpa_dtype dtype;
    cpa_stream *stream;
    float *wide;    /* [STAGED] elements of a tensor of another dtype, in fp32 */
    void *staged;   /* [STAGED], page-locked: elements of such a tensor before and after conversion */
    char layer[32]; /* what the names of a layer's tensors begin with */
    cpa_error *err;
} loader;

static cpa_status failed(const loader *l, const char *name, cpa_status status) {
    return cpa_fail(l->err, status, "%s: %s", name, l->stream->error.message);
}

/* So many elements of a tensor from `first` on. */
static cpa_status convert(const loader *l, const cpa_tensor *tensor, int64_t first, int64_t elements, void *out) {
    const cpa_device_table *table = l->stream->device->table;
    const int64_t from_bytes = cpa_dtype_bytes(tensor->dtype), to_bytes = cpa_dtype_bytes(l->dtype);
    for (int64_t at = 0; at < elements; at += STAGED) {
        const int64_t n = elements - at < STAGED ? elements - at : STAGED;
        const char *from = (const char *)tensor->data + (first + at) * from_bytes;
        memcpy(l->staged, from, (size_t)(n * from_bytes)); /* for alignment */
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

/* A block of a tensor with rows of `width`. */
static cpa_status copy_block(const loader *l, const cpa_tensor *tensor, int64_t width, cpa_slice rows,
                             cpa_slice columns, char *out) {
    const int64_t bytes = cpa_dtype_bytes(l->dtype), first = rows.begin * width + columns.begin;
    const char *from = (const char *)tensor->data + first * cpa_dtype_bytes(tensor->dtype);
    cpa_status status;
    if (tensor->dtype == l->dtype) {
        status = l->stream->device->table->copy_rows(out, columns.count * bytes, from, width * bytes,
                                                     columns.count * bytes, rows.count, l->stream);
        return status == CPA_OK ? CPA_OK : failed(l, tensor->name, status);
    }
    if (columns.count == width) return convert(l, tensor, first, rows.count * width, out);
    for (int64_t row = 0; row < rows.count; row++)
        CPA_TRY(convert(l, tensor, first + row * width, columns.count, out + row * columns.count * bytes));
    return CPA_OK;
}

/* The block that is wanted of a tensor [rows, columns], or with columns = 0 [rows], to the place *at, which moves
 * behind it. */
static cpa_status load(const loader *l, const char *name, int64_t rows, int64_t columns, cpa_slice own_rows,
                       cpa_slice own_columns, char **at) {
    const cpa_tensor *tensor = cpa_safetensors_find(l->files, name);
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
    char *out = *at;
    *at += own_rows.count * own_columns.count * cpa_dtype_bytes(l->dtype);
    if (own_rows.count == 0) return CPA_OK;
    return copy_block(l, tensor, columns ? columns : 1, own_rows, own_columns, out);
}

/* Tensors of a layer that follow each other in one matrix, or one bias, in that order. */
typedef struct part {
    const char *name;
    int64_t rows;
} part;

/* What `wanted` of several tensors on top of each other has of the one that begins at row `first`. */
static cpa_slice rows_within(cpa_slice wanted, int64_t first, int64_t rows) {
    const int64_t begin = cpa_max64(wanted.begin, first), end = cpa_min64(wanted.begin + wanted.count, first + rows);
    return begin < end ? (cpa_slice){begin - first, end - begin} : (cpa_slice){0, 0};
}

/* The rows and columns that are wanted of what the parts are together; a bias has columns = 0. */
static cpa_status load_block(const loader *l, const char *kind, const part *parts, int n, int64_t columns,
                             cpa_slice own_rows, cpa_slice own_columns, void *out) {
    char *at = out, name[128];
    int64_t first = 0;
    for (int i = 0; out && i < n; i++) {
        snprintf(name, sizeof name, "%s%s.%s", l->layer, parts[i].name, kind);
        CPA_TRY(load(l, name, parts[i].rows, columns, rows_within(own_rows, first, parts[i].rows), own_columns, &at));
        first += parts[i].rows;
    }
    return CPA_OK;
}

/* The rows that are wanted of each part. */
static cpa_status load_rows(const loader *l, const char *kind, const part *parts, int n, int64_t columns,
                            cpa_slice own_rows, void *out) {
    const int64_t width = columns ? columns : 1;
    char *at = out;
    for (int i = 0; out && i < n; i++) {
        CPA_TRY(load_block(l, kind, &parts[i], 1, columns, own_rows, (cpa_slice){0, width}, at));
        at += own_rows.count * width * cpa_dtype_bytes(l->dtype);
    }
    return CPA_OK;
}

static cpa_status load_whole(const loader *l, const char *kind, const part *p, int64_t columns, void *out) {
    return load_rows(l, kind, p, 1, columns, (cpa_slice){0, p->rows}, out);
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
    const cpa_slice hidden = {0, c->hidden}, one = {0, 1};
    CPA_TRY(load_whole(l, "weight", &attention_norm, 0, w->attention_norm));
    CPA_TRY(load_block(l, "weight", qkv, 3, c->hidden, l->own.qkv, hidden, w->qkv));
    CPA_TRY(load_block(l, "bias", qkv, 3, 0, l->own.qkv, one, w->qkv_bias));
    CPA_TRY(load_whole(l, "weight", &q_norm, 0, w->q_norm));
    CPA_TRY(load_whole(l, "weight", &k_norm, 0, w->k_norm));
    CPA_TRY(load_block(l, "weight", &o, 1, q_width(c), hidden, l->own.o, w->o));
    CPA_TRY(load_whole(l, "bias", &o, 0, w->o_bias));
    CPA_TRY(load_whole(l, "weight", &mlp_norm, 0, w->mlp_norm));
    CPA_TRY(load_rows(l, "weight", gate_up, 2, c->hidden, l->own.inner, w->gate_up));
    CPA_TRY(load_rows(l, "bias", gate_up, 2, 0, l->own.inner, w->gate_up_bias));
    CPA_TRY(load_block(l, "weight", &down, 1, c->intermediate, hidden, l->own.inner, w->down));
    return load_whole(l, "bias", &down, 0, w->down_bias);
}

/* Some files of a tied model have a copy of the embedding as their head. Another head would be what transformers takes,
 * whatever config.json says. */
static cpa_status check_tied(const loader *l) {
    const cpa_tensor *head = cpa_safetensors_find(l->files, "lm_head.weight");
    const cpa_tensor *embedding = cpa_safetensors_find(l->files, "model.embed_tokens.weight");
    if (!head || !embedding) return CPA_OK;
    if (head->dtype == embedding->dtype && head->bytes == embedding->bytes &&
        memcmp(head->data, embedding->data, (size_t)head->bytes) == 0)
        return CPA_OK;
    return cpa_fail(l->err, CPA_INVALID,
                    "lm_head.weight: found another matrix than model.embed_tokens.weight, expected the same with "
                    "tie_word_embeddings: true");
}

static cpa_status load_all(loader *l, const cpa_weights *w) {
    const cpa_model_config *c = l->config;
    const part embedding = {"model.embed_tokens", c->vocabulary}, norm = {"model.norm", c->hidden};
    const part head = {"lm_head", c->vocabulary};
    CPA_TRY(load_whole(l, "weight", &embedding, c->hidden, w->embedding));
    CPA_TRY(load_whole(l, "weight", &norm, 0, w->final_norm));
    if (c->tied) CPA_TRY(check_tied(l));
    if (!c->tied) CPA_TRY(load_rows(l, "weight", &head, 1, c->hidden, l->own.head, w->lm_head));
    for (int32_t i = 0; i < c->layers; i++) {
        snprintf(l->layer, sizeof l->layer, "model.layers.%d.", i);
        CPA_TRY(load_layer(l, &w->layers[i]));
    }
    cpa_status status = l->stream->device->table->stream_sync(l->stream);
    return status == CPA_OK ? CPA_OK : failed(l, "weights", status);
}

static cpa_status allocate(loader *l, cpa_weights_part held, cpa_weights *w) {
    const cpa_device_table *table = w->device->table;
    w->layers = calloc((size_t)l->config->layers, sizeof *w->layers);
    l->wide = malloc(STAGED * sizeof *l->wide);
    if (!w->layers || !l->wide) return cpa_fail(l->err, CPA_NO_MEMORY, "weights: no memory");
    CPA_TRY(table->alloc_host(w->device, STAGED * (int64_t)sizeof(float), &l->staged, l->err));
    w->bytes = cpa_weights_bytes(l->config, held, l->dtype);
    CPA_TRY(table->alloc(w->device, w->bytes, &w->memory, l->err));
    arena memory = {w->memory, 0, cpa_dtype_bytes(l->dtype)};
    lay_out(l->config, &l->own, &memory, w, w->layers);
    return CPA_OK;
}

cpa_status cpa_weights_load(const cpa_model_config *config, cpa_weights_part held, const cpa_safetensors *files,
                            cpa_dtype dtype, cpa_stream *stream, cpa_weights *out, cpa_error *err) {
    loader l = {.config = config,
                .own = slices_of(config, held),
                .files = files,
                .dtype = dtype,
                .stream = stream,
                .layer = "",
                .err = err};
    cpa_weights weights = {.device = stream->device};
    cpa_status status = allocate(&l, held, &weights);
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
