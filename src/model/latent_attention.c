#include "src/model/latent_attention.h"

#include <stdlib.h>

#include <cpattn/nn.h>

#include "base/check.h"
#include "kernels/nn.h"

cpa_latent_attention cpa_latent_attention_of(const cpa_model_config *config, cpa_dtype dtype) {
    return (cpa_latent_attention){.config = config,
                                  .dtype = dtype,
                                  .rope = {.max_position = config->rope.max_position,
                                           .dim = config->rope.dim,
                                           .interleaved = config->latent.interleaved}};
}

static int64_t q_width(const cpa_model_config *c) {
    return (int64_t)c->q_heads * (c->latent.nope + c->latent.rope);
}

/* Elements of the first product in front of the latents. */
static int64_t front_width(const cpa_model_config *c) {
    return c->latent.q_latent ? c->latent.q_latent : q_width(c);
}

int64_t cpa_latent_wide(const cpa_model_config *c) {
    return front_width(c) + c->latent.latent + c->latent.rope;
}

int64_t cpa_latent_inner(const cpa_model_config *c) {
    return c->latent.q_latent ? q_width(c) : 0;
}

/* Rows of elements, a stride apart. */
typedef struct strided {
    char *rows;
    int64_t stride;
} strided;

static strided behind(const cpa_latent_attention *a, strided s, int64_t elements) {
    return (strided){s.rows + elements * cpa_dtype_bytes(a->dtype), s.stride};
}

static cpa_linear_args product(const cpa_latent_attention *a, int64_t rows, strided x, int64_t inputs,
                               const void *weight, int64_t outputs, strided out) {
    return (cpa_linear_args){.size = sizeof(cpa_linear_args),
                             .rows = rows,
                             .inputs = (int32_t)inputs,
                             .outputs = (int32_t)outputs,
                             .dtype = a->dtype,
                             .out_dtype = a->dtype,
                             .x = x.rows,
                             .x_stride = x.stride,
                             .weight = weight,
                             .out = out.rows,
                             .out_stride = out.stride};
}

/* Queries in front, of which each head is elements of the first product, or a product of the normed latents there. */
static cpa_status multiply_queries(const cpa_latent_attention *a, const cpa_latent_weights *w, int64_t rows,
                                   strided front, strided q, cpa_stream *stream) {
    const cpa_latent_config *l = &a->config->latent;
    const cpa_rmsnorm_args norm = {.size = sizeof norm,
                                   .rows = rows,
                                   .width = l->q_latent,
                                   .dtype = a->dtype,
                                   .x = front.rows,
                                   .x_stride = front.stride,
                                   .weight = w->q_norm,
                                   .eps = l->norm_eps,
                                   .out = front.rows,
                                   .out_stride = front.stride};
    const cpa_linear_args queries = product(a, rows, front, l->q_latent, w->q_b, q_width(a->config), q);
    if (!l->q_latent) return CPA_OK;
    CPA_TRY(cpa_rmsnorm(&norm, stream));
    return cpa_linear(&queries, stream);
}

/* Rows of the cache, from those of the first product. */
static cpa_status write_latents(const cpa_latent_attention *a, const cpa_latent_weights *w, const cpa_model_step *step,
                                strided latents, const cpa_layer_args *args, cpa_stream *stream) {
    const cpa_latent_config *l = &a->config->latent;
    const cpa_latent_norm_rope_args write = {
        .size = sizeof write,
        .rows = step->rows.count,
        .shape = {.kv_heads = 1, .k_dim = l->latent + l->rope, .v_dim = l->latent, .v_in_k = 1, .dtype = a->dtype},
        .x = latents.rows,
        .x_stride = latents.stride,
        .weight = w->kv_norm,
        .eps = l->norm_eps,
        .rope = a->rope,
        .positions = step->rows.positions_device,
        .slot_mapping = step->rows.slots_device,
        .kv = args->kv,
        .nonfinite = args->nonfinite};
    return cpa_latent_norm_rope(&write, stream);
}

/* Heads of rows, x_step apart in x and out_step in out: their elements in front as they are, the last ones rotated. */
typedef struct heads {
    int32_t count, front;
    strided x, out;
    int64_t x_step, out_step;
} heads;

static cpa_status rotate(const cpa_latent_attention *a, const int64_t *positions, int64_t rows, heads h,
                         cpa_stream *stream) {
    cpa_rotate_args args = {.size = sizeof args,
                            .rows = rows,
                            .heads = h.count,
                            .dim = h.front + a->config->latent.rope,
                            .dtype = a->dtype,
                            .x = h.x.rows,
                            .x_stride = h.x.stride,
                            .x_head_stride = h.x_step,
                            .rope = a->rope,
                            .positions = positions,
                            .out = h.out.rows,
                            .out_stride = h.out.stride,
                            .out_head_stride = h.out_step};
    args.rope.first = h.front;
    return cpa_rotate(&args, stream);
}

