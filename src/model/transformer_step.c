#include "src/model/transformer_step.h"

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/device.h"
#include "kernels/nn.h"
#include "src/model/draft_layer.h"
#include "src/model/sliced_linear.h"
#include "src/model/transformer_internal.h"

/* Of the results of attention. */
static int32_t out_width(const cpa_model_config *c) {
    return c->q_heads * (c->latent.latent ? c->latent.value : c->head_dim);
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

cpa_status cpa_transformer_warm_up(const cpa_transformer *t, cpa_stream *stream, cpa_error *err) {
    enum { WARM_ROWS = 64 };
    const cpa_model_config *c = &t->config;
    const cpa_layer_weights *w = &t->weights.layers[0];
    const int64_t outputs = c->latent.latent ? cpa_latent_wide(c) : cpa_qkv_width(c) / cpa_max64(t->options.ranks, 1);
    const int64_t rows = cpa_min64(cpa_min64(WARM_ROWS, t->options.max_rows), outputs);
    const void *weights = c->latent.latent ? w->latent.front : w->qkv;
    const cpa_linear_args args = product(t, rows, weights, c->hidden, weights, NULL, (int32_t)rows, t->wide);
    cpa_status status = cpa_linear(&args, stream);
    if (status == CPA_OK) status = t->device->table->stream_sync(stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "the first product: %s", stream->error.message);
}

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

cpa_status cpa_transformer_begin_step(void *ctx, const cpa_model_step *step, cpa_stream *stream) {
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

/* The same in launches of their own, where a row of the cache takes all of a head to make, or rows go to two caches: keys
 * and values first replace what they come from. */
static cpa_status turn_then_write(const cpa_transformer *t, cpa_qk_norm_rope_args args,
                                  const cpa_layer_args *layer_args, cpa_stream *stream) {
    const cpa_model_config *c = &t->config;
    const int64_t stride = cpa_qkv_width(c), bytes = cpa_dtype_bytes(t->options.dtype), head = c->head_dim;
    char *k = (char *)t->wide + c->q_heads * head * bytes, *v = k + c->kv_heads * head * bytes;
    cpa_kv_write_args write = {
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
    if (!write.slot_mapping) return CPA_OK;
    CPA_TRY(cpa_kv_write(&write, stream));
    if (!layer_args->precise.k) return CPA_OK;
    write.slot_mapping = layer_args->precise_slots;
    write.kv = layer_args->precise;
    write.nonfinite = NULL;
    return cpa_kv_write(&write, stream);
}

cpa_status cpa_transformer_layer_in(void *ctx, int32_t layer, const cpa_model_step *step,
                                    const cpa_layer_args *layer_args, cpa_stream *stream) {
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
    const cpa_linear_args qkv = product(t, rows, t->x, c->hidden, w->qkv, w->qkv_bias, cpa_qkv_width(c), t->wide);
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
    return cpa_dtype_is_turboquant(layer_args->kv.dtype) || layer_args->precise.k
               ? turn_then_write(t, args, layer_args, stream)
               : cpa_qk_norm_rope(&args, stream);
}

cpa_status cpa_transformer_select_keys(void *ctx, int32_t layer, const cpa_model_step *step,
                                       const cpa_select_args *args, cpa_key_selection *selection, cpa_stream *stream) {
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

cpa_status cpa_transformer_layer_out(void *ctx, int32_t layer, const cpa_model_step *step, const void *out,
                                     cpa_stream *stream) {
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

cpa_status cpa_transformer_end_step(void *ctx, const cpa_model_step *step, cpa_drawn *drawn, cpa_stream *stream) {
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
cpa_status cpa_transformer_end_draft(void *ctx, const cpa_model_step *step, uint32_t *guesses, cpa_stream *stream) {
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
