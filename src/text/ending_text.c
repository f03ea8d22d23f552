#include "src/text/ending_text.h"

#include <string.h>

#include "base/check.h"

cpa_status cpa_ending_text_open(const cpa_tokenizer *tokenizer, int keeps_special, cpa_ending_text *out,
                                cpa_error *err) {
    *out = (cpa_ending_text){.stream = NULL};
    const int flags = CPA_TEXT_CONTINUES | (keeps_special ? 0 : CPA_TEXT_SKIP_SPECIAL);
    return cpa_text_stream_open(tokenizer, flags, &out->stream, err);
}

void cpa_ending_text_close(cpa_ending_text *text) {
    cpa_text_stream_close(text->stream);
    cpa_bytes_release(&text->text);
    *text = (cpa_ending_text){.stream = NULL};
}

static cpa_status add(cpa_ending_text *t, const char *text, size_t bytes, cpa_error *err) {
    if (bytes == 0) return CPA_OK;
    if (!cpa_bytes_add(&t->text, text, bytes))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of an answer");
    if (t->tokens <= t->min_tokens) { /* no stop begins here */
        t->ready = t->text.count;
        return CPA_OK;
    }
    int which = 0;
    const int64_t at = cpa_stop_text_find(t->stops, t->n_stops, t->text.data, t->text.count, t->ready, &which);
    if (at >= 0) {
        t->stop = &t->stops[which];
        t->text.count = at + (t->keeps_stop ? (int64_t)t->stop->bytes : 0);
        t->ready = t->text.count;
    } else {
        t->ready = t->text.count -
                   cpa_stop_text_begun(t->stops, t->n_stops, t->text.data + t->ready, t->text.count - t->ready);
    }
    return CPA_OK;
}

cpa_status cpa_ending_text_push(cpa_ending_text *text, uint32_t id, cpa_error *err) {
    const char *said;
    size_t bytes;
    if (text->stop) return CPA_OK;
    text->tokens++;
    CPA_TRY(cpa_text_stream_push(text->stream, id, &said, &bytes, err));
    return add(text, said, bytes, err);
}

cpa_status cpa_ending_text_push_as(cpa_ending_text *text, const char *stands_for, size_t bytes, cpa_error *err) {
    if (text->stop) return CPA_OK;
    text->tokens++;
    return add(text, stands_for, bytes, err);
}

cpa_status cpa_ending_text_finish(cpa_ending_text *text, cpa_error *err) {
    const char *said;
    size_t bytes;
    if (text->stop) return CPA_OK;
    CPA_TRY(cpa_text_stream_finish(text->stream, &said, &bytes, err));
    CPA_TRY(add(text, said, bytes, err));
    text->ready = text->text.count; /* what began like a stop is text */
    return CPA_OK;
}

void cpa_ending_text_forget(cpa_ending_text *text) {
    if (text->ready > 0)
        memmove(text->text.data, text->text.data + text->ready, (size_t)(text->text.count - text->ready));
    text->text.count -= text->ready;
    text->ready = 0;
}
