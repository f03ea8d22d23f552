#include "launcher/settings/model_file.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "launcher/settings/yaml_file.h"
#include "program/names.h"

static const char *const dtypes[] = {"fp32", "bf16", "fp16", NULL};

/* The keys of a file as the table parses them. */
typedef struct model_keys {
    char name[CPA_TEXT_BYTES];
    int64_t layers, q_heads, kv_heads, head_dim, v_head_dim, latent_dim, rope_dim, dtype, causal, window, sinks;
    double scale;
    char layer_windows[CPA_TEXT_BYTES];
} model_keys;

#define INT(member, initial, min, max) CPA_FIELD_INT, offsetof(model_keys, member), initial, min, max
#define HEADS_MAX 1024

/* One row a key; those without a default are required. */
static const cpa_field table[] = {
    {NULL, "name", NULL, CPA_FIELD_TEXT, offsetof(model_keys, name), "", .help = NULL},
    {NULL, "layers", NULL, INT(layers, NULL, 1, CPA_MODEL_MAX_LAYERS), .help = NULL},
    {NULL, "q_heads", NULL, INT(q_heads, NULL, 1, HEADS_MAX), .help = NULL},
    {NULL, "kv_heads", NULL, INT(kv_heads, NULL, 1, HEADS_MAX), .help = NULL},
    {NULL, "head_dim", NULL, INT(head_dim, NULL, 1, CPA_MAX_HEAD_DIM), .help = NULL},
    {NULL, "v_head_dim", NULL, INT(v_head_dim, "0", 0, CPA_MAX_HEAD_DIM), .help = NULL},
    {NULL, "latent_dim", NULL, INT(latent_dim, "0", 0, CPA_MAX_HEAD_DIM), .help = NULL},
    {NULL, "rope_dim", NULL, INT(rope_dim, "0", 0, CPA_MAX_HEAD_DIM), .help = NULL},
    {NULL, "scale", NULL, CPA_FIELD_REAL, offsetof(model_keys, scale), "0", 0, 1e6, .help = NULL},
    {NULL, "dtype", NULL, CPA_FIELD_CHOICE, offsetof(model_keys, dtype), NULL, .choices = dtypes,
     .named = cpa_named_dtype},
    {NULL, "causal", NULL, CPA_FIELD_FLAG, offsetof(model_keys, causal), "true", .help = NULL},
    {NULL, "window", NULL, INT(window, "0", 0, 0x1p40), .help = NULL},
    {NULL, "sinks", NULL, INT(sinks, "0", 0, 0x1p30), .help = NULL},
    {NULL, "layer_windows", NULL, CPA_FIELD_TEXT, offsetof(model_keys, layer_windows), "", .help = NULL},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };

void cpa_model_small(cpa_model_file *out) {
    *out = (cpa_model_file){
        .name = "small",
        .shape = {.layers = 4,
                  .attention = {.q_heads = 8, .kv_heads = 2, .k_dim = 64, .v_dim = 64},
                  .mask = {.causal = 1}},
    };
}

/* The line of a key in the file; 0 if it is not there. */
static int line_of(const cpa_yaml_file *file, const char *name) {
    for (int i = 0; i < file->n_entries; i++) {
        if (strcmp(file->entries[i].field->name, name) == 0) return file->entries[i].line;
    }
    return 0;
}

