/* The text of tokens as they come, one by one, in whole characters: what a token leaves unfinished waits for the
 * next. */
#ifndef CPA_TEXT_STREAM_H
#define CPA_TEXT_STREAM_H

#include "src/text/tokenizer.h"

/* One thread at a time. */
typedef struct cpa_text_stream cpa_text_stream;

enum {
    CPA_TEXT_SKIP_SPECIAL = 1, /* special tokens stand for nothing */
    CPA_TEXT_CONTINUES = 2 /* the tokens follow others, as an answer follows its prompt: a space that they begin with
                                * stays, where a tokenizer takes it from the beginning of a text */
};

/* `flags`: of the above. The tokenizer must outlive the stream; the caller closes *out. */
cpa_status cpa_text_stream_open(const cpa_tokenizer *tokenizer, int flags, cpa_text_stream **out, cpa_error *err);
void cpa_text_stream_close(cpa_text_stream *stream); /* which may be NULL */

/* Adds a token. *text is what can be said now, *bytes of it, perhaps none: whole characters in UTF-8, which live until
 * the next call. All that a stream gives makes the text of its tokens, with U+FFFD in place of what is broken. */
cpa_status cpa_text_stream_push(cpa_text_stream *stream, uint32_t id, const char **text, size_t *bytes, cpa_error *err);

/* No more tokens come: gives what still waited. */
cpa_status cpa_text_stream_finish(cpa_text_stream *stream, const char **text, size_t *bytes, cpa_error *err);

#endif
