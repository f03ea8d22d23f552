#include "src/engine/model_forms.h"

#include <stdio.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/struct_size.h"
#include "src/ops/check_args.h"

/* Whether a mask of a form shows keys that the one of its layer does not, which the cache may have given back. */
static int shows_more(cpa_mask form, cpa_mask layer) {
    if (!layer.causal) return 0;
    if (!form.causal) return 1;
    if (layer.window == 0) return 0;
    return form.window == 0 || form.window > layer.window || form.sinks > layer.sinks;
}

static cpa_status check_layers(const cpa_model_shape *model, int32_t form, cpa_error *err) {
    for (int32_t layer = 0; layer < model->layers; layer++) {
        const cpa_mask mask = cpa_model_form_mask(model, form, layer);
        const float scale = cpa_model_form_scale(model, form, layer);
        char where[48];
        snprintf(where, sizeof where, "form %d, layer %d", form, layer);
        CPA_TRY(cpa_check_layer_mask(where, &mask, err));
        REQUIRE(err, !shows_more(mask, cpa_model_mask(model, layer)),
                "%s: the mask shows keys that the mask of the layer hides, expected no more than that one", where);
        REQUIRE(err, scale - scale == 0, "%s: scale is %g, expected a finite number", where, (double)scale);
    }
    return CPA_OK;
}

static cpa_status check_index(const char *name, int32_t form, int32_t n_forms, cpa_error *err) {
    const int32_t last = n_forms > 0 ? n_forms - 1 : 0;
    REQUIRE(err, form >= 0 && form <= last, "model: %s is %d, expected 0 to %d", name, form, last);
    return CPA_OK;
}

/* What the layers of a form have in matrices. */
static cpa_status check_matrices(const cpa_model_shape *model, int32_t f, int has_network, cpa_error *err) {
    const cpa_model_form *form = &model->forms[f];
    const int expands = form->widths.expanded != 0;
    REQUIRE(err, (form->widths.out_dim != 0) == (form->layer_matrices != NULL),
            "form %d: out_dim is %d with layer_matrices %p, expected both or none", f, form->widths.out_dim,
            (const void *)form->layer_matrices);
    REQUIRE(err, has_network || !form->layer_matrices,
            "form %d: has layer_matrices without a network, expected one that gives them", f);
    REQUIRE(err, !has_network || expands == (form->layer_expansions != NULL),
            "form %d: expanded is %d with layer_expansions %p, expected both or none", f, form->widths.expanded,
            (const void *)form->layer_expansions);
    REQUIRE(err, has_network || !form->layer_expansions,
            "form %d: has layer_expansions without a network, expected NULL, for those of the synthetic model", f);
    REQUIRE(err, form->widths.absorbs == CPA_ABSORB_NEVER,
            "form %d: absorbs is %d, expected 0: in an engine rows that absorb have a form of their own", f,
            (int)form->widths.absorbs);
    REQUIRE(err, !expands || f != model->decode_form,
            "form %d: is expanded and decode_form, expected rows that attend latents as they lie in decode", f);
    return CPA_OK;
}

/* Scores over latents have the scale of the heads whose projections are folded into queries. */
static cpa_status check_scales(const cpa_model_shape *model, cpa_error *err) {
    if (!model->attention.v_in_k) return CPA_OK;
    REQUIRE(err, model->n_forms > 0, "model: v_in_k without forms, expected one with layer_scales");
    for (int32_t f = 0; f < model->n_forms; f++) {
        for (int32_t layer = 0; layer < model->layers && !model->forms[f].widths.expanded; layer++)
            REQUIRE(err, cpa_model_form_scale(model, f, layer) != 0,
                    "form %d, layer %d: scale is 0 over latents, expected that of the heads", f, layer);
    }
    return CPA_OK;
}

cpa_status cpa_model_forms_check(const cpa_model_shape *model, int has_network, cpa_error *err) {
    REQUIRE(err, model->n_forms >= 0 && model->n_forms <= CPA_MOST_ROW_FORMS, "model: n_forms is %d, expected 0 to %d",
            model->n_forms, CPA_MOST_ROW_FORMS);
    REQUIRE(err, (model->n_forms > 0) == (model->forms != NULL), "model: %d forms at %p, expected both or none",
            model->n_forms, (const void *)model->forms);
    CPA_TRY(check_index("prefill_form", model->prefill_form, model->n_forms, err));
    CPA_TRY(check_index("decode_form", model->decode_form, model->n_forms, err));
    for (int32_t f = 0; f < model->n_forms; f++) {
        REQUIRE(err, CPA_RESERVED_IS_ZERO(model->forms[f]), "form %d: the reserved bytes are not zero", f);
        CPA_TRY(check_matrices(model, f, has_network, err));
        CPA_TRY(check_layers(model, f, err));
    }
    return check_scales(model, err);
}

uint64_t cpa_model_forms_hash(const cpa_model_shape *model) {
    const int32_t used[] = {model->n_forms, model->prefill_form, model->decode_form};
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, used, sizeof used);
    for (int32_t f = 0; f < model->n_forms; f++) {
        hash = cpa_hash_bytes(hash, &model->forms[f].widths, sizeof model->forms[f].widths);
        for (int32_t layer = 0; layer < model->layers; layer++) {
            const cpa_mask mask = cpa_model_form_mask(model, f, layer);
            const int64_t same[] = {mask.causal, mask.window, mask.sinks};
            const float scale = cpa_model_form_scale(model, f, layer);
            hash = cpa_hash_bytes(hash, same, sizeof same);
            hash = cpa_hash_bytes(hash, &scale, sizeof scale);
        }
    }
    return hash;
}
