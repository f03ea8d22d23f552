#include "server/token_name.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/text/utf8.h"

static const char *bytes_of(const cpa_server *server, uint32_t id, size_t *bytes, char number[24]) {
    *bytes = 0;
    const cpa_tokenizer *tokenizer = server->options.tokenizer;
    if (tokenizer) return cpa_tokenizer_token(tokenizer, id, bytes);
    *bytes = (size_t)snprintf(number, 24, "token_id:%" PRIu32, id);
    return number;
}

/* Copies the text to `out`, which may be NULL, with U+FFFD for what is broken; returns its bytes, and its
 * characters. */
static size_t mend(const char *text, size_t bytes, char *out, int64_t *characters) {
    size_t written = 0;
    *characters = 0;
    for (size_t at = 0; at < bytes; ++*characters) {
        const int next = cpa_utf8_next(text + at, bytes - at);
        const size_t taken = next > 0 ? (size_t)next : next < 0 ? (size_t)-next : bytes - at;
        const char *character = next > 0 ? text + at : CPA_UTF8_REPLACEMENT;
        const size_t n = next > 0 ? taken : sizeof CPA_UTF8_REPLACEMENT - 1;
        if (out) memcpy(out + written, character, n);
        written += n;
        at += taken;
    }
    return written;
}

json_t *cpa_token_name(const cpa_server *server, uint32_t id) {
    char number[24];
    size_t bytes;
    int64_t characters;
    const char *text = bytes_of(server, id, &bytes, number);
    if (!text) return json_string("");
    char *mended = malloc(mend(text, bytes, NULL, &characters) + 1);
    if (!mended) return NULL;
    json_t *value = json_stringn(mended, mend(text, bytes, mended, &characters));
    free(mended);
    return value;
}

json_t *cpa_token_bytes(const cpa_server *server, uint32_t id) {
    char number[24];
    size_t bytes;
    if (!server->options.tokenizer) return json_null();
    const char *text = bytes_of(server, id, &bytes, number);
    json_t *array = json_array();
    for (size_t i = 0; array && text && i < bytes; i++) {
        if (json_array_append_new(array, json_integer((unsigned char)text[i]))) {
            json_decref(array);
            return NULL;
        }
    }
    return array;
}

int64_t cpa_token_name_characters(const cpa_server *server, uint32_t id) {
    char number[24];
    size_t bytes;
    int64_t characters = 0;
    const char *text = bytes_of(server, id, &bytes, number);
    if (text) mend(text, bytes, NULL, &characters);
    return characters;
}