static cpa_status read_keys(const char *path, const cpa_yaml_file *file, model_keys *keys, cpa_error *err) {
    for (int f = 0; f < N_FIELDS; f++) {
        if (table[f].initial) {
            CPA_TRY(cpa_field_set(&table[f], keys, "default", table[f].initial, err));
        } else if (!line_of(file, table[f].name)) {
            int last = file->n_entries ? file->entries[file->n_entries - 1].line : 1;
            return cpa_fail(err, CPA_INVALID, "%s:%d: found no key '%s', expected one", path, last, table[f].name);
        }
    }
    for (int i = 0; i < file->n_entries; i++) {
        const cpa_yaml_entry *entry = &file->entries[i];
        char where[CPA_TEXT_BYTES + 64];
        snprintf(where, sizeof where, "%s:%d: %s", path, entry->line, entry->field->name);
        CPA_TRY(cpa_field_set(entry->field, keys, where, entry->value, err));
    }
    if (keys->q_heads % keys->kv_heads != 0) {
        return cpa_fail(err, CPA_INVALID,
                        "%s:%d: q_heads: found %" PRId64 ", expected a multiple of kv_heads (%" PRId64 ")", path,
                        line_of(file, "q_heads"), keys->q_heads, keys->kv_heads);
    }
    return CPA_OK;
}

/* Windows separated by spaces, "4096 4096 4096 0", that the layers take in turn. */
static cpa_status read_layer_windows(const char *path, const cpa_yaml_file *file, const model_keys *keys,
                                     cpa_model_file *model, cpa_error *err) {
    int64_t windows[CPA_MODEL_MAX_LAYERS];
    int n = 0;
    for (const char *at = keys->layer_windows; *at; n++) {
        char *end;
        double window = strtod(at, &end);
        if (end == at || (*end && *end != ' ') || window < 0 || window > 0x1p40 || window != floor(window) ||
            n == keys->layers) {
            return cpa_fail(err, CPA_INVALID,
                            "%s:%d: layer_windows: found '%s', expected at most %" PRId64
                            " numbers of tokens (0: all) with spaces between them",
                            path, line_of(file, "layer_windows"), at, keys->layers);
        }
        windows[n] = (int64_t)window;
        for (at = end; *at == ' ';) at++;
    }
    model->per_layer = n > 0;
    for (int64_t layer = 0; n > 0 && layer < keys->layers; layer++) {
        model->layer_masks[layer] = model->shape.mask;
        model->layer_masks[layer].window = windows[layer % n];
    }
    return CPA_OK;
}

/* Heads over latents: what they say of these, and what they then are. */
static cpa_status read_latents(const char *path, const cpa_yaml_file *file, const model_keys *keys,
                               cpa_model_file *model, cpa_error *err) {
    const int64_t value = keys->v_head_dim ? keys->v_head_dim : keys->head_dim,
                  width = keys->latent_dim + keys->rope_dim;
    const char *key = keys->latent_dim == 0 ? (keys->rope_dim > 0 ? "rope_dim" : "scale") : "latent_dim";
    if (keys->latent_dim == 0 && keys->rope_dim == 0 && keys->scale == 0) return CPA_OK;
    if (keys->latent_dim == 0)
        return cpa_fail(err, CPA_INVALID, "%s:%d: %s: found without latent_dim, expected both or none", path,
                        line_of(file, key), key);
    if (width > CPA_MAX_HEAD_DIM || keys->kv_heads != 1 || keys->head_dim <= keys->rope_dim)
        return cpa_fail(err, CPA_INVALID,
                        "%s:%d: latent_dim: found %" PRId64 " with rope_dim %" PRId64 ", head_dim %" PRId64
                        " and %" PRId64 " kv_heads, expected at most %d of both, wider heads than rope_dim, and 1",
                        path, line_of(file, key), keys->latent_dim, keys->rope_dim, keys->head_dim, keys->kv_heads,
                        CPA_MAX_HEAD_DIM);
    model->shape.attention.k_dim = (int32_t)width;
    model->shape.attention.v_dim = (int32_t)keys->latent_dim;
    model->shape.attention.v_in_k = 1;
    model->head_dim = (int32_t)keys->head_dim;
    model->v_head_dim = (int32_t)value;
    for (int64_t layer = 0; layer < keys->layers; layer++)
        model->scales[layer] = keys->scale > 0 ? (float)keys->scale : 1 / sqrtf((float)keys->head_dim);
    return CPA_OK;
}

