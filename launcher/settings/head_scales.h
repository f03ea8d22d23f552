/* Scales of keys and of values, one of all heads or one for each: --k-scale, --v-scale. */
#ifndef CPA_SETTINGS_HEAD_SCALES_H
#define CPA_SETTINGS_HEAD_SCALES_H

#include "launcher/settings/model_file.h"
#include "launcher/settings/settings.h"

/* Whether the text of an option names scales: "auto" does not. */
int cpa_head_scales_given(const char *text);

/* What both options say, without a model: numbers with commas between them, of keys if of values. */
cpa_status cpa_head_scales_read(const cpa_settings *settings, cpa_error *err);

/* Gives a model the scales. One number is that of the tensor, unless the other option has as many as there are KV heads,
 * or both have. Latents, whose values lie in their keys, have those of keys. */
cpa_status cpa_head_scales_set(const cpa_settings *settings, cpa_model_file *model, cpa_error *err);

#endif
