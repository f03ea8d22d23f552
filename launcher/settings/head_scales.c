#include "launcher/settings/head_scales.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "program/field.h"

#define MOST_SCALE 1e30

/* Scales of an option. */
typedef struct list {
    const char *option;
    int32_t n;
    float of[CPA_MODEL_MAX_RULED_HEADS];
} list;

int cpa_head_scales_given(const char *text) {
    return text[0] && strcmp(text, "auto") != 0;
}

static cpa_status parse(const char *option, const char *text, list *out, cpa_error *err) {
    *out = (list){.option = option};
    if (!cpa_head_scales_given(text)) return CPA_OK;
    for (const char *item = text, *end = text; *end; item = end + 1) {
        const size_t length = strcspn(item, ",");
        char *stop, found[64];
        const double scale = strspn(item, "0123456789.eE+-") == length ? strtod(item, &stop) : 0;
        end = item + length;
        cpa_text_quote(item, length, found, sizeof found);
        if (!(scale >= (double)FLT_MIN && scale <= MOST_SCALE) || stop != end)
            return cpa_fail(err, CPA_INVALID,
                            "%s: found '%s', expected a number from %g to %g, or one for each KV head", option, found,
                            (double)FLT_MIN, MOST_SCALE);
        if (out->n == CPA_MODEL_MAX_RULED_HEADS)
            return cpa_fail(err, CPA_INVALID, "%s: found more than %d numbers, expected as many as there are KV heads",
                            option, CPA_MODEL_MAX_RULED_HEADS);
        out->of[out->n++] = (float)scale;
    }
    return CPA_OK;
}

static cpa_status parse_both(const cpa_settings *settings, list *k, list *v, cpa_error *err) {
    CPA_TRY(parse("--k-scale", settings->k_scale, k, err));
    CPA_TRY(parse("--v-scale", settings->v_scale, v, err));
    if (v->n == 0 || k->n > 0) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "--v-scale: found without --k-scale, expected both or none");
}

cpa_status cpa_head_scales_read(const cpa_settings *settings, cpa_error *err) {
    list k, v;
    return parse_both(settings, &k, &v, err);
}

/* One scale, or one for each of so many heads, as the latter. */
static cpa_status spread(const list *scales, int32_t heads, float *out, cpa_error *err) {
    if (scales->n != 1 && scales->n != heads)
        return cpa_fail(err, CPA_INVALID, "%s: found %d scales, expected 1, or those of %d KV heads", scales->option,
                        scales->n, heads);
    for (int32_t head = 0; head < heads; head++) out[head] = scales->of[scales->n > 1 ? head : 0];
    return CPA_OK;
}

cpa_status cpa_head_scales_set(const cpa_settings *settings, cpa_model_file *model, cpa_error *err) {
    cpa_attention_shape *shape = &model->shape.attention;
    list k, v;
    CPA_TRY(parse_both(settings, &k, &v, err));
    if (shape->v_in_k && v.n > 0 && (v.n != k.n || v.of[0] != k.of[0]))
        return cpa_fail(err, CPA_INVALID,
                        "--v-scale: found %g over latents, expected none, or %g as --k-scale, as values lie in keys",
                        (double)v.of[0], (double)k.of[0]);
    if (!shape->v_in_k && k.n > 0 && v.n == 0)
        return cpa_fail(err, CPA_INVALID, "--k-scale: found without --v-scale, expected both or none");
    if (k.n <= 1 && v.n <= 1) {
        shape->k_scale = k.of[0];
        shape->v_scale = shape->v_in_k ? k.of[0] : v.of[0];
        return CPA_OK;
    }
    CPA_TRY(spread(&k, shape->kv_heads, model->k_scales, err));
    CPA_TRY(spread(shape->v_in_k ? &k : &v, shape->kv_heads, model->v_scales, err));
    model->n_scales = shape->kv_heads;
    return CPA_OK;
}
