/* The text of an answer as its tokens come: in whole characters, up to a text that stops it. */
#ifndef CPA_TEXT_ENDING_TEXT_H
#define CPA_TEXT_ENDING_TEXT_H

#include "src/text/bytes.h"
#include "src/text/stop_text.h"
#include "src/text/text_stream.h"

/* One of zeros has no stream, and gets no tokens. One thread at a time. */
typedef struct cpa_ending_text {
    cpa_text_stream *stream;
    /* The caller sets these before the first token. */
    const cpa_stop_text *stops; /* [n_stops] */
    int n_stops;
    int keeps_stop;     /* a text that stops it is part of it */
    int64_t min_tokens; /* no stop begins in the text of the first so many tokens */
    /* The caller reads these. */
    int64_t tokens;            /* tokens until the text stopped */
    cpa_bytes text;            /* text since cpa_ending_text_forget */
    int64_t ready;             /* bytes of it that can be said: the rest may be the beginning of a stop */
    const cpa_stop_text *stop; /* the one that has stopped it; NULL: none has */
} cpa_ending_text;

/* `keeps_special`: special tokens belong to the text. The tokenizer must outlive *out, which is to be closed on failure,
 * too. */
cpa_status cpa_ending_text_open(const cpa_tokenizer *tokenizer, int keeps_special, cpa_ending_text *out,
                                cpa_error *err);
void cpa_ending_text_close(cpa_ending_text *text);

/* Add a token: with its own text, or as what stands for it, which may be nothing. Behind a stop they do nothing.
 * CPA_NO_MEMORY. */
cpa_status cpa_ending_text_push(cpa_ending_text *text, uint32_t id, cpa_error *err);
cpa_status cpa_ending_text_push_as(cpa_ending_text *text, const char *stands_for, size_t bytes, cpa_error *err);

/* No more tokens come: all can be said. CPA_NO_MEMORY. */
cpa_status cpa_ending_text_finish(cpa_ending_text *text, cpa_error *err);

/* What could be said has been said. */
void cpa_ending_text_forget(cpa_ending_text *text);

#endif
