#include "src/model/transformer.h"

#include <stdlib.h>

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/device.h"
#include "kernels/nn.h"
#include "src/model/draft_layer.h"
#include "src/model/feed_forward.h"
#include "src/model/indexer.h"
#include "src/model/latent_attention.h"
#include "src/model/mixture_sent.h"
#include "src/model/sampler.h"
#include "src/model/sliced_linear.h"
#include "src/model/weights.h"

enum { DEFAULT_LOGIT_ROWS = 256, DEFAULT_EXPERT_ROWS = 4096 };

struct cpa_transformer {
    cpa_model_config config;
    cpa_transformer_options options;
    cpa_device *device;
    cpa_weights weights;
    cpa_feed_forward feed_forward;
    cpa_latent_attention latent; /* means nothing with ordinary attention, as does the next */
    cpa_latent_forms forms;
    cpa_indexer indexer;    /* means nothing without one */
    cpa_key_indices chosen; /* of the layer at hand */
    cpa_sampler sampler;
    float *rope_table;
    int64_t logit_rows;
    /* [max_rows, ...], in the dtype */
    void *residual; /* [hidden] what the layers have added up */
    void *x;        /* [hidden] normed, or what is to be added next */
    void *wide;     /* outputs of the widest product but those of experts, or a part of a sum over ranks */
    void *inner;    /* [intermediate], or queries, or a slice of queries, keys and values */
    void *mixture;  /* room for those of experts */
    void *indexed;  /* room for those of the indexer */
    /* [logit_rows, ...] */
    void *last_residual, *last_x; /* [hidden] */
    float *logits;                /* [vocabulary] */
    float *own_logits;            /* the slice of `logits` that this rank computes */
    cpa_logits_fn observe;
    void *observe_ctx;
};

/* Of the results of attention. */
static int32_t out_width(const cpa_model_config *c) {
    return c->q_heads * (c->latent.latent ? c->latent.value : c->head_dim);
}

static int32_t qkv_width(const cpa_model_config *c) {
    return (c->q_heads + 2 * c->kv_heads) * c->head_dim;
}

static int64_t rope_bytes(const cpa_model_config *c) {
    return c->rope.max_position * c->rope.dim * (int64_t)sizeof(float);
}

/* Whether steps with slices are taken: no slice is empty, and heads have keys. */
static int takes_slices(const cpa_transformer *t) {
    const cpa_model_config *c = &t->config;
    const int32_t ranks = t->options.ranks, experts = c->moe.experts;
    return t->options.slices != CPA_SLICES_NONE && ranks > 1 && c->q_heads >= ranks && !c->latent.latent &&
           cpa_slice_unit(qkv_width(c), ranks) > 0 && cpa_slice_unit(c->intermediate, ranks) > 0 &&
           cpa_slice_unit(c->vocabulary, ranks) > 0 && (experts == 0 || experts >= ranks);
}

/* Whether each expert lies on one rank alone, and rows travel. */
static int spreads_experts(const cpa_transformer *t) {
    return t->options.experts != CPA_EXPERTS_REPLICATED && t->options.ranks > 1 && t->config.moe.experts > 0;
}

/* What this rank has of the weights. */
static cpa_weights_part weights_part(const cpa_transformer *t) {
    const int sliced = t->options.slices == CPA_SLICES_ALL && takes_slices(t);
    cpa_weights_part part = {0, 1, 0, 1};
    if (sliced) part = (cpa_weights_part){t->options.rank, t->options.ranks, 0, 1};
    if (sliced || spreads_experts(t)) {
        part.expert_rank = t->options.rank;
        part.expert_ranks = t->options.ranks;
    }
    return part;
}

/* ---- life ---- */

/* What steps need on the device, as a list for sizes, allocation and release. */
typedef struct buffer {
    void **memory;
    int64_t bytes;
} buffer;
enum { BUFFERS = 11 };

