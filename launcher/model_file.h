/* The shape of a model: read from a YAML file such as those in configs/. */
#ifndef CPA_LAUNCHER_MODEL_FILE_H
#define CPA_LAUNCHER_MODEL_FILE_H

#include <cpattn/engine.h>

#include "launcher/field.h"

/* Plain memory: rank 0 broadcasts it. */
typedef struct cpa_model {
    char name[CPA_TEXT_BYTES];
    cpa_model_shape shape;
} cpa_model;

/* The shape that is used when no file is named: that of configs/small.yaml. */
cpa_model cpa_model_small(void);

/* Reads and checks a file. Otherwise CPA_INVALID, "PATH:LINE: KEY: found ..., expected ...". *out is set only on
 * success. */
cpa_status cpa_model_load(const char *path, cpa_model *out, cpa_error *err);

/* One line such as "small: 4 layers, 8 query and 2 KV heads of 64, fp32, causal". */
void cpa_model_describe(const cpa_model *model, char *out, size_t bytes);

/* "fp32", "bf16" or "fp16". */
const char *cpa_dtype_name(cpa_dtype dtype);

#endif