/* Checks the keys and turns them into a model, but for its name. */
static cpa_status build(const char *path, const cpa_yaml_file *file, model_keys *keys, cpa_model_file *model,
                        cpa_error *err) {
    CPA_TRY(read_keys(path, file, keys, err));
    model->shape = (cpa_model_shape){
        .layers = (int32_t)keys->layers,
        .attention = {.q_heads = (int32_t)keys->q_heads,
                      .kv_heads = (int32_t)keys->kv_heads,
                      .k_dim = (int32_t)keys->head_dim,
                      .v_dim = (int32_t)(keys->v_head_dim ? keys->v_head_dim : keys->head_dim),
                      .dtype = (cpa_dtype)keys->dtype,
                      .kv_dtype = (cpa_dtype)keys->dtype},
        .mask = {.causal = (int32_t)keys->causal, .sinks = (int32_t)keys->sinks, .window = keys->window},
    };
    CPA_TRY(read_latents(path, file, keys, model, err));
    return read_layer_windows(path, file, keys, model, err);
}

cpa_status cpa_model_load(const char *path, cpa_model_file *out, cpa_error *err) {
    cpa_yaml_file file;
    model_keys keys = {.layers = 0};
    CPA_TRY(cpa_yaml_open(path, table, N_FIELDS, &file, err));
    cpa_model_file *model = calloc(1, sizeof *model); /* too large for a small stack */
    cpa_status status =
        model ? build(path, &file, &keys, model, err) : cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", path);
    cpa_yaml_close(&file);
    if (status == CPA_OK) {
        const char *slash = strrchr(path, '/');
        snprintf(model->name, sizeof model->name, "%s", keys.name[0] ? keys.name : slash ? slash + 1 : path);
        *out = *model;
    }
    free(model);
    return status;
}

