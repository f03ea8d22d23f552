#include "src/text/tokenizer.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "src/text/detokenizer.h"
#include "src/text/tokenizer_json.h"
#include "src/text/tokenizer_model.h"
#include "src/text/utf8.h"

#define MAX_TEXT_BYTES ((size_t)1 << 28) /* of which no step makes more than 1 GiB */

struct cpa_tokenizer {
    cpa_token_texts texts;
    cpa_tokenizer_json *json; /* one of these two */
    cpa_tokenizer_model *model;
};

/* Of tokenizer.json if `path` names that, else of tokenizer.model. */
static cpa_status open_files(const char *folder, const char *path, cpa_tokenizer **out, cpa_error *err) {
    cpa_tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a tokenizer", folder);
    cpa_status status = path ? cpa_tokenizer_json_open(path, &tokenizer->json, &tokenizer->texts, err)
                             : cpa_tokenizer_model_open(folder, &tokenizer->model, &tokenizer->texts, err);
    if (status != CPA_OK) {
        cpa_tokenizer_close(tokenizer);
        return status;
    }
    *out = tokenizer;
    return CPA_OK;
}

cpa_status cpa_tokenizer_open(const char *folder, cpa_tokenizer **out, cpa_error *err) {
    char path[PATH_MAX];
    if (strlen(folder) + sizeof "/tokenizer_config.json" > sizeof path)
        return cpa_fail(err, CPA_INVALID, "%.80s...: the path is too long", folder);
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    if (access(path, F_OK) == 0) return open_files(folder, path, out, err);
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    if (access(path, F_OK) == 0) return open_files(folder, NULL, out, err);
    *out = NULL;
    return CPA_OK;
}

void cpa_tokenizer_close(cpa_tokenizer *tokenizer) {
    if (!tokenizer) return;
    cpa_tokenizer_json_close(tokenizer->json);
    cpa_tokenizer_model_close(tokenizer->model);
    cpa_token_texts_release(&tokenizer->texts);
    free(tokenizer);
}

int64_t cpa_tokenizer_vocabulary(const cpa_tokenizer *tokenizer) {
    return tokenizer->texts.count;
}

cpa_status cpa_tokenizer_encode(const cpa_tokenizer *tokenizer, const char *text, size_t bytes, int add_special,
                                cpa_token_list *out, cpa_error *err) {
    const size_t valid = cpa_utf8_valid(text, bytes);
    const int64_t before = out->count;
    if (valid < bytes) return cpa_fail(err, CPA_INVALID, "the text is not UTF-8 at byte %zu", valid);
    if (bytes > MAX_TEXT_BYTES)
        return cpa_fail(err, CPA_INVALID, "found a text of %zu bytes, expected at most %zu", bytes, MAX_TEXT_BYTES);
    cpa_status status = tokenizer->json
                            ? cpa_tokenizer_json_encode(tokenizer->json, text, bytes, add_special, out, err)
                            : cpa_tokenizer_model_encode(tokenizer->model, text, bytes, add_special, out, err);
    if (status != CPA_OK) out->count = before;
    return status;
}

cpa_status cpa_tokenizer_decode(const cpa_tokenizer *tokenizer, const uint32_t *ids, int64_t n, int skip_special,
                                char **text, size_t *bytes, cpa_error *err) {
    cpa_detokenizer detokenizer = cpa_detokenizer_begin(&tokenizer->texts, skip_special, 1, 1);
    cpa_bytes out = {.count = 0};
    int ok = 1;
    for (int64_t i = 0; ok && i < n; i++) ok = cpa_detokenizer_push(&detokenizer, ids[i], &out);
    ok = ok && cpa_detokenizer_finish(&detokenizer, &out) && cpa_bytes_add(&out, "", 1);
    cpa_bytes_release(&detokenizer.pending);
    if (!ok) {
        cpa_bytes_release(&out);
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of %lld tokens", (long long)n);
    }
    *text = out.data;
    *bytes = (size_t)out.count - 1;
    return CPA_OK;
}

const char *cpa_tokenizer_token(const cpa_tokenizer *tokenizer, uint32_t id, size_t *bytes) {
    const cpa_token_text *token = cpa_token_texts_find(&tokenizer->texts, id);
    if (!token) return NULL;
    *bytes = token->bytes;
    return tokenizer->texts.texts.data ? tokenizer->texts.texts.data + token->at : "";
}

int cpa_tokenizer_is_special(const cpa_tokenizer *tokenizer, uint32_t id) {
    const cpa_token_text *token = cpa_token_texts_find(&tokenizer->texts, id);
    return token && token->is_special;
}

const cpa_token_texts *cpa_tokenizer_texts(const cpa_tokenizer *tokenizer) {
    return &tokenizer->texts;
}
