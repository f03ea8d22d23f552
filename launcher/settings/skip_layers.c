#include "launcher/settings/skip_layers.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "program/field.h"

static const char WINDOWS[] = "sliding_window";

/* Marks what an item of so many characters names; 0: it names nothing of the model. */
static int mark(cpa_model_file *model, const char *item, size_t length) {
    const cpa_model_shape shape = cpa_model_shape_of(model);
    int marked = 0;
    if (length == strlen(WINDOWS) && strncmp(item, WINDOWS, length) == 0) {
        for (int32_t layer = 0; layer < shape.layers; layer++) {
            if (cpa_model_mask(&shape, layer).window == 0) continue;
            model->unquantised[layer] = marked = 1;
        }
        return marked;
    }
    char *end;
    const size_t digits = strspn(item + (*item == '-'), "0123456789");
    if (digits == 0 || digits + (*item == '-') != length) return 0;
    const long number = strtol(item, &end, 10);
    if (number < -shape.layers || number >= shape.layers) return 0;
    model->unquantised[number < 0 ? shape.layers + number : number] = 1;
    return 1;
}

cpa_status cpa_skip_layers(const char *where, const char *list, cpa_model_file *model, cpa_error *err) {
    const cpa_attention_shape *shape = &model->shape.attention;
    if (!*list) return CPA_OK;
    if (!cpa_dtype_is_quantised(shape->kv_dtype) || shape->v_in_k)
        return cpa_fail(err, CPA_INVALID, "%s: found with a cache of %s%s, expected a quantised one of keys and values",
                        where, cpa_dtype_name(shape->kv_dtype), shape->v_in_k ? " of latents" : "");
    for (const char *item = list, *end = list; *end; item = end + 1) {
        end = item + strcspn(item, ",");
        if (mark(model, item, (size_t)(end - item))) continue;
        char found[64];
        cpa_text_quote(item, (size_t)(end - item), found, sizeof found);
        return cpa_fail(err, CPA_INVALID,
                        "%s: found '%s', expected layers from 0 to %d, or from -1 to -%d, or %s where some have one",
                        where, found, model->shape.layers - 1, model->shape.layers, WINDOWS);
    }
    model->has_unquantised = 1;
    return CPA_OK;
}