static void list_buffers(cpa_transformer *t, buffer list[BUFFERS]) {
    const cpa_model_config *c = &t->config;
    const int64_t bytes = cpa_dtype_bytes(t->options.dtype), row = t->options.max_rows * bytes;
    const int64_t last = t->logit_rows * c->hidden * bytes;
    const int64_t first = c->latent.latent ? cpa_latent_wide(c) : qkv_width(c);
    const int64_t joined = c->draft_layers > 0 ? cpa_draft_layer_wide(c) : 0;
    int64_t wide = cpa_max64(cpa_max64(first, joined), cpa_feed_forward_wide(c)) * bytes;
    int64_t inner = cpa_max64(cpa_feed_forward_inner(c), cpa_latent_inner(c)) * bytes;
    int64_t own_logits = 0;
    if (takes_slices(t)) {
        wide = cpa_max64(wide, c->hidden * (int64_t)sizeof(float));
        inner = cpa_max64(inner, cpa_slice_most(qkv_width(c), t->options.ranks) * bytes);
        own_logits = cpa_slice_most(c->vocabulary, t->options.ranks);
    }
    const buffer all[] = {
        {&t->residual, row * c->hidden},
        {&t->x, row * c->hidden},
        {&t->wide, t->options.max_rows * wide},
        {&t->inner, t->options.max_rows * inner},
        {&t->last_residual, last},
        {&t->last_x, last},
        {(void **)&t->logits, t->logit_rows * c->vocabulary * (int64_t)sizeof(float)},
        {(void **)&t->own_logits, t->logit_rows * own_logits * (int64_t)sizeof(float)},
        {(void **)&t->rope_table, rope_bytes(c)},
        {&t->mixture, cpa_mixture_place(&t->feed_forward.mixture, NULL)},
        {&t->indexed, cpa_indexer_place(&t->indexer, t->options.max_rows, NULL)},
    };
    _Static_assert(sizeof all == BUFFERS * sizeof *all, "as many as are listed");
    for (int i = 0; i < BUFFERS; i++) list[i] = all[i];
}

static void set_sizes(cpa_transformer *t, const cpa_model_config *config, const cpa_transformer_options *options) {
    t->config = *config;
    t->options = *options;
    t->logit_rows = options->logit_rows ? options->logit_rows : DEFAULT_LOGIT_ROWS;
    t->logit_rows = cpa_min64(t->logit_rows, cpa_min64(options->max_rows, options->max_sequences));
    const int32_t over = spreads_experts(t) ? options->ranks : 1;
    const int64_t at_once = (options->expert_rows ? options->expert_rows : DEFAULT_EXPERT_ROWS) / over;
    const int64_t piece = cpa_min64(options->max_rows, cpa_max64(at_once, 1));
    const int gathers = options->experts == CPA_EXPERTS_GATHERED;
    t->latent = cpa_latent_attention_of(&t->config, options->dtype);
    t->indexer = cpa_indexer_of(&t->config, options->dtype);
    t->feed_forward = (cpa_feed_forward){
        .config = &t->config,
        .dtype = options->dtype,
        .mixture = cpa_mixture_of(&t->config, options->dtype, weights_part(t), over, gathers, piece),
    };
}

int64_t cpa_transformer_bytes(const cpa_model_config *config, const cpa_transformer_options *options) {
    cpa_transformer counted = {.device = NULL};
    buffer list[BUFFERS];
    set_sizes(&counted, config, options);
    list_buffers(&counted, list);
    int64_t bytes = cpa_weights_bytes(config, weights_part(&counted), options->dtype);
    bytes += cpa_sampler_bytes(config->vocabulary, options->max_sequences);
    for (int i = 0; i < BUFFERS; i++) bytes += list[i].bytes;
    return bytes;
}

static cpa_status upload_rope(const cpa_transformer *t, cpa_stream *stream, cpa_error *err) {
    const int64_t bytes = rope_bytes(&t->config);
    float *table = malloc((size_t)bytes);
    if (!table) return cpa_fail(err, CPA_NO_MEMORY, "rotary positions: no memory for %lld bytes", (long long)bytes);
    cpa_status status = cpa_rope_table(&t->config.rope, table, err);
    if (status == CPA_OK) {
        status = t->device->table->copy(t->rope_table, table, bytes, stream);
        if (status == CPA_OK) status = t->device->table->stream_sync(stream);
        if (status != CPA_OK) cpa_fail(err, status, "rotary positions: %s", stream->error.message);
    }
    free(table);
    return status;
}

