/* An added token as tokenizer.json and tokenizer_config.json write it. */
#ifndef CPA_TEXT_ADDED_TOKEN_JSON_H
#define CPA_TEXT_ADDED_TOKEN_JSON_H

#include "base/json_file.h"

typedef struct cpa_added_token_json {
    const char *content; /* "content" of the object */
    int flags;           /* as of cpa_added_tokens_add */
    int is_special;
    int is_normalized; /* the token is looked for in the normal form of a text */
} cpa_added_token_json;

/* Reads an object. CPA_INVALID, with the key, if it is no added token. */
cpa_status cpa_added_token_json_read(const cpa_json *json, cpa_added_token_json *out, cpa_error *err);

#endif