void cpa_model_of_config(const cpa_model_config *config, const char *folder, cpa_dtype dtype, cpa_model_file *out) {
    _Static_assert(CPA_MODEL_MAX_LAYERS >= CPA_CONFIG_MAX_LAYERS, "every layer has its mask");
    size_t end = strlen(folder);
    while (end > 1 && folder[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && folder[begin - 1] != '/') begin--;
    *out = (cpa_model_file){.name = ""};
    snprintf(out->name, sizeof out->name, "%.*s", (int)(end - begin), folder + begin);
    out->shape = cpa_model_config_shape(config, dtype, out->layer_masks);
    out->per_layer = out->shape.layer_masks != NULL;
    out->shape.layer_masks = NULL;
    if (!config->latent.latent) return;
    out->head_dim = config->latent.nope + config->latent.rope;
    out->v_head_dim = config->latent.value;
    for (int32_t i = 0; i < out->shape.layers; i++) out->scales[i] = config->latent.scale;
}

void cpa_model_set_window(cpa_model_file *model, int64_t window) {
    model->shape.mask.window = window;
    model->per_layer = 0;
}

void cpa_model_set_sinks(cpa_model_file *model, int32_t sinks) {
    model->shape.mask.sinks = sinks;
    for (int32_t layer = 0; layer < model->shape.layers; layer++) model->layer_masks[layer].sinks = sinks;
}

cpa_status cpa_model_set_rules(cpa_model_file *model, cpa_model_rule_choice choice, cpa_error *err) {
    const int32_t heads = model->shape.attention.q_heads;
    model->has_rules = choice.softcap > 0 || choice.temperature_len > 0 || choice.alibi || choice.sink_logits;
    if ((choice.alibi || choice.sink_logits) && heads > CPA_MODEL_MAX_RULED_HEADS)
        return cpa_fail(err, CPA_INVALID, "--%s: found with %d query heads, expected at most %d",
                        choice.alibi ? "alibi" : "sink-logits", heads, CPA_MODEL_MAX_RULED_HEADS);
    for (int32_t h = 0; h < heads && (choice.alibi || choice.sink_logits); h++) {
        model->alibi_slopes[h] = exp2f(-8.0f * (float)(h + 1) / (float)heads);
        model->sink_logits[h] = (float)(h % 5) - 1;
    }
    for (int32_t layer = 0; model->has_rules && layer < model->shape.layers; layer++) {
        model->rules[layer] = (cpa_score_rules){.softcap = (float)choice.softcap,
                                                .temperature_len = (float)choice.temperature_len,
                                                .alibi_slopes = choice.alibi ? model->alibi_slopes : NULL,
                                                .sink_logits = choice.sink_logits ? model->sink_logits : NULL};
    }
    return CPA_OK;
}

void cpa_model_set_forms(cpa_model_file *model) {
    enum { PREFILL, DECODE };
    if (model->head_dim == 0) return;
    model->forms[PREFILL] = (cpa_model_form){
        .widths = {.k_dim = model->head_dim, .v_dim = model->v_head_dim, .expanded = 1}, .layer_scales = model->scales};
    model->forms[DECODE] = (cpa_model_form){.layer_scales = model->scales};
    model->shape.prefill_form = PREFILL;
    model->shape.decode_form = DECODE;
}

cpa_status cpa_model_cut_layers(cpa_model_file *model, int64_t n, cpa_error *err) {
    if (n > model->shape.layers)
        return cpa_fail(err, CPA_INVALID, "--layers: found %" PRId64 ", expected at most the %d of %.200s", n,
                        model->shape.layers, model->name);
    model->shape.layers = (int32_t)n;
    return CPA_OK;
}

cpa_model_shape cpa_model_shape_of(const cpa_model_file *model) {
    cpa_model_shape shape = model->shape;
    shape.layer_rules = model->has_rules ? model->rules : NULL;
    shape.layer_masks = model->per_layer ? model->layer_masks : NULL;
    if (model->n_scales > 0) {
        shape.attention.n_scales = model->n_scales;
        shape.attention.k_scales = model->k_scales;
        shape.attention.v_scales = shape.attention.v_in_k ? model->k_scales : model->v_scales;
    }
    shape.unquantised_layers = model->has_unquantised ? model->unquantised : NULL;
    shape.forms = model->head_dim > 0 ? model->forms : NULL;
    shape.n_forms = model->head_dim > 0 ? sizeof model->forms / sizeof model->forms[0] : 0;
    return shape;
}

void cpa_model_describe(const cpa_model_file *model, char *out, size_t bytes) {
    const cpa_model_shape *shape = &model->shape;
    char name[64], width[64] = "";
    cpa_text_quote(model->name, strlen(model->name), name, sizeof name);
    if (shape->attention.v_in_k)
        snprintf(width, sizeof width, " (latents of %d; prompts %d)", shape->attention.v_dim, model->head_dim);
    else if (shape->attention.v_dim != shape->attention.k_dim)
        snprintf(width, sizeof width, " (values %d)", shape->attention.v_dim);
    int used = snprintf(out, bytes, "%s: %d layers, %d query and %d KV heads of %d%s, %s, %s", name, shape->layers,
                        shape->attention.q_heads, shape->attention.kv_heads, shape->attention.k_dim, width,
                        cpa_dtype_name(shape->attention.dtype), shape->mask.causal ? "causal" : "full attention");
    if (model->per_layer && (size_t)used < bytes) {
        int windows = 0;
        for (int32_t layer = 0; layer < shape->layers; layer++) windows += model->layer_masks[layer].window > 0;
        snprintf(out + used, bytes - (size_t)used, ", windows in %d layers, %d sinks", windows, shape->mask.sinks);
    } else if (shape->mask.window > 0 && (size_t)used < bytes) {
        snprintf(out + used, bytes - (size_t)used, ", window %" PRId64 " with %d sinks", shape->mask.window,
                 shape->mask.sinks);
    }
}