static cpa_linear_args product(const cpa_transformer *t, int64_t rows, const void *x, int32_t inputs,
                               const void *weight, const void *bias, int32_t outputs, void *out) {
    return (cpa_linear_args){
        .size = sizeof(cpa_linear_args),
        .rows = rows,
        .inputs = inputs,
        .outputs = outputs,
        .dtype = t->options.dtype,
        .out_dtype = t->options.dtype,
        .x = x,
        .weight = weight,
        .bias = bias,
        .out = out,
    };
}

/* The first product by a library loads all its kernels, which takes seconds on CUDA: that is not for the first request
 * to wait for. Multiplies some weights by themselves. */
static cpa_status warm_up(const cpa_transformer *t, cpa_stream *stream, cpa_error *err) {
    enum { WARM_ROWS = 64 };
    const cpa_model_config *c = &t->config;
    const cpa_layer_weights *w = &t->weights.layers[0];
    const int64_t outputs = c->latent.latent ? cpa_latent_wide(c) : qkv_width(c) / cpa_max64(t->options.ranks, 1);
    const int64_t rows = cpa_min64(cpa_min64(WARM_ROWS, t->options.max_rows), outputs);
    const void *weights = c->latent.latent ? w->latent.front : w->qkv;
    const cpa_linear_args args = product(t, rows, weights, c->hidden, weights, NULL, (int32_t)rows, t->wide);
    cpa_status status = cpa_linear(&args, stream);
    if (status == CPA_OK) status = t->device->table->stream_sync(stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "the first product: %s", stream->error.message);
}

/* Whether what is to be shared out is enough for all ranks, and may be. */
static cpa_status check_ranks(const cpa_transformer *t, cpa_error *err) {
    const int32_t ranks = t->options.ranks, experts = t->config.moe.experts;
    if (t->options.slices == CPA_SLICES_ALL && ranks > 1 && t->config.latent.latent)
        return cpa_fail(err, CPA_UNSUPPORTED, "weights: slices are not supported with latent attention");
    if (t->options.slices == CPA_SLICES_ALL && ranks > 1 && !takes_slices(t)) {
        const int32_t most = experts > 0 && experts < t->config.q_heads ? experts : t->config.q_heads;
        return cpa_fail(err, CPA_UNSUPPORTED, "weights: found %d ranks, expected at most as many as %s, %d, for slices",
                        ranks, most == t->config.q_heads ? "heads" : "experts", most);
    }
    if (!spreads_experts(t) || t->options.experts == CPA_EXPERTS_GATHERED) return CPA_OK;
    return cpa_mixture_check_sent(t->device, err);
}

static cpa_status load(cpa_transformer *t, const cpa_safetensors *files, cpa_stream *stream, cpa_error *err) {
    buffer list[BUFFERS];
    const cpa_weights_part part = weights_part(t);
    CPA_TRY(check_ranks(t, err));
    CPA_TRY(cpa_weights_load(&t->config, part, files, t->options.dtype, stream, &t->weights, err));
    CPA_TRY(cpa_sampler_open(t->device, t->config.vocabulary, t->options.max_sequences, &t->sampler, err));
    list_buffers(t, list);
    for (int i = 0; i < BUFFERS; i++) CPA_TRY(cpa_device_alloc(t->device, list[i].bytes, list[i].memory, err));
    t->feed_forward.wide = t->wide;
    t->feed_forward.inner = t->inner;
    cpa_mixture_place(&t->feed_forward.mixture, t->mixture);
    cpa_indexer_place(&t->indexer, t->options.max_rows, t->indexed);
    t->indexer.rope.table = t->rope_table;
    t->latent.rope.table = t->rope_table;
    t->latent.wide = t->wide;
    t->latent.inner = t->inner;
    if (t->config.latent.latent) CPA_TRY(cpa_latent_forms_open(&t->config, &t->weights, &t->forms, err));
    CPA_TRY(upload_rope(t, stream, err));
    return warm_up(t, stream, err);
}

