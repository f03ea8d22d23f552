#include "src/context/forms.h"

#include <math.h>
#include <stdio.h>

#include "base/struct_size.h"
#include "kernels/kv_view.h"
#include "src/ops/check_args.h"
#include "src/ops/check_shape.h"

/* Whether a row of the cache begins with its columns, in one piece, and means the same without the others. */
static int may_be_cut(const cpa_attention_shape *shape) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(shape->kv_dtype);
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const float tensor_scale = cpa_shape_tensor_scale(shape, (cpa_kv_part)part);
        if (traits->rows[part].scale_in_row || cpa_kv_scale_bytes(shape->kv_dtype, (cpa_kv_part)part, tensor_scale))
            return 0;
    }
    return shape->layout != CPA_VLLM_X;
}

/* A form whose keys are expanded, over a cache of that shape. */
static cpa_status check_expanded(const char *where, const cpa_attention_shape *shape, const cpa_row_form *form,
                                 cpa_error *err) {
    const int32_t rope = shape->k_dim - shape->v_dim;
    REQUIRE(err, shape->v_in_k && shape->kv_heads == 1,
            "%s: is expanded, but v_in_k is %d with %d KV heads, expected a cache of latents, 1 and 1", where,
            shape->v_in_k, shape->kv_heads);
    REQUIRE(err, form->k_dim > rope && form->k_dim <= CPA_MAX_HEAD_DIM,
            "%s: is expanded, and k_dim is %d, expected %d to %d, more than the %d columns that are not expanded",
            where, form->k_dim, rope + 1, CPA_MAX_HEAD_DIM, rope);
    REQUIRE(err, form->v_dim > 0 && form->v_dim <= CPA_MAX_HEAD_DIM,
            "%s: is expanded, and v_dim is %d, expected 1 to %d", where, form->v_dim, CPA_MAX_HEAD_DIM);
    return CPA_OK;
}

/* A form that attends columns of the cache as they lie. */
static cpa_status check_columns(const char *where, const cpa_attention_shape *shape, const cpa_row_form *form,
                                cpa_error *err) {
    REQUIRE(err, form->k_dim >= 0 && form->k_dim <= shape->k_dim,
            "%s: k_dim is %d, expected 0 to %d, that of the keys of the cache", where, form->k_dim, shape->k_dim);
    REQUIRE(err, form->v_dim >= 0 && form->v_dim <= shape->v_dim,
            "%s: v_dim is %d, expected 0 to %d, that of the values of the cache", where, form->v_dim, shape->v_dim);
    const int cuts = (form->k_dim && form->k_dim < shape->k_dim) || (form->v_dim && form->v_dim < shape->v_dim);
    REQUIRE(err, !cuts || may_be_cut(shape),
            "%s: attends fewer columns than the rows of the cache have, expected all where rows have scales of their "
            "own, or lie in runs",
            where);
    return CPA_OK;
}

static cpa_status check_form(const char *where, const cpa_attention_shape *shape, const cpa_row_form *form,
                             cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*form), "%s: the reserved bytes are not zero", where);
    REQUIRE(err, form->out_dim >= 0 && form->out_dim <= CPA_MAX_HEAD_DIM, "%s: out_dim is %d, expected 0 to %d", where,
            form->out_dim, CPA_MAX_HEAD_DIM);
    REQUIRE(err, form->expanded == 0 || form->expanded == 1, "%s: expanded is %d, expected 0 or 1", where,
            form->expanded);
    REQUIRE(err, form->absorbs >= CPA_ABSORB_NEVER && form->absorbs <= CPA_ABSORB_ALWAYS,
            "%s: absorbs is %d, expected never (0), counted (1) or always (2)", where, (int)form->absorbs);
    REQUIRE(err, form->expanded || form->absorbs == CPA_ABSORB_NEVER,
            "%s: absorbs is %d without expanded, expected never (0)", where, (int)form->absorbs);
    return (form->expanded ? check_expanded : check_columns)(where, shape, form, err);
}

/* What rows of an expanded form attend: rows of the dtype of their queries, of a KV head for each of these. */
static cpa_attention_shape expanded_shape(const cpa_attention_shape *cache) {
    return (cpa_attention_shape){
        .q_heads = cache->q_heads, .kv_heads = cache->q_heads, .dtype = cache->dtype, .kv_dtype = cache->dtype};
}

cpa_status cpa_forms_take(const cpa_device *device, const cpa_context_options *o, cpa_forms *out, cpa_error *err) {
    CPA_TRY(cpa_check_shape("context", &o->shape, err));
    REQUIRE(err, o->n_forms >= 0 && o->n_forms <= CPA_MOST_ROW_FORMS, "context: n_forms is %d, expected 0 to %d",
            o->n_forms, CPA_MOST_ROW_FORMS);
    REQUIRE(err, (o->n_forms > 0) == (o->forms != NULL), "context: %d forms at %p, expected both or none", o->n_forms,
            (const void *)o->forms);
    *out = (cpa_forms){.count = o->n_forms > 0 ? o->n_forms : 1};
    for (int32_t i = 0; i < out->count; i++) {
        const cpa_row_form given = o->forms ? o->forms[i] : (cpa_row_form){0};
        cpa_form *form = &out->list[i];
        char where[32] = "context";
        if (o->forms) snprintf(where, sizeof where, "context: form %d", i);
        CPA_TRY(check_form(where, &o->shape, &given, err));
        *form = (cpa_form){.index = i,
                           .shape = given.expanded ? expanded_shape(&o->shape) : o->shape,
                           .has_matrix = given.out_dim > 0,
                           .is_expanded = given.expanded,
                           .absorbs = given.absorbs};
        if (given.k_dim) form->shape.k_dim = given.k_dim;
        if (given.v_dim) form->shape.v_dim = given.v_dim;
        form->out_dim = form->has_matrix ? given.out_dim : form->shape.v_dim;
        CPA_TRY(cpa_check_attend(where, device, &form->shape, NULL, err));
        const cpa_attention_shape unquantised = cpa_shape_unquantised(&form->shape);
        if (o->has_unquantised) CPA_TRY(cpa_check_attend(where, device, &unquantised, NULL, err));
    }
    return CPA_OK;
}

cpa_kv_view cpa_form_view(const cpa_form *form, const cpa_kv_view *kv) {
    if (form->is_expanded || (form->shape.k_dim == kv->k_dim && form->shape.v_dim == kv->v_dim)) return *kv;
    cpa_kv_view cut = cpa_kv_view_resolve(*kv);
    cut.k_dim = form->shape.k_dim;
    cut.v_dim = form->shape.v_dim;
    return cut;
}

void cpa_forms_layer(const cpa_forms *forms, const cpa_context_args *args, cpa_layer *out) {
    const cpa_form_rows first = {.q = args->q,
                                 .out = args->out,
                                 .lse = args->lse,
                                 .out_scale = args->out_scale,
                                 .mask = args->mask,
                                 .scale = args->scale};
    out->kv = args->kv;
    out->rules = args->rules;
    out->selection = args->selection;
    out->bias = args->bias;
    for (int32_t i = 0; i < forms->count; i++) {
        cpa_form_layer *form = &out->forms[i];
        form->rows = args->rows ? args->rows[i] : i == 0 ? first : (cpa_form_rows){.mask = args->mask};
        const cpa_attention_shape *shape = &forms->list[i].shape;
        if (form->rows.scale == 0 && !shape->v_in_k) form->rows.scale = 1.0f / sqrtf((float)shape->k_dim);
        form->kv = cpa_form_view(&forms->list[i], &args->kv);
    }
}
