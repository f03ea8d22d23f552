#include "src/text/token_decoder.h"

#include <string.h>

#include "base/check.h"
#include "src/text/byte_level.h"
#include "src/text/utf8.h"

enum { MAX_DEPTH = 8 };

/* ---- Reading ---- */

static cpa_status add_replacement(const cpa_json *json, const char *key, const char *from, const char *to,
                                  cpa_token_decoder *out, cpa_error *err) {
    if (out->has_fused || out->replacements == CPA_DECODER_REPLACEMENTS || !*from)
        return cpa_json_unsupported(json, key, "a string, at most four of them, before Fuse", err);
    out->replacement[out->replacements++] = (struct cpa_replacement){from, to};
    return CPA_OK;
}

static cpa_status read_replace(const cpa_json *json, cpa_token_decoder *out, cpa_error *err) {
    cpa_json_part pattern;
    const char *from = "", *to = "";
    CPA_TRY(cpa_json_part_of(json, "pattern", CPA_JSON_NO_INDEX, &pattern, err));
    if (!pattern.json.object || !cpa_json_get(&pattern.json, "String"))
        return cpa_json_unsupported(json, "pattern", "String", err);
    CPA_TRY(cpa_json_text(&pattern.json, "String", CPA_JSON_REQUIRED, &from, err));
    CPA_TRY(cpa_json_text(json, "content", CPA_JSON_REQUIRED, &to, err));
    return add_replacement(json, "pattern", from, to, out, err);
}

static cpa_status read_strip(const cpa_json *json, cpa_token_decoder *out, cpa_error *err) {
    const char *content = "";
    int64_t start = 0, stop = 0;
    CPA_TRY(cpa_json_text(json, "content", CPA_JSON_REQUIRED, &content, err));
    CPA_TRY(cpa_json_int(json, "start", CPA_JSON_REQUIRED, 0, INT32_MAX, &start, err));
    CPA_TRY(cpa_json_int(json, "stop", CPA_JSON_REQUIRED, 0, INT32_MAX, &stop, err));
    if (strcmp(content, " ") != 0) return cpa_json_unsupported(json, "content", "a space", err);
    if (stop > 0) return cpa_json_unsupported(json, "stop", "0", err);
    if (!out->has_fused || out->strips > 0) return cpa_json_unsupported(json, "type", "one Strip, after Fuse", err);
    out->strips = (int)start;
    return CPA_OK;
}

static cpa_status read_metaspace(const cpa_json *json, cpa_token_decoder *out, cpa_error *err) {
    const char *replacement = "", *scheme = "always";
    int add_prefix_space = 1;
    CPA_TRY(cpa_json_text(json, "replacement", CPA_JSON_REQUIRED, &replacement, err));
    CPA_TRY(cpa_json_flag(json, "add_prefix_space", &add_prefix_space, err));
    if (!add_prefix_space) scheme = "never";
    CPA_TRY(cpa_json_text(json, "prepend_scheme", CPA_JSON_OPTIONAL, &scheme, err));
    out->first_has_no_space |= strcmp(scheme, "never") != 0;
    return add_replacement(json, "replacement", replacement, " ", out, err);
}

static cpa_status read_part(const cpa_json *parent, const char *key, int64_t index, int depth, cpa_token_decoder *out,
                            cpa_error *err) {
    cpa_json_part part;
    const json_t *list = NULL;
    CPA_TRY(cpa_json_part_of(parent, key, index, &part, err));
    if (!part.json.object) return cpa_json_unsupported(parent, key, "an object", err);
    const char *type = part.type;
    if (out->has_fused && (strcmp(type, "ByteLevel") == 0 || strcmp(type, "ByteFallback") == 0))
        return cpa_json_unsupported(&part.json, "type", "no step of single tokens behind Fuse", err);
    if (strcmp(type, "ByteLevel") == 0) {
        out->is_byte_level = 1;
    } else if (strcmp(type, "ByteFallback") == 0) {
        out->has_byte_fallback = 1;
    } else if (strcmp(type, "Fuse") == 0) {
        out->has_fused = 1;
    } else if (strcmp(type, "Replace") == 0) {
        return read_replace(&part.json, out, err);
    } else if (strcmp(type, "Strip") == 0) {
        return read_strip(&part.json, out, err);
    } else if (strcmp(type, "Metaspace") == 0) {
        return read_metaspace(&part.json, out, err);
    } else if (strcmp(type, "Sequence") == 0 && depth < MAX_DEPTH) {
        CPA_TRY(cpa_json_list(&part.json, "decoders", &list, err));
        for (size_t i = 0; i < json_array_size(list); i++)
            CPA_TRY(read_part(&part.json, "decoders", (int64_t)i, depth + 1, out, err));
    } else {
        return cpa_json_unsupported(&part.json, "type",
                                    "ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace or Sequence", err);
    }
    return CPA_OK;
}

