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

static cpa_status check_form(const char *where, const cpa_attention_shape *shape, const cpa_row_form *form,
                             cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*form), "%s: the reserved bytes are not zero", where);
    REQUIRE(err, form->k_dim >= 0 && form->k_dim <= shape->k_dim,
            "%s: k_dim is %d, expected 0 to %d, that of the keys of the cache", where, form->k_dim, shape->k_dim);
    REQUIRE(err, form->v_dim >= 0 && form->v_dim <= shape->v_dim,
            "%s: v_dim is %d, expected 0 to %d, that of the values of the cache", where, form->v_dim, shape->v_dim);
    REQUIRE(err, form->out_dim >= 0 && form->out_dim <= CPA_MAX_HEAD_DIM, "%s: out_dim is %d, expected 0 to %d", where,
            form->out_dim, CPA_MAX_HEAD_DIM);
    const int cuts = (form->k_dim && form->k_dim < shape->k_dim) || (form->v_dim && form->v_dim < shape->v_dim);
    REQUIRE(err, !cuts || may_be_cut(shape),
            "%s: attends fewer columns than the rows of the cache have, expected all where rows have scales of their "
            "own, or lie in runs",
            where);
    return CPA_OK;
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
        if (o->shape.v_in_k)
            return cpa_fail(err, CPA_UNSUPPORTED, "%s: v_in_k is 1: contexts attend no latents", where);
        *form = (cpa_form){.index = i, .shape = o->shape, .has_matrix = given.out_dim > 0};
        if (given.k_dim) form->shape.k_dim = given.k_dim;
        if (given.v_dim) form->shape.v_dim = given.v_dim;
        form->out_dim = form->has_matrix ? given.out_dim : form->shape.v_dim;
        CPA_TRY(cpa_check_attend(where, device, &form->shape, NULL, err));
    }
    return CPA_OK;
}

cpa_kv_view cpa_form_view(const cpa_form *form, const cpa_kv_view *kv) {
    if (form->shape.k_dim == kv->k_dim && form->shape.v_dim == kv->v_dim) return *kv;
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
        if (form->rows.scale == 0) form->rows.scale = 1.0f / sqrtf((float)forms->list[i].shape.k_dim);
        form->kv = cpa_form_view(&forms->list[i], &args->kv);
    }
}