/* out [rows, q_heads, latent + rope]: what attends latents as they lie. */
static cpa_status give_absorbed(const cpa_latent_attention *a, const cpa_latent_weights *w, const int64_t *positions,
                                int64_t rows, strided q, void *out, cpa_stream *stream) {
    const cpa_latent_config *l = &a->config->latent;
    const int32_t n = a->config->q_heads, dim = l->nope + l->rope, width = l->latent + l->rope;
    const strided to = {out, (int64_t)n * width};
    const heads tails = {n, 0, behind(a, q, l->nope), behind(a, to, l->latent), dim, width};
    cpa_linear_args args = product(a, rows, q, l->nope, w->k_up, l->latent, to);
    args.batch = n;
    args.x_batch_stride = dim;
    args.weight_batch_stride = (int64_t)l->latent * l->nope;
    args.out_batch_stride = width;
    CPA_TRY(cpa_linear(&args, stream));
    return rotate(a, positions, rows, tails, stream);
}

static cpa_status give_queries(const cpa_latent_attention *a, const cpa_latent_weights *w, strided q,
                               const cpa_model_step *step, void *out, cpa_stream *stream) {
    const cpa_latent_config *l = &a->config->latent;
    const int32_t n = a->config->q_heads, dim = l->nope + l->rope;
    for (int form = 0; form < CPA_LATENT_FORMS; form++) {
        const cpa_step_form *at = &step->forms[form];
        const int64_t *positions = step->rows.positions_device + at->first;
        const strided from = behind(a, q, at->first * q.stride);
        const strided to = {(char *)out + at->q_bytes, (int64_t)n * dim};
        if (at->rows == 0) continue;
        CPA_TRY(form == CPA_LATENT_ABSORBED
                    ? give_absorbed(a, w, positions, at->rows, from, to.rows, stream)
                    : rotate(a, positions, at->rows, (heads){n, l->nope, from, to, dim, dim}, stream));
    }
    return CPA_OK;
}

/* By linear_fused, which wants all strides; products here have those of x and out. */
static cpa_status fused(cpa_linear_args args, cpa_linear_fusion fusion, cpa_stream *stream) {
    args.weight_stride = args.inputs;
    return stream->device->nn->linear_fused(&args, &fusion, stream);
}

cpa_status cpa_latent_in(const cpa_latent_attention *a, const cpa_latent_weights *w, const void *x, const void *norm,
                         const cpa_model_step *step, const cpa_layer_args *args, cpa_stream *stream) {
    const cpa_model_config *c = a->config;
    const int64_t rows = step->rows.count, wide = cpa_latent_wide(c);
    const strided front = {a->wide, wide}, latents = behind(a, front, front_width(c));
    const strided normed = {(char *)(uintptr_t)x, c->hidden};
    const strided own = {a->inner, q_width(c)}, q = c->latent.q_latent ? own : front;
    const cpa_linear_args first = product(a, rows, normed, c->hidden, w->front, wide, front);
    CPA_TRY(norm ? fused(first, (cpa_linear_fusion){.norm_weight = norm, .norm_eps = c->norm_eps}, stream)
                 : cpa_linear(&first, stream));
    CPA_TRY(multiply_queries(a, w, rows, front, q, stream));
    CPA_TRY(write_latents(a, w, step, latents, args, stream));
    return give_queries(a, w, q, step, args->q, stream);
}

cpa_status cpa_latent_out(const cpa_latent_attention *a, const void *o, const cpa_model_step *step, const void *results,
                          int adds, void *out, cpa_stream *stream) {
    const cpa_model_config *c = a->config;
    const int64_t width = (int64_t)c->q_heads * c->latent.value;
    const strided to = {out, c->hidden};
    for (int form = 0; form < CPA_LATENT_FORMS; form++) {
        const cpa_step_form *at = &step->forms[form];
        const strided from = {(char *)(uintptr_t)results + at->out_bytes, width};
        const cpa_linear_args args =
            product(a, at->rows, from, width, o, c->hidden, behind(a, to, at->first * c->hidden));
        if (args.rows > 0)
            CPA_TRY(adds ? fused(args, (cpa_linear_fusion){.adds = 1}, stream) : cpa_linear(&args, stream));
    }
    return CPA_OK;
}

cpa_status cpa_latent_forms_open(const cpa_model_config *c, const cpa_weights *weights, cpa_latent_forms *out,
                                 cpa_error *err) {
    const cpa_latent_config *l = &c->latent;
    const int32_t layers = cpa_config_all_layers(c);
    out->scales = calloc((size_t)layers, sizeof *out->scales);
    out->matrices = calloc((size_t)layers, sizeof *out->matrices);
    out->expansions = calloc((size_t)layers, sizeof *out->expansions);
    if (!out->scales || !out->matrices || !out->expansions)
        return cpa_fail(err, CPA_NO_MEMORY, "forms of rows: no memory");
    for (int32_t layer = 0; layer < layers; layer++) {
        out->scales[layer] = l->scale;
        out->matrices[layer] = weights->layers[layer].latent.v_up;
        out->expansions[layer] = weights->layers[layer].latent.kv_b;
    }
    out->list[CPA_LATENT_ABSORBED] =
        (cpa_model_form){.widths = {.out_dim = l->value}, .layer_scales = out->scales, .layer_matrices = out->matrices};
    out->list[CPA_LATENT_EXPANDED] =
        (cpa_model_form){.widths = {.k_dim = l->nope + l->rope, .v_dim = l->value, .expanded = 1},
                         .layer_scales = out->scales,
                         .layer_expansions = out->expansions};
    return CPA_OK;
}

void cpa_latent_forms_close(cpa_latent_forms *forms) {
    free(forms->scales);
    free(forms->matrices);
    free(forms->expansions);
}
