#include "server/prompt_text.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "server/token_name.h"

/* That begin there: a token may end within one. */
static int64_t count_characters(const char *text, size_t bytes) {
    int64_t n = 0;
    for (size_t i = 0; i < bytes; i++) n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

cpa_status cpa_prompt_text_open(const cpa_server *server, const json_t *given, const cpa_token_list *ids,
                                cpa_prompt_text *out, cpa_error *err) {
    const cpa_tokenizer *tokenizer = server->options.tokenizer;
    *out = (cpa_prompt_text){.text = NULL};
    if (!tokenizer) {
        for (int64_t i = 0; i < ids->count; i++) out->characters += cpa_token_name_characters(server, ids->ids[i]);
        return CPA_OK;
    }
    if (json_is_string(given)) {
        out->bytes = json_string_length(given);
        out->text = malloc(out->bytes + 1);
        if (!out->text) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of a prompt");
        memcpy(out->text, json_string_value(given), out->bytes);
    } else {
        CPA_TRY(cpa_tokenizer_decode(tokenizer, ids->ids, ids->count, 0, &out->text, &out->bytes, err));
    }
    out->characters = count_characters(out->text, out->bytes);
    return CPA_OK;
}

void cpa_prompt_text_close(cpa_prompt_text *text) {
    free(text->text);
}

static int is_at(const cpa_prompt_text *text, size_t at, const char *token_text, size_t bytes) {
    return bytes <= text->bytes - at && memcmp(text->text + at, token_text, bytes) == 0;
}

int64_t cpa_prompt_text_pass(const cpa_server *server, const cpa_prompt_text *text, uint32_t id, size_t *at) {
    const cpa_tokenizer *tokenizer = server->options.tokenizer;
    size_t bytes = 0;
    const char *token_text = tokenizer ? cpa_tokenizer_token(tokenizer, id, &bytes) : NULL;
    if (!token_text) return cpa_token_name_characters(server, id);
    if (!is_at(text, *at, token_text, bytes)) {
        if (cpa_tokenizer_is_special(tokenizer, id)) return 0;
        if (bytes > 0 && *token_text == ' ' && is_at(text, *at, token_text + 1, bytes - 1)) bytes--;
    }
    const size_t end = bytes < text->bytes - *at ? *at + bytes : text->bytes, begin = *at;
    *at = end;
    return count_characters(text->text + begin, end - begin);
}