cpa_status cpa_token_decoder_read(const cpa_json *file, cpa_token_decoder *out, cpa_error *err) {
    cpa_token_decoder decoder = {.strips = 0};
    CPA_TRY(read_part(file, "decoder", CPA_JSON_NO_INDEX, 0, &decoder, err));
    if (decoder.is_byte_level && (decoder.has_byte_fallback || decoder.replacements > 0))
        return cpa_json_unsupported(file, "decoder", "ByteLevel without ByteFallback, Replace or Metaspace", err);
    if (decoder.first_has_no_space && decoder.replacements > 1)
        return cpa_json_unsupported(file, "decoder", "Metaspace without another, and without Replace", err);
    *out = decoder;
    return CPA_OK;
}

/* ---- Decoding ---- */

void cpa_token_decoder_begin(const cpa_token_decoder *decoder, cpa_token_texts *texts) {
    texts->broken = decoder->is_byte_level ? CPA_BROKEN_PARTS : CPA_BROKEN_RUNS;
    texts->strips = decoder->strips;
    texts->first_has_no_space = decoder->first_has_no_space;
}

static int hex(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* The byte of "<0x00>" and so on; -1 for other tokens. */
static int fallback_byte(const char *token, size_t bytes) {
    if (bytes != 6 || memcmp(token, "<0x", 3) != 0 || token[5] != '>' || hex(token[3]) < 0 || hex(token[4]) < 0)
        return -1;
    return 16 * hex(token[3]) + hex(token[4]);
}

static int replace(const struct cpa_replacement *replacement, const char *token, size_t bytes, cpa_bytes *out) {
    const size_t from = strlen(replacement->from), to = strlen(replacement->to);
    int ok = 1;
    for (size_t at = 0; ok && at < bytes;) {
        const int matches = bytes - at >= from && memcmp(token + at, replacement->from, from) == 0;
        ok = matches ? cpa_bytes_add(out, replacement->to, to) : cpa_bytes_add(out, token + at, 1);
        at += matches ? from : 1;
    }
    return ok;
}

int cpa_token_decoder_set(const cpa_token_decoder *decoder, uint32_t id, const char *token, size_t bytes,
                          cpa_token_texts *texts) {
    cpa_bytes text = {.count = 0}, before = {.count = 0};
    int ok = decoder->is_byte_level ? cpa_byte_level_read(token, bytes, &text) : cpa_bytes_add(&text, token, bytes);
    for (int i = 0; ok && i < decoder->replacements; i++) {
        const cpa_bytes done = text;
        text = before;
        before = done;
        text.count = 0;
        ok = replace(&decoder->replacement[i], before.data, (size_t)before.count, &text);
    }
    const cpa_token_kind kind =
        decoder->first_has_no_space && memchr(token, ' ', bytes) ? CPA_TOKEN_SPACED : CPA_TOKEN_TEXT;
    const int byte = decoder->has_byte_fallback && ok ? fallback_byte(text.data, (size_t)text.count) : -1;
    const char one = (char)byte;
    ok = ok && (byte >= 0 ? cpa_token_texts_set(texts, id, CPA_TOKEN_BYTE, &one, 1)
                          : cpa_token_texts_set(texts, id, kind, text.data, (size_t)text.count));
    cpa_bytes_release(&text);
    cpa_bytes_release(&before);
    return ok;
}
