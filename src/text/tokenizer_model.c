#include "src/text/tokenizer_model.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "src/text/added_token_json.h"
#include "src/text/added_tokens.h"
#include "src/text/json_part.h"
#include "src/text/sentencepiece.h"
#include "src/text/token_decoder.h"
#include "src/text/utf8.h"
#include "src/text/vocabulary.h"

struct cpa_tokenizer_model {
    cpa_sentencepiece *pieces;
    cpa_added_tokens added; /* tokens that a text may spell out: control pieces and those of the config */
    uint32_t before, after; /* the ids put around a text; CPA_NO_ID: none */
};

/* ---- Reading ---- */

static cpa_status no_memory(const char *path, cpa_error *err) {
    return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a tokenizer", path);
}

/* What the ids of pieces stand for: U+2581 is a space. */
static cpa_status set_texts(const char *path, cpa_tokenizer_model *t, cpa_token_texts *texts, cpa_error *err) {
    const cpa_token_decoder bytes = {.has_byte_fallback = 1}, plain = {.strips = 0};
    const cpa_token_decoder spaces = {.replacements = 1, .replacement = {{"\xe2\x96\x81", " "}}};
    const int64_t count = cpa_sentencepiece_count(t->pieces);
    if (count > CPA_MAX_IDS)
        return cpa_fail(err, CPA_INVALID, "%s: found %lld pieces, expected at most %d", path, (long long)count,
                        CPA_MAX_IDS);
    texts->broken = CPA_BROKEN_BYTES;
    texts->strips = cpa_sentencepiece_strips(t->pieces);
    for (int64_t id = 0; id < count; id++) {
        cpa_piece_kind kind;
        const char *piece = cpa_sentencepiece_piece(t->pieces, id, &kind);
        const size_t n = strlen(piece);
        if (cpa_utf8_valid(piece, n) < n)
            return cpa_fail(err, CPA_INVALID, "%s: piece %lld: found bytes that are not UTF-8", path, (long long)id);
        const int is_special = kind == CPA_PIECE_CONTROL || kind == CPA_PIECE_UNKNOWN;
        const cpa_token_decoder *decoder = kind == CPA_PIECE_BYTE ? &bytes : is_special ? &plain : &spaces;
        if (!cpa_token_decoder_set(decoder, (uint32_t)id, piece, n, texts)) return no_memory(path, err);
        texts->tokens[id].is_special = (uint8_t)is_special;
        if (kind == CPA_PIECE_CONTROL && n > 0 && !cpa_added_tokens_add(&t->added, piece, n, (uint32_t)id, 0))
            return no_memory(path, err);
    }
    return CPA_OK;
}

/* An entry of "added_tokens_decoder", whose key is an id. */
static cpa_status add_token(const cpa_json *tokens, const char *key, cpa_tokenizer_model *t, cpa_token_texts *texts,
                            cpa_error *err) {
    const cpa_token_decoder plain = {.strips = 0};
    cpa_json_part part;
    cpa_added_token_json token;
    char *end;
    const long long id = strtoll(key, &end, 10);
    CPA_TRY(cpa_json_part_of(tokens, key, CPA_JSON_NO_INDEX, &part, err));
    if (*end || !*key || id < 0 || id >= CPA_MAX_IDS || !part.json.object)
        return cpa_json_refuse(tokens, key, "an id with an object", err);
    CPA_TRY(cpa_added_token_json_read(&part.json, &token, err));
    const size_t bytes = strlen(token.content);
    if (bytes == 0) return CPA_OK;
    if (!cpa_token_decoder_set(&plain, (uint32_t)id, token.content, bytes, texts) ||
        !cpa_added_tokens_add(&t->added, token.content, bytes, (uint32_t)id, token.flags))
        return no_memory(tokens->path, err);
    texts->tokens[id].is_special = (uint8_t)token.is_special;
    return CPA_OK;
}

