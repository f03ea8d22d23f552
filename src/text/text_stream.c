#include "src/text/text_stream.h"

#include <stdlib.h>

#include "base/check.h"
#include "src/text/detokenizer.h"

struct cpa_text_stream {
    cpa_detokenizer detokenizer;
    cpa_bytes text; /* text given by the last call */
};

cpa_status cpa_text_stream_open(const cpa_tokenizer *tokenizer, int flags, cpa_text_stream **out, cpa_error *err) {
    cpa_text_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a stream of text");
    stream->detokenizer = cpa_detokenizer_begin(cpa_tokenizer_texts(tokenizer), flags & CPA_TEXT_SKIP_SPECIAL, 0,
                                                !(flags & CPA_TEXT_CONTINUES));
    *out = stream;
    return CPA_OK;
}

void cpa_text_stream_close(cpa_text_stream *stream) {
    if (!stream) return;
    cpa_bytes_release(&stream->detokenizer.pending);
    cpa_bytes_release(&stream->text);
    free(stream);
}

static cpa_status give(cpa_text_stream *stream, int ok, const char **text, size_t *bytes, cpa_error *err) {
    if (!ok) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of tokens");
    *text = stream->text.data ? stream->text.data : "";
    *bytes = (size_t)stream->text.count;
    return CPA_OK;
}

cpa_status cpa_text_stream_push(cpa_text_stream *stream, uint32_t id, const char **text, size_t *bytes,
                                cpa_error *err) {
    stream->text.count = 0;
    return give(stream, cpa_detokenizer_push(&stream->detokenizer, id, &stream->text), text, bytes, err);
}

cpa_status cpa_text_stream_finish(cpa_text_stream *stream, const char **text, size_t *bytes, cpa_error *err) {
    stream->text.count = 0;
    return give(stream, cpa_detokenizer_finish(&stream->detokenizer, &stream->text), text, bytes, err);
}
