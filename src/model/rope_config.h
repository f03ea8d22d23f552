/* Rotary positions as config.json describes them, in the forms of transformers 4 and 5. */
#ifndef CPA_MODEL_ROPE_CONFIG_H
#define CPA_MODEL_ROPE_CONFIG_H

#include <cpattn/nn.h>

#include "base/json_file.h"

/* Reads rope_theta, rope_scaling, rope_parameters and what belongs to them, for heads of head_dim elements,
 * max_position positions and, in a file without a base, default_theta. Where keys contradict each other that one counts
 * which counts for transformers 5. CPA_INVALID and CPA_UNSUPPORTED come with a line that names file and key. *out is set only on success. */
cpa_status cpa_rope_config_read(const cpa_json *json, int32_t head_dim, int64_t max_position, double default_theta,
                                cpa_rope_config *out, cpa_error *err);

/* The factor that DeepSeek's YaRN has queries and keys multiplied by in place of cosines and sines: 0.1 mscale_all_dim
 * ln(factor) + 1, or 1 where the scaling says no mscale_all_dim or there is none. */
cpa_status cpa_rope_config_score_factor(const cpa_json *json, double *out, cpa_error *err);

#endif