/* The ids around a text are those that transformers puts there for such models: that of its beginning, unless the
 * config says otherwise. */
static cpa_status read_config(const cpa_json *config, cpa_tokenizer_model *t, cpa_token_texts *texts, cpa_error *err) {
    const int bos = cpa_sentencepiece_bos(t->pieces), eos = cpa_sentencepiece_eos(t->pieces);
    int add_bos = 1, add_eos = 0;
    cpa_json_part tokens;
    CPA_TRY(cpa_json_flag(config, "add_bos_token", &add_bos, err));
    CPA_TRY(cpa_json_flag(config, "add_eos_token", &add_eos, err));
    t->before = add_bos && bos >= 0 ? (uint32_t)bos : CPA_NO_ID;
    t->after = add_eos && eos >= 0 ? (uint32_t)eos : CPA_NO_ID;
    CPA_TRY(cpa_json_part_of(config, "added_tokens_decoder", CPA_JSON_NO_INDEX, &tokens, err));
    json_t *object = json_object_get(config->object, "added_tokens_decoder");
    for (void *at = json_object_iter(object); at; at = json_object_iter_next(object, at))
        CPA_TRY(add_token(&tokens.json, json_object_iter_key(at), t, texts, err));
    return CPA_OK;
}

static cpa_status read_folder(const char *folder, cpa_tokenizer_model *t, cpa_token_texts *texts, cpa_error *err) {
    char path[PATH_MAX], why[200] = "";
    cpa_json config = {.path = path, .prefix = ""};
    json_t *object = NULL;
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    t->pieces = cpa_sentencepiece_open(path, why, sizeof why);
    if (!t->pieces)
        return cpa_fail(err, CPA_INVALID, "%s: found no model of sentencepiece, expected one: %s", path, why);
    CPA_TRY(set_texts(path, t, texts, err));
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    if (access(path, F_OK) == 0) CPA_TRY(cpa_json_load(path, &object, err));
    config.object = object;
    cpa_status status = read_config(&config, t, texts, err);
    json_decref(object);
    return status;
}

cpa_status cpa_tokenizer_model_open(const char *folder, cpa_tokenizer_model **out, cpa_token_texts *texts,
                                    cpa_error *err) {
    cpa_tokenizer_model *tokenizer = calloc(1, sizeof *tokenizer);
    cpa_status status = tokenizer ? read_folder(folder, tokenizer, texts, err) : no_memory(folder, err);
    if (status != CPA_OK) {
        cpa_tokenizer_model_close(tokenizer);
        return status;
    }
    *out = tokenizer;
    return CPA_OK;
}

void cpa_tokenizer_model_close(cpa_tokenizer_model *tokenizer) {
    if (!tokenizer) return;
    cpa_sentencepiece_close(tokenizer->pieces);
    cpa_added_tokens_release(&tokenizer->added);
    free(tokenizer);
}

/* ---- Encoding ---- */

static int add_id(void *ctx, uint32_t id) {
    return cpa_token_list_add(ctx, id);
}

cpa_status cpa_tokenizer_model_encode(const cpa_tokenizer_model *tokenizer, const char *text, size_t bytes,
                                      int add_special, cpa_token_list *out, cpa_error *err) {
    cpa_added_search search = cpa_added_tokens_begin(&tokenizer->added, text, bytes);
    size_t begin, end;
    uint32_t id;
    int ok = !add_special || tokenizer->before == CPA_NO_ID || add_id(out, tokenizer->before);
    while (ok && cpa_added_tokens_next(&search, &begin, &end, &id)) {
        ok = id != CPA_NO_ID ? add_id(out, id)
                             : cpa_sentencepiece_encode(tokenizer->pieces, text + begin, end - begin, add_id, out);
    }
    if (ok && add_special && tokenizer->after != CPA_NO_ID) ok = add_id(out, tokenizer->after);
    return ok ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for the ids of a text of %zu bytes", bytes);
}
