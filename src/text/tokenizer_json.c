#include "src/text/tokenizer_json.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/text/added_token_json.h"
#include "src/text/added_tokens.h"
#include "src/text/bpe.h"
#include "src/text/normalizer.h"
#include "src/text/pre_tokenizer.h"
#include "src/text/token_decoder.h"
#include "src/text/token_frame.h"

struct cpa_tokenizer_json {
    cpa_added_tokens written;    /* tokens that are looked for in the text as it is */
    cpa_added_tokens normalized; /* tokens that are looked for in the normal form of the text */
    cpa_normalizer normalizer;
    cpa_pre_tokenizer pre_tokenizer;
    cpa_bpe bpe;
    cpa_token_frame frame;
};

/* ---- Reading ---- */

static cpa_status no_memory(const cpa_json *json, cpa_error *err) {
    return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a tokenizer", json->path);
}

/* What the ids of the vocabulary stand for. */
static cpa_status set_texts(const cpa_json *file, const cpa_bpe *bpe, const cpa_token_decoder *decoder,
                            cpa_token_texts *texts, cpa_error *err) {
    cpa_token_decoder_begin(decoder, texts);
    for (uint64_t i = 0; bpe->vocabulary.slots && i <= bpe->vocabulary.mask; i++) {
        const cpa_vocabulary_slot *slot = &bpe->vocabulary.slots[i];
        if (slot->id == CPA_NO_ID) continue;
        if (!cpa_token_decoder_set(decoder, slot->id, bpe->vocabulary.strings.data + slot->at, slot->bytes, texts))
            return no_memory(file, err);
    }
    return CPA_OK;
}

/* A token that is looked for in the normal form, and stands for its own. */
static cpa_status add_normalized(const cpa_json *json, const cpa_token_decoder *decoder, cpa_tokenizer_json *t,
                                 const cpa_added_token_json *token, uint32_t id, cpa_token_texts *texts,
                                 cpa_error *err) {
    cpa_bytes normal = {.count = 0};
    cpa_status status = cpa_normalizer_apply(&t->normalizer, token->content, strlen(token->content), &normal, err);
    const size_t bytes = (size_t)normal.count;
    if (status == CPA_OK && bytes == 0)
        status = cpa_json_unsupported(json, "content", "a text of which the normalizer leaves something", err);
    if (status == CPA_OK && (!cpa_token_decoder_set(decoder, id, normal.data, bytes, texts) ||
                             !cpa_added_tokens_add(&t->normalized, normal.data, bytes, id, token->flags)))
        status = no_memory(json, err);
    cpa_bytes_release(&normal);
    return status;
}

/* An entry of "added_tokens". A string that the vocabulary has keeps its id there. */
static cpa_status add_token(const cpa_json *json, const cpa_token_decoder *decoder, cpa_tokenizer_json *t,
                            cpa_token_texts *texts, cpa_error *err) {
    cpa_added_token_json token;
    int64_t id = 0;
    CPA_TRY(cpa_added_token_json_read(json, &token, err));
    CPA_TRY(cpa_json_int(json, "id", CPA_JSON_REQUIRED, 0, CPA_MAX_IDS - 1, &id, err));
    const size_t bytes = strlen(token.content);
    const uint32_t known = cpa_vocabulary_find(&t->bpe.vocabulary, token.content, bytes);
    if (bytes == 0) return CPA_OK;
    if (known != CPA_NO_ID) id = known;
    if (token.is_normalized) {
        CPA_TRY(add_normalized(json, decoder, t, &token, (uint32_t)id, texts, err));
    } else if (!cpa_token_decoder_set(decoder, (uint32_t)id, token.content, bytes, texts) ||
               !cpa_added_tokens_add(&t->written, token.content, bytes, (uint32_t)id, token.flags)) {
        return no_memory(json, err);
    }
    texts->tokens[id].is_special = (uint8_t)token.is_special;
    return CPA_OK;
}

static cpa_status add_tokens(const cpa_json *file, const cpa_token_decoder *decoder, cpa_tokenizer_json *t,
                             cpa_token_texts *texts, cpa_error *err) {
    const json_t *list = NULL;
    CPA_TRY(cpa_json_list(file, "added_tokens", &list, err));
    for (size_t i = 0; i < json_array_size(list); i++) {
        cpa_json_part token;
        CPA_TRY(cpa_json_part_of(file, "added_tokens", (int64_t)i, &token, err));
        if (!token.json.object) return cpa_json_refuse(file, "added_tokens", "a list of objects", err);
        CPA_TRY(add_token(&token.json, decoder, t, texts, err));
    }
    return CPA_OK;
}

