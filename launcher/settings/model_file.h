/* The shape of a model: read from a YAML file such as those in configs/, or that of a Hugging Face folder. */
#ifndef CPA_LAUNCHER_MODEL_FILE_H
#define CPA_LAUNCHER_MODEL_FILE_H

#include <cpattn/engine.h>

#include "program/field.h"
#include "src/model/model_config.h"

#define CPA_MODEL_MAX_LAYERS 1024
#define CPA_MODEL_MAX_RULED_HEADS 1024

/* Plain memory: rank 0 broadcasts it. */
typedef struct cpa_model_file {
    char name[CPA_TEXT_BYTES];
    cpa_model_shape shape; /* without layer_masks and forms: see cpa_model_shape_of */
    int per_layer;         /* whether layers have masks of their own */
    cpa_mask layer_masks[CPA_MODEL_MAX_LAYERS];
    int32_t head_dim, v_head_dim; /* over latents: of the heads that prompts are attended by; 0: the cache has none */
    float scales[CPA_MODEL_MAX_LAYERS]; /* over latents: scale of scores of each layer */
    cpa_model_form forms[2];            /* over latents: of prompts, and of what decodes */
    /* Scales of the cache's heads; n_scales 0: it has none, and else both are there. */
    int32_t n_scales;
    float k_scales[CPA_MODEL_MAX_RULED_HEADS], v_scales[CPA_MODEL_MAX_RULED_HEADS];
    int has_unquantised; /* whether the cache of some layer is not quantised, beside that of others */
    uint8_t unquantised[CPA_MODEL_MAX_LAYERS];
    int has_rules; /* layers have score rules: all do, or none */
    cpa_score_rules rules[CPA_MODEL_MAX_LAYERS];
    float alibi_slopes[CPA_MODEL_MAX_RULED_HEADS], sink_logits[CPA_MODEL_MAX_RULED_HEADS];
} cpa_model_file;

/* The shape with the masks of the layers, and the forms of rows over latents, which point into the model. */
cpa_model_shape cpa_model_shape_of(const cpa_model_file *model);

/* Leaves the first n layers; CPA_INVALID where there are fewer. */
cpa_status cpa_model_cut_layers(cpa_model_file *model, int64_t n, cpa_error *err);

/* The same window for every layer, or the same number of sinks. */
void cpa_model_set_window(cpa_model_file *model, int64_t window);
void cpa_model_set_sinks(cpa_model_file *model, int32_t sinks);

/* Over latents: the forms, once the model lies for good, as they point into it. Does nothing otherwise. */
void cpa_model_set_forms(cpa_model_file *model);

/* What every layer does to scores: softcap and temperature_len as in cpattn/score.h; ALiBi with the slopes of its
 * paper; sink logits between -1 and 3, head after head. Fails where more heads have such than there is room for. To be
 * called where the model lies for good: it points into itself. */
typedef struct cpa_model_rule_choice {
    double softcap, temperature_len;
    int alibi, sink_logits;
} cpa_model_rule_choice;
cpa_status cpa_model_set_rules(cpa_model_file *model, cpa_model_rule_choice choice, cpa_error *err);

/* The shape that is used when no file is named: that of configs/small.yaml. */
void cpa_model_small(cpa_model_file *out);

/* Reads and checks a file. Otherwise CPA_INVALID, "PATH:LINE: KEY: found ..., expected ...". *out is set only on
 * success. */
cpa_status cpa_model_load(const char *path, cpa_model_file *out, cpa_error *err);

/* The attention of a Hugging Face folder's model, which is called like the folder, in a dtype. */
void cpa_model_of_config(const cpa_model_config *config, const char *folder, cpa_dtype dtype, cpa_model_file *out);

/* One line such as "small: 4 layers, 8 query and 2 KV heads of 64, fp32, causal". */
void cpa_model_describe(const cpa_model_file *model, char *out, size_t bytes);

#endif
