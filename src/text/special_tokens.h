/* The special tokens of a Hugging Face folder, by the names that chat templates have for them. */
#ifndef CPA_TEXT_SPECIAL_TOKENS_H
#define CPA_TEXT_SPECIAL_TOKENS_H

#include "base/json_file.h"

/* *out is an object of texts: "bos_token", "eos_token", and what else of such names tokenizer_config.json has (`config`;
 * its object is NULL where there is no such file), or special_tokens_map.json beside an old one. CPA_INVALID for one that
 * is no token. The caller calls json_decref(*out). */
cpa_status cpa_special_tokens_read(const char *folder, const cpa_json *config, json_t **out, cpa_error *err);

#endif