static cpa_status read_file(const cpa_json *file, cpa_tokenizer_json *t, cpa_token_texts *texts, cpa_error *err) {
    cpa_token_decoder decoder;
    CPA_TRY(cpa_bpe_read(file, &t->bpe, err));
    CPA_TRY(cpa_normalizer_read(file, &t->normalizer, err));
    CPA_TRY(cpa_pre_tokenizer_read(file, &t->pre_tokenizer, err));
    if (cpa_normalizer_shortens(&t->normalizer) && cpa_pre_tokenizer_knows_first(&t->pre_tokenizer))
        return cpa_json_unsupported(file, "pre_tokenizer",
                                    "no prepend_scheme first behind a normalizer that makes texts shorter", err);
    CPA_TRY(cpa_token_decoder_read(file, &decoder, err));
    CPA_TRY(cpa_token_frame_read(file, &t->frame, err));
    CPA_TRY(set_texts(file, &t->bpe, &decoder, texts, err));
    return add_tokens(file, &decoder, t, texts, err);
}

cpa_status cpa_tokenizer_json_open(const char *path, cpa_tokenizer_json **out, cpa_token_texts *texts, cpa_error *err) {
    cpa_json file = {.path = path, .prefix = ""};
    json_t *object;
    CPA_TRY(cpa_json_load(path, &object, err));
    file.object = object;
    cpa_tokenizer_json *tokenizer = calloc(1, sizeof *tokenizer);
    cpa_status status = tokenizer ? read_file(&file, tokenizer, texts, err) : no_memory(&file, err);
    json_decref(object);
    if (status != CPA_OK) {
        cpa_tokenizer_json_close(tokenizer);
        return status;
    }
    *out = tokenizer;
    return CPA_OK;
}

void cpa_tokenizer_json_close(cpa_tokenizer_json *t) {
    if (!t) return;
    cpa_added_tokens_release(&t->written);
    cpa_added_tokens_release(&t->normalized);
    cpa_normalizer_release(&t->normalizer);
    cpa_pre_tokenizer_release(&t->pre_tokenizer);
    cpa_bpe_release(&t->bpe);
    cpa_token_frame_release(&t->frame);
    free(t);
}

/* ---- Encoding ---- */

typedef struct encoding {
    const cpa_tokenizer_json *tokenizer;
    cpa_token_list *out;
    cpa_bpe_memory memory;
    cpa_bytes normal; /* the normal form of what is between tokens */
} encoding;

static cpa_status encode_word(void *ctx, const char *word, size_t bytes, cpa_error *err) {
    encoding *e = ctx;
    return cpa_bpe_encode(&e->tokenizer->bpe, word, bytes, &e->memory, e->out, err);
}

static cpa_status add_id(encoding *e, uint32_t id, cpa_error *err) {
    return cpa_token_list_add(e->out, id) ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for ids");
}

/* Text between tokens that are looked for as they are written. */
static cpa_status encode_piece(encoding *e, const char *text, size_t bytes, int is_first, cpa_error *err) {
    const cpa_tokenizer_json *t = e->tokenizer;
    size_t begin, end;
    uint32_t id;
    CPA_TRY(cpa_normalizer_apply(&t->normalizer, text, bytes, &e->normal, err));
    cpa_added_search search = cpa_added_tokens_begin(&t->normalized, e->normal.data, (size_t)e->normal.count);
    while (cpa_added_tokens_next(&search, &begin, &end, &id)) {
        CPA_TRY(id != CPA_NO_ID ? add_id(e, id, err)
                                : cpa_pre_tokenizer_cut(&t->pre_tokenizer, e->normal.data + begin, end - begin,
                                                        is_first && begin == 0, encode_word, e, err));
    }
    return CPA_OK;
}

static cpa_status encode_text(encoding *e, const char *text, size_t bytes, cpa_error *err) {
    cpa_added_search search = cpa_added_tokens_begin(&e->tokenizer->written, text, bytes);
    size_t begin, end;
    uint32_t id;
    while (cpa_added_tokens_next(&search, &begin, &end, &id))
        CPA_TRY(id != CPA_NO_ID ? add_id(e, id, err) : encode_piece(e, text + begin, end - begin, begin == 0, err));
    return CPA_OK;
}

static cpa_status add_frame(encoding *e, const cpa_token_list *ids, cpa_error *err) {
    for (int64_t i = 0; i < ids->count; i++) CPA_TRY(add_id(e, ids->ids[i], err));
    return CPA_OK;
}

cpa_status cpa_tokenizer_json_encode(const cpa_tokenizer_json *tokenizer, const char *text, size_t bytes,
                                     int add_special, cpa_token_list *out, cpa_error *err) {
    encoding e = {.tokenizer = tokenizer, .out = out};
    cpa_status status = add_special ? add_frame(&e, &tokenizer->frame.before, err) : CPA_OK;
    if (status == CPA_OK) status = encode_text(&e, text, bytes, err);
    if (status == CPA_OK && add_special) status = add_frame(&e, &tokenizer->frame.after, err);
    cpa_bpe_memory_release(&e.memory);
    cpa_bytes_release(&e.normal);
    return status;
}
