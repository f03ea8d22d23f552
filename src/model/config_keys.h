/* Keys of config.json that are known. What is not, and by its name may change attention, norms, scales or experts, is refused:
 * tokens that are nearly right are worse than none. */
#ifndef CPA_MODEL_CONFIG_KEYS_H
#define CPA_MODEL_CONFIG_KEYS_H

#include "base/json_file.h"

/* CPA_UNSUPPORTED, with a line that names the key, for the first key of the file that the family does not know, whose
 * name speaks of attention, positions, norms, scales or experts (`words` of config_keys.c), and whose value is none of
 * null, false, and what transformers has without the key. */
cpa_status cpa_config_keys_check(const cpa_json *json, const char *family, cpa_error *err);

/* The same for the object of rope_parameters or rope_scaling, in all families. */
cpa_status cpa_config_keys_check_scaling(const cpa_json *json, cpa_error *err);

#endif