cpa_status cpa_transformer_create(cpa_device *device, const cpa_model_config *config, const cpa_safetensors *files,
                                  const cpa_transformer_options *options, cpa_transformer **out, cpa_error *err) {
    cpa_stream *stream = NULL;
    cpa_transformer *t = calloc(1, sizeof *t);
    if (!t) return cpa_fail(err, CPA_NO_MEMORY, "transformer: no memory");
    t->device = device;
    set_sizes(t, config, options);
    cpa_status status = cpa_stream_create(device, &stream, err);
    if (status == CPA_OK) status = load(t, files, stream, err);
    cpa_stream_destroy(stream);
    if (status != CPA_OK) {
        cpa_transformer_destroy(t);
        return status;
    }
    *out = t;
    return CPA_OK;
}

void cpa_transformer_destroy(cpa_transformer *transformer) {
    buffer list[BUFFERS];
    if (!transformer) return;
    list_buffers(transformer, list);
    for (int i = 0; i < BUFFERS; i++) cpa_device_free(transformer->device, *list[i].memory);
    cpa_sampler_close(&transformer->sampler);
    cpa_weights_release(&transformer->weights);
    cpa_latent_forms_close(&transformer->forms);
    free(transformer);
}

void cpa_transformer_set_observer(cpa_transformer *transformer, cpa_logits_fn observe, void *ctx) {
    transformer->observe = observe;
    transformer->observe_ctx = ctx;
}

/* ---- a step ---- */

/* out = norm of x; with a residual of residual += x. */
static cpa_status norm(const cpa_transformer *t, int64_t rows, const void *x, void *residual, const void *weight,
                       void *out, cpa_stream *stream) {
    const cpa_rmsnorm_args args = {
        .size = sizeof args,
        .rows = rows,
        .width = t->config.hidden,
        .dtype = t->options.dtype,
        .x = x,
        .residual = residual,
        .weight = weight,
        .eps = t->config.norm_eps,
        .out = out,
    };
    return cpa_rmsnorm(&args, stream);
}

/* Copies the rows of a [max_rows, hidden] that the indices name; -1 gives a row of NaN. */
static cpa_status gather(const cpa_transformer *t, int64_t rows, const void *source, const int32_t *indices, void *out,
                         cpa_stream *stream) {
    const cpa_embed_args args = {
        .size = sizeof args,
        .rows = rows,
        .width = t->config.hidden,
        .dtype = t->options.dtype,
        .vocabulary = t->options.max_rows,
        .table = source,
        .tokens = (const uint32_t *)indices,
        .out = out,
    };
    return cpa_embed(&args, stream);
}

/* Whether the products of a step's layers are fused with what lies between them: then the residual is whole behind
 * each. */
static int is_fused(const cpa_transformer *t, const cpa_model_step *step) {
    const int64_t rows = step->rows.count;
    return !t->config.index.heads && !t->config.draft_layers && !step->slices && rows > 0 &&
           rows <= t->device->nn->fused_rows && t->options.dtype != CPA_F32;
}

static cpa_status fused(cpa_linear_args args, cpa_linear_fusion fusion, cpa_stream *stream) {
    args.x_stride = args.weight_stride = args.inputs;
    args.out_stride = fusion.gated ? args.outputs / 2 : args.outputs;
    return stream->device->nn->linear_fused(&args, &fusion, stream);
}

/* Whether a fused product of rows of the residual norms them by itself. */
static int takes_norm(const cpa_transformer *t, int64_t rows) {
    return rows == 1 && t->config.hidden <= t->device->nn->normed_inputs && t->config.hidden % 8 == 0;
}

/* The product of the residual that is normed, by the product itself where that can. */
static cpa_status fused_norm(const cpa_transformer *t, const void *weight, cpa_linear_args args, int32_t gated,
                             cpa_stream *stream) {
    if (!takes_norm(t, args.rows)) {
        CPA_TRY(norm(t, args.rows, t->residual, NULL, weight, t->x, stream));
        return fused(args, (cpa_linear_fusion){.gated = gated}, stream);
    }
    args.x = t->residual;
    return fused(args, (cpa_linear_fusion){.norm_weight = weight, .norm_eps = t->config.norm_eps, .gated = gated},
                 stream);
}

/* residual += the product. */
static cpa_status fused_add(const cpa_transformer *t, cpa_linear_args args, cpa_stream *stream) {
    args.out = t->residual;
    return fused(args, (cpa_linear_fusion){.adds = 1}, stream);
}

