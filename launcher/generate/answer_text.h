/* The text of an answer as its tokens come, up to a text that stops it. */
#ifndef CPA_LAUNCHER_ANSWER_TEXT_H
#define CPA_LAUNCHER_ANSWER_TEXT_H

#include <stdio.h>

#include "src/text/bytes.h"
#include "src/text/stop_text.h"
#include "src/text/text_stream.h"

/* One of zeros stands for an answer of ids, without text. */
typedef struct cpa_answer_text {
    cpa_text_stream *stream;
    cpa_stop_text stop; /* the stop; of 0 bytes: none */
    cpa_bytes text;     /* what is in front of the stop */
    int64_t printed;    /* bytes of it */
    int64_t tokens;     /* tokens that came until the text stopped */
    int64_t min_tokens; /* set by the caller: no stop begins within the first so many tokens */
    int64_t passed;     /* bytes of the text of the first min_tokens tokens */
    int has_stopped;
} cpa_answer_text;

/* `stop` is copied; "" stops nothing. The tokenizer must outlive *out, which is to be closed on failure, too. */
cpa_status cpa_answer_text_open(const cpa_tokenizer *tokenizer, const char *stop, cpa_answer_text *out, cpa_error *err);
void cpa_answer_text_close(cpa_answer_text *answer);

/* Adds a token. Behind the stop, and without memory, it adds nothing. */
void cpa_answer_text_push(cpa_answer_text *answer, uint32_t id);
/* No more tokens come. */
void cpa_answer_text_finish(cpa_answer_text *answer);
/* Prints what is there and cannot be the beginning of the stop. */
void cpa_answer_text_print(cpa_answer_text *answer, FILE *out);

#endif
