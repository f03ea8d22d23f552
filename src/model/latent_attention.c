#include "src/model/latent_attention.h"

#include <cpattn/nn.h>
#include <cpattn/ops.h>

#include "base/check.h"

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

/* The norms of the latents of keys and, where they have one, of queries; in place. */
static cpa_status norm_latents(const cpa_latent_attention *a, const cpa_latent_weights *w, int64_t rows, strided front,
                               strided latents, cpa_stream *stream) {
    const cpa_latent_config *l = &a->config->latent;
    const cpa_norm_rows keys = {latents.rows, latents.stride, w->kv_norm, latents.rows, latents.stride, l->latent, {0}};
    const cpa_norm_rows queries = {front.rows, front.stride, w->q_norm, front.rows, front.stride, l->q_latent, {0}};
    const cpa_rmsnorm2_args both = {
        .size = sizeof both, .rows = rows, .dtype = a->dtype, .eps = l->norm_eps, .parts = {queries, keys}};
    const cpa_rmsnorm_args one = {.size = sizeof one,
                                  .rows = rows,
                                  .width = l->latent,
                                  .dtype = a->dtype,
                                  .x = latents.rows,
                                  .x_stride = latents.stride,
                                  .weight = w->kv_norm,
                                  .eps = l->norm_eps,
                                  .out = latents.rows,
                                  .out_stride = latents.stride};
    return l->q_latent ? cpa_rmsnorm2(&both, stream) : cpa_rmsnorm(&one, stream);
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

cpa_status cpa_latent_in(const cpa_latent_attention *a, const cpa_latent_weights *w, const void *x,
                         const cpa_model_step *step, const cpa_layer_args *args, cpa_stream *stream) {
    const cpa_model_config *c = a->config;
    const int64_t rows = step->rows.count, wide = cpa_latent_wide(c);
    const strided front = {a->wide, wide}, latents = behind(a, front, front_width(c));
    const strided normed = {(char *)(uintptr_t)x, c->hidden};
    const strided own = {a->inner, q_width(c)}, q = c->latent.q_latent ? own : front;
    const strided tail = behind(a, latents, c->latent.latent);
    const heads rotated = {1, 0, tail, tail, c->latent.rope, c->latent.rope};
    const cpa_linear_args first = product(a, rows, normed, c->hidden, w->front, wide, front);
    const cpa_linear_args queries = product(a, rows, front, c->latent.q_latent, w->q_b, q_width(c), own);
    const cpa_kv_write_args write = {.size = sizeof write,
                                     .tokens = rows,
                                     .dtype = a->dtype,
                                     .k = latents.rows,
                                     .slot_mapping = step->rows.slots_device,
                                     .kv = args->kv,
                                     .nonfinite = args->nonfinite,
                                     .k_row_stride = latents.stride};
    if (rows == 0) return CPA_OK;
    CPA_TRY(cpa_linear(&first, stream));
    CPA_TRY(norm_latents(a, w, rows, front, latents, stream));
    if (c->latent.q_latent) CPA_TRY(cpa_linear(&queries, stream));
    CPA_TRY(rotate(a, step->rows.positions_device, rows, rotated, stream));
    CPA_TRY(cpa_kv_write(&write, stream));
    return give_queries(a, w, q, step, args->q, stream);
}

void cpa_latent_forms_of(const cpa_model_config *c, const cpa_weights *weights, cpa_latent_forms *out) {
    const cpa_latent_config *l = &c->latent;
    for (int32_t layer = 0; layer < c->layers; layer++) {
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
}