static cpa_status begin_step(void *ctx, const cpa_model_step *step, cpa_stream *stream) {
    const cpa_transformer *t = ctx;
    const cpa_embed_args args = {
        .size = sizeof args,
        .rows = step->rows.count,
        .width = t->config.hidden,
        .dtype = t->options.dtype,
        .vocabulary = t->config.vocabulary,
        .table = t->weights.embedding,
        .tokens = step->rows.tokens_device,
        .out = t->residual,
    };
    CPA_TRY(cpa_sampler_begin(&t->sampler, step, stream));
    return cpa_embed(&args, stream);
}

/* x = the norm of the residual, to which what the layer before gave is added first. */
static cpa_status norm_in(const cpa_transformer *t, int32_t layer, int64_t rows, cpa_stream *stream) {
    const void *weight = t->weights.layers[layer].attention_norm;
    const int is_first = layer == 0 || layer == t->config.layers; /* of the model, or of those that draft */
    return is_first ? norm(t, rows, t->residual, NULL, weight, t->x, stream)
                    : norm(t, rows, t->x, t->residual, weight, t->x, stream);
}

/* The residual becomes what the layer that drafts begins with. */
static cpa_status begin_draft(const cpa_transformer *t, const cpa_model_step *step, cpa_stream *stream) {
    const cpa_draft_layer_args args = {.step = step, .x = t->x, .residual = t->residual, .wide = t->wide};
    return cpa_draft_layer_begin(&t->config, &t->weights, t->options.dtype, &args, stream);
}

/* The same in two launches, where a row of the cache takes all of a head to make: keys and values first replace what
 * they come from. */
static cpa_status turn_then_write(const cpa_transformer *t, cpa_qk_norm_rope_args args, cpa_stream *stream) {
    const cpa_model_config *c = &t->config;
    const int64_t stride = qkv_width(c), bytes = cpa_dtype_bytes(t->options.dtype), head = c->head_dim;
    char *k = (char *)t->wide + c->q_heads * head * bytes, *v = k + c->kv_heads * head * bytes;
    const cpa_kv_write_args write = {
        .size = sizeof write,
        .tokens = args.rows,
        .dtype = t->options.dtype,
        .k = k,
        .v = v,
        .slot_mapping = args.slot_mapping,
        .kv = args.kv,
        .nonfinite = args.nonfinite,
        .k_row_stride = stride,
        .v_row_stride = stride,
    };
    args.slot_mapping = NULL;
    args.nonfinite = NULL;
    args.k = k, args.v = v;
    args.k_stride = args.v_stride = stride;
    CPA_TRY(cpa_qk_norm_rope(&args, stream));
    return write.slot_mapping ? cpa_kv_write(&write, stream) : CPA_OK;
}

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *layer_args,
                           cpa_stream *stream) {
    const cpa_transformer *t = ctx;
    const cpa_model_config *c = &t->config;
    const cpa_layer_weights *w = &t->weights.layers[layer];
    const int64_t rows = step->rows.count;
    if (layer == c->layers) CPA_TRY(begin_draft(t, step, stream));
    if (c->latent.latent && is_fused(t, step)) {
        const int normed = takes_norm(t, rows);
        if (!normed) CPA_TRY(norm(t, rows, t->residual, NULL, w->attention_norm, t->x, stream));
        return cpa_latent_in(&t->latent, &w->latent, normed ? t->residual : t->x, normed ? w->attention_norm : NULL,
                             step, layer_args, stream);
    }
    if (c->latent.latent) {
        CPA_TRY(norm_in(t, layer, rows, stream));
        CPA_TRY(cpa_latent_in(&t->latent, &w->latent, t->x, NULL, step, layer_args, stream));
        if (!c->index.heads) return CPA_OK;
        return cpa_indexer_in(&t->indexer, &w->indexer, t->x, t->wide, cpa_latent_wide(c), step, layer_args, stream);
    }
    const cpa_linear_args qkv = product(t, rows, t->x, c->hidden, w->qkv, w->qkv_bias, qkv_width(c), t->wide);
    if (is_fused(t, step)) {
        CPA_TRY(fused_norm(t, w->attention_norm, qkv, 0, stream));
    } else {
        CPA_TRY(norm_in(t, layer, rows, stream));
        CPA_TRY(step->slices ? cpa_sliced_outputs(step->slices, &qkv, w->is_slice, t->inner, stream)
                             : cpa_linear(&qkv, stream));
    }
    const cpa_qk_norm_rope_args args = {
        .size = sizeof args,
        .rows = rows,
        .shape = {.q_heads = c->q_heads,
                  .kv_heads = c->kv_heads,
                  .k_dim = c->head_dim,
                  .v_dim = c->head_dim,
                  .dtype = t->options.dtype},
        .qkv = t->wide,
        .q_weight = w->q_norm,
        .k_weight = w->k_norm,
        .eps = c->norm_eps,
        .rope = {.table = t->rope_table, .max_position = c->rope.max_position, .dim = c->rope.dim},
        .positions = step->rows.positions_device,
        .q = layer_args->q,
        .slot_mapping = step->rows.slots_device,
        .kv = layer_args->kv,
        .nonfinite = layer_args->nonfinite,
    };
    return cpa_dtype_is_turboquant(layer_args->kv.dtype) ? turn_then_write(t, args, stream)
                                                         : cpa_qk_norm_rope(&args, stream);
}

