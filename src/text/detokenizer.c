#include "src/text/detokenizer.h"

#include <string.h>

#include "src/text/utf8.h"

cpa_detokenizer cpa_detokenizer_begin(const cpa_token_texts *texts, int skip_special, int waits, int is_begin) {
    return (cpa_detokenizer){.texts = texts,
                             .skip_special = skip_special,
                             .waits = waits,
                             .has_begun = !is_begin,
                             .strips_left = is_begin ? texts->strips : 0};
}

/* Adds text of whole characters, without the spaces that its beginning loses. */
static int say(cpa_detokenizer *d, const char *text, size_t bytes, cpa_bytes *out) {
    while (d->strips_left > 0 && bytes > 0 && text[0] == ' ') {
        text++, bytes--;
        d->strips_left--;
    }
    if (bytes > 0) d->strips_left = 0;
    return cpa_bytes_add(out, text, bytes);
}

static int say_broken(cpa_detokenizer *d, size_t n, cpa_bytes *out) {
    int ok = 1;
    for (size_t i = 0; ok && i < n; i++) ok = say(d, CPA_UTF8_REPLACEMENT, strlen(CPA_UTF8_REPLACEMENT), out);
    return ok;
}

/* Says what of the pending bytes is decided: at the end all of them. */
static int say_pending(cpa_detokenizer *d, int is_end, cpa_bytes *out) {
    const char *pending = d->pending.data;
    const size_t bytes = (size_t)d->pending.count;
    size_t at = 0;
    int ok = 1;
    if (bytes > 0 && d->texts->broken == CPA_BROKEN_BYTES) d->strips_left = 0; /* which are pieces' spaces alone */
    while (ok && at < bytes) {
        const size_t valid = cpa_utf8_valid(pending + at, bytes - at);
        ok = say(d, pending + at, valid, out);
        at += valid;
        if (!ok || at == bytes) break;
        const int next = cpa_utf8_next(pending + at, bytes - at);
        if (next == 0 && !is_end) break;
        const size_t broken = next == 0 ? bytes - at : (size_t)-next; /* a beginning of a character, all of it */
        ok = say_broken(d, d->texts->broken == CPA_BROKEN_BYTES ? broken : 1, out);
        at += broken;
    }
    if (at > 0) memmove(d->pending.data, pending + at, bytes - at);
    d->pending.count = (int64_t)(bytes - at);
    return ok;
}

/* The same where one broken byte makes a run of them broken. */
static int say_run(cpa_detokenizer *d, int is_end, cpa_bytes *out) {
    const size_t bytes = (size_t)d->pending.count;
    const int is_valid = bytes > 0 && cpa_utf8_valid(d->pending.data, bytes) == bytes;
    if (bytes == 0 || (!is_valid && !is_end) || (d->waits && !is_end)) return 1;
    d->pending.count = 0;
    return is_valid ? say(d, d->pending.data, bytes, out) : say_broken(d, bytes, out);
}

static int say_waiting(cpa_detokenizer *d, int is_end, cpa_bytes *out) {
    return d->texts->broken == CPA_BROKEN_RUNS ? say_run(d, is_end, out) : say_pending(d, is_end, out);
}

/* The first token, without its spaces. */
static int say_without_spaces(cpa_detokenizer *d, const char *text, size_t bytes, cpa_bytes *out) {
    int ok = 1;
    for (size_t i = 0; ok && i < bytes; i++) ok = text[i] == ' ' || say(d, text + i, 1, out);
    return ok;
}

int cpa_detokenizer_push(cpa_detokenizer *d, uint32_t id, cpa_bytes *out) {
    const cpa_token_text *token = cpa_token_texts_find(d->texts, id);
    if (!token || (token->is_special && d->skip_special)) return 1;
    const char *text = d->texts->texts.data + token->at;
    const int is_first = !d->has_begun;
    d->has_begun = 1;
    if (token->kind == CPA_TOKEN_BYTE || d->texts->broken == CPA_BROKEN_PARTS)
        return cpa_bytes_add(&d->pending, text, token->bytes) && say_waiting(d, 0, out);
    if (!say_waiting(d, 1, out)) return 0;
    const int has_no_space = is_first && d->texts->first_has_no_space && token->kind != CPA_TOKEN_SPACED;
    return has_no_space ? say_without_spaces(d, text, token->bytes, out) : say(d, text, token->bytes, out);
}

int cpa_detokenizer_finish(cpa_detokenizer *d, cpa_bytes *out) {
    return say_waiting(d, 1, out);
}
