#include "src/text/token_frame.h"

#include <string.h>

#include "base/check.h"
#include "src/text/vocabulary.h"

/* The ids of a special token of the template, which "special_tokens" holds. */
static cpa_status add_ids(const cpa_json *template, const char *token, cpa_token_list *out, cpa_error *err) {
    cpa_json_part tokens, entry;
    const json_t *ids = NULL;
    CPA_TRY(cpa_json_part_of(template, "special_tokens", CPA_JSON_NO_INDEX, &tokens, err));
    if (!tokens.json.object) return cpa_json_refuse(template, "special_tokens", "an object", err);
    CPA_TRY(cpa_json_part_of(&tokens.json, token, CPA_JSON_NO_INDEX, &entry, err));
    if (!entry.json.object) return cpa_json_refuse(&tokens.json, token, "an object with ids", err);
    CPA_TRY(cpa_json_list(&entry.json, "ids", &ids, err));
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= CPA_MAX_IDS)
            return cpa_json_refuse(&entry.json, "ids", "a list of ids", err);
        if (!cpa_token_list_add(out, (uint32_t)json_integer_value(id)))
            return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", template->path);
    }
    return CPA_OK;
}

/* "single": special tokens, and the text, once. */
static cpa_status read_template(const cpa_json *template, cpa_token_frame *out, cpa_error *err) {
    const json_t *single = NULL;
    int texts = 0;
    if (out->before.count + out->after.count > 0)
        return cpa_json_unsupported(template, "type", "one TemplateProcessing", err);
    CPA_TRY(cpa_json_list(template, "single", &single, err));
    for (size_t i = 0; i < json_array_size(single); i++) {
        cpa_json_part piece, token;
        CPA_TRY(cpa_json_part_of(template, "single", (int64_t)i, &piece, err));
        CPA_TRY(cpa_json_part_of(&piece.json, "SpecialToken", CPA_JSON_NO_INDEX, &token, err));
        texts += cpa_json_get(&piece.json, "Sequence") != NULL;
        if (!token.json.object) continue;
        const char *name = NULL;
        CPA_TRY(cpa_json_text(&token.json, "id", CPA_JSON_REQUIRED, &name, err));
        CPA_TRY(add_ids(template, name, texts > 0 ? &out->after : &out->before, err));
    }
    return texts == 1 ? CPA_OK : cpa_json_unsupported(template, "single", "special tokens around one Sequence", err);
}

static const char EXPECTED[] = "TemplateProcessing, ByteLevel or Sequence";

static cpa_status read_part(const cpa_json_part *part, void *out, cpa_error *err) {
    if (strcmp(part->type, "ByteLevel") == 0) return CPA_OK; /* which only trims offsets */
    if (strcmp(part->type, "TemplateProcessing") == 0) return read_template(&part->json, out, err);
    return cpa_json_unsupported(&part->json, "type", EXPECTED, err);
}

cpa_status cpa_token_frame_read(const cpa_json *file, cpa_token_frame *out, cpa_error *err) {
    static const cpa_json_parts parts = {"post_processor", "processors", EXPECTED, read_part};
    return cpa_json_read_parts(file, &parts, out, err);
}

void cpa_token_frame_release(cpa_token_frame *frame) {
    cpa_token_list_release(&frame->before);
    cpa_token_list_release(&frame->after);
}