static cpa_status select_keys(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_select_args *args,
                              cpa_key_selection *selection, cpa_stream *stream) {
    cpa_transformer *t = ctx;
    (void)layer, (void)step;
    selection->indices = &t->chosen;
    return cpa_indexer_select(&t->indexer, args, &t->chosen, stream);
}

/* The feed-forward of a fused step: its products norm, activate and add by themselves, or its experts add. */
static cpa_status fused_feed_forward(const cpa_transformer *t, const cpa_layer_weights *w, const cpa_model_step *step,
                                     cpa_stream *stream) {
    const cpa_model_config *c = &t->config;
    const cpa_feed_forward_weights *f = &w->feed_forward;
    const int64_t rows = step->rows.count;
    if (f->router) {
        CPA_TRY(norm(t, rows, t->residual, NULL, w->mlp_norm, t->x, stream));
        return cpa_feed_forward_add(&t->feed_forward, f, step, t->x, t->residual, stream);
    }
    const cpa_linear_args gates =
        product(t, rows, t->x, c->hidden, f->gate_up, f->gate_up_bias, 2 * c->intermediate, t->inner);
    CPA_TRY(fused_norm(t, w->mlp_norm, gates, 1, stream));
    return fused_add(t, product(t, rows, t->inner, c->intermediate, f->down, f->down_bias, c->hidden, t->x), stream);
}

static cpa_status layer_out(void *ctx, int32_t layer, const cpa_model_step *step, const void *out, cpa_stream *stream) {
    const cpa_transformer *t = ctx;
    const cpa_model_config *c = &t->config;
    const cpa_layer_weights *w = &t->weights.layers[layer];
    const cpa_slices *slices = step->slices;
    const int64_t rows = step->rows.count;
    const cpa_linear_args o = product(t, rows, out, out_width(c), w->o, w->o_bias, c->hidden, t->x);
    if (is_fused(t, step)) {
        CPA_TRY(c->latent.latent ? cpa_latent_out(&t->latent, w->o, step, out, 1, t->residual, stream)
                                 : fused_add(t, o, stream));
        return fused_feed_forward(t, w, step, stream);
    }
    if (slices) {
        const cpa_slice own_heads = cpa_slice_of_units(c->q_heads, c->head_dim, slices->ranks, slices->rank);
        CPA_TRY(cpa_sliced_inputs(slices, &o, own_heads, w->is_slice, t->wide, stream));
    } else if (c->latent.latent) {
        CPA_TRY(cpa_latent_out(&t->latent, w->o, step, out, 0, t->x, stream));
    } else {
        CPA_TRY(cpa_linear(&o, stream));
    }
    CPA_TRY(norm(t, rows, t->x, t->residual, w->mlp_norm, t->x, stream));
    return cpa_feed_forward_run(&t->feed_forward, &w->feed_forward, step, t->x, t->x, stream);
}

