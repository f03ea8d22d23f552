/* The weights of a Hugging Face folder on a device, as an engine takes them. */
#ifndef CPA_LLM_FOLDER_MODEL_H
#define CPA_LLM_FOLDER_MODEL_H

#include "src/model/transformer.h"

/* One that was never opened has only zeros. */
typedef struct cpa_folder_model {
    cpa_device *device; /* a handle of its own; the memory is that of the engine's */
    cpa_transformer *transformer;
} cpa_folder_model;

/* Loads the weights to the device that `engine_device` opens, which is that of the engine; the model must outlive the
 * engine. A message names the folder. On failure it is as if never opened. */
cpa_status cpa_folder_model_open(const char *folder, const cpa_model_config *config,
                                 const cpa_transformer_options *options, const cpa_device_options *engine_device,
                                 cpa_folder_model *out, cpa_error *err);
void cpa_folder_model_close(cpa_folder_model *model);

/* Bytes that it takes of the device of the rank that has the most of it; options->rank does not count. */
int64_t cpa_folder_model_bytes(const cpa_model_config *config, const cpa_transformer_options *options);

#endif
