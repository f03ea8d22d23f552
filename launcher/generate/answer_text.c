#include "launcher/generate/answer_text.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"

cpa_status cpa_answer_text_open(const cpa_tokenizer *tokenizer, const char *stop, cpa_answer_text *out,
                                cpa_error *err) {
    *out = (cpa_answer_text){.stop = {strdup(stop), strlen(stop)}};
    if (!out->stop.text) return cpa_fail(err, CPA_NO_MEMORY, "--stop: no memory for it");
    return cpa_text_stream_open(tokenizer, CPA_TEXT_SKIP_SPECIAL | CPA_TEXT_CONTINUES, &out->stream, err);
}

void cpa_answer_text_close(cpa_answer_text *answer) {
    cpa_text_stream_close(answer->stream);
    cpa_bytes_release(&answer->text);
    free(answer->stop.text);
    *answer = (cpa_answer_text){.stream = NULL};
}

static int n_stops(const cpa_answer_text *answer) {
    return answer->stop.bytes > 0;
}

static void add(cpa_answer_text *answer, const char *text, size_t bytes) {
    int which;
    if (!cpa_bytes_add(&answer->text, text, bytes)) return;
    if (answer->tokens <= answer->min_tokens) {
        answer->passed = answer->text.count;
        return;
    }
    const int64_t at = cpa_stop_text_find(&answer->stop, n_stops(answer), answer->text.data, answer->text.count,
                                          cpa_max64(answer->printed, answer->passed), &which);
    if (at < 0) return;
    answer->text.count = at;
    answer->has_stopped = 1;
}

void cpa_answer_text_push(cpa_answer_text *answer, uint32_t id) {
    const char *text;
    size_t bytes;
    if (!answer->stream || answer->has_stopped) return;
    answer->tokens++;
    if (cpa_text_stream_push(answer->stream, id, &text, &bytes, NULL) == CPA_OK && bytes > 0) add(answer, text, bytes);
}

void cpa_answer_text_finish(cpa_answer_text *answer) {
    const char *text;
    size_t bytes;
    if (!answer->stream || answer->has_stopped) return;
    if (cpa_text_stream_finish(answer->stream, &text, &bytes, NULL) == CPA_OK && bytes > 0) add(answer, text, bytes);
    answer->stop.bytes = 0; /* what began like it is text */
}

void cpa_answer_text_print(cpa_answer_text *answer, FILE *out) {
    int64_t ready = answer->text.count;
    const int64_t from = cpa_max64(answer->printed, answer->passed);
    if (!answer->has_stopped && ready > from)
        ready -= cpa_stop_text_begun(&answer->stop, n_stops(answer), answer->text.data + from, ready - from);
    if (ready <= answer->printed) return;
    fwrite(answer->text.data + answer->printed, 1, (size_t)(ready - answer->printed), out);
    answer->printed = ready;
}