/* The logits of the emissions [first, first + count), behind a norm of that weight. */
static cpa_status compute_logits(const cpa_transformer *t, const cpa_model_step *step, const void *weight,
                                 int64_t first, int64_t count, cpa_stream *stream) {
    const int32_t *rows = step->emissions.rows + first;
    CPA_TRY(gather(t, count, t->residual, rows, t->last_residual, stream));
    if (is_fused(t, step)) {
        CPA_TRY(norm(t, count, t->last_residual, NULL, weight, t->last_x, stream));
    } else {
        CPA_TRY(gather(t, count, t->x, rows, t->last_x, stream));
        CPA_TRY(norm(t, count, t->last_x, t->last_residual, weight, t->last_x, stream));
    }
    const cpa_linear_args args = {
        .size = sizeof args,
        .rows = count,
        .inputs = t->config.hidden,
        .outputs = t->config.vocabulary,
        .dtype = t->options.dtype,
        .out_dtype = CPA_F32,
        .x = t->last_x,
        .weight = t->weights.lm_head,
        .out = t->logits,
    };
    if (!step->slices) return cpa_linear(&args, stream);
    return cpa_sliced_outputs(step->slices, &args, t->weights.head_is_slice, t->own_logits, stream);
}

static cpa_status end_step(void *ctx, const cpa_model_step *step, cpa_drawn *drawn, cpa_stream *stream) {
    const cpa_transformer *t = ctx;
    const int64_t emissions = step->emissions.count;
    const int wanted = (step->emissions.wants & CPA_WANTS_LOGITS) != 0 || t->observe; /* else all tokens are given */
    for (int64_t first = 0; first < emissions; first += t->logit_rows) {
        const int64_t count = cpa_min64(t->logit_rows, emissions - first);
        if (wanted) CPA_TRY(compute_logits(t, step, t->weights.final_norm, first, count, stream));
        if (t->observe) CPA_TRY(t->observe(t->observe_ctx, step, first, count, t->logits, stream));
        CPA_TRY(cpa_sampler_draw(&t->sampler, step, first, count, t->logits, drawn, stream));
    }
    return CPA_OK;
}

/* Of each token that was drawn, the most probable one behind it. */
static cpa_status end_draft(void *ctx, const cpa_model_step *step, uint32_t *guesses, cpa_stream *stream) {
    const cpa_transformer *t = ctx;
    for (int64_t first = 0; first < step->emissions.count; first += t->logit_rows) {
        const int64_t count = cpa_min64(t->logit_rows, step->emissions.count - first);
        const cpa_sample_args best = {.size = sizeof best,
                                      .rows = count,
                                      .vocabulary = t->config.vocabulary,
                                      .logits = t->logits,
                                      .tokens = guesses + first};
        CPA_TRY(compute_logits(t, step, t->weights.draft.final_norm, first, count, stream));
        CPA_TRY(cpa_sample(&best, stream));
    }
    return CPA_OK;
}

cpa_model cpa_transformer_model(cpa_transformer *transformer) {
    return (cpa_model){
        .size = sizeof(cpa_model),
        .ctx = transformer,
        .begin_step = begin_step,
        .layer_in = layer_in,
        .layer_out = layer_out,
        .end_step = end_step,
        .capturable = !transformer->observe,
        .writes_cache = 1,
        .end_ids = transformer->config.end_ids,
        .n_end_ids = transformer->config.n_end_ids,
        .slices = takes_slices(transformer) ? transformer->options.slices : CPA_SLICES_NONE,
        .vocabulary = (int32_t)transformer->config.vocabulary,
        .gives_ranks = 1,
        .end_draft = transformer->config.draft_layers > 0 ? end_draft : NULL,
        .select = transformer->config.index.heads ? select_keys : NULL,
        .select_width = transformer->config.index.k,
    };
}

void cpa_transformer_give_forms(const cpa_transformer *transformer, cpa_model_shape *shape) {
    if (!transformer->config.latent.latent) return;
    shape->forms = transformer->forms.list;
    shape->n_forms = CPA_LATENT_FORMS;
    shape->decode_form = CPA_LATENT_ABSORBED;
    shape->prefill_form = CPA_LATENT_EXPANDED;
    if (transformer->config.index.heads) shape->index = &transformer->config.index;
}
