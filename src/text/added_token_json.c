#include "src/text/added_token_json.h"

#include "base/check.h"
#include "src/text/added_tokens.h"

cpa_status cpa_added_token_json_read(const cpa_json *json, cpa_added_token_json *out, cpa_error *err) {
    cpa_added_token_json token = {.content = ""};
    int single_word = 0, lstrip = 0, rstrip = 0;
    CPA_TRY(cpa_json_text(json, "content", CPA_JSON_REQUIRED, &token.content, err));
    CPA_TRY(cpa_json_flag(json, "single_word", &single_word, err));
    CPA_TRY(cpa_json_flag(json, "lstrip", &lstrip, err));
    CPA_TRY(cpa_json_flag(json, "rstrip", &rstrip, err));
    CPA_TRY(cpa_json_flag(json, "special", &token.is_special, err));
    token.is_normalized = !token.is_special;
    CPA_TRY(cpa_json_flag(json, "normalized", &token.is_normalized, err));
    token.flags =
        (single_word ? CPA_ADDED_SINGLE_WORD : 0) | (lstrip ? CPA_ADDED_LSTRIP : 0) | (rstrip ? CPA_ADDED_RSTRIP : 0);
    *out = token;
    return CPA_OK;
}
