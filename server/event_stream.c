#include "server/event_stream.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "server/answer_json.h"

static int append(cpa_answer *answer, const char *text, size_t bytes) {
    if (!cpa_array_reserve(&answer->out, &answer->out_capacity, answer->out_bytes + (int64_t)bytes, 1)) return 0;
    memcpy(answer->out + answer->out_bytes, text, bytes);
    answer->out_bytes += (int64_t)bytes;
    return 1;
}

/* Writes an event with a JSON value, which it takes; 0 without memory, also for the value. */
static int write_event(cpa_answer *answer, json_t *value) {
    char *text = value ? json_dumps(value, JSON_COMPACT) : NULL;
    json_decref(value);
    const int is_written =
        text && append(answer, "data: ", 6) && append(answer, text, strlen(text)) && append(answer, "\n\n", 2);
    free(text);
    return is_written;
}

/* Whether a chunk of this choice would say anything. */
static int has_news(const cpa_choice *choice) {
    if (choice->is_closed) return 0;
    const int shows_tokens =
        choice->generation->returns_ids || choice->generation->sampling.logprobs || !choice->text.stream;
    return choice->end != CPA_CHOICE_GOES_ON || cpa_choice_has_text(choice) || (choice->n_tokens > 0 && shows_tokens);
}

static int write_chunks(cpa_answer *answer) {
    for (int64_t i = 0; i < answer->n; i++) {
        cpa_choice *choice = &answer->choices[i];
        if (!has_news(choice) || !cpa_answer_knows_prompt(answer, i)) continue;
        if (!write_event(answer, cpa_chunk_json(answer, i))) return 0;
        choice->is_begun = 1;
        choice->is_closed = choice->end != CPA_CHOICE_GOES_ON;
        cpa_choice_forget(choice);
    }
    if (!cpa_answer_is_whole(answer)) return 1;
    answer->is_over = 1;
    if (answer->generation.include_usage && !write_event(answer, cpa_usage_chunk_json(answer))) return 0;
    return append(answer, "data: [DONE]\n\n", 14);
}

/* Fills what is to be written with what has come; 0 without memory. */
static int advance(cpa_answer *answer) {
    cpa_refusal refusal;
    answer->out_bytes = answer->out_sent = 0;
    /* A comment, which a client that has left answers with a reset, and one that waits passes over. */
    if (cpa_in_flight_take_silence(answer->group) && !append(answer, ": \n\n", 4)) return 0;
    if (cpa_answer_collect(answer, &refusal)) return write_chunks(answer);
    cpa_log(CPA_LOG_WARN, "server: %s: the stream ends with an error: %s", answer->id, refusal.message);
    answer->is_over = 1;
    return write_event(answer, cpa_refusal_json(&refusal)) && append(answer, "data: [DONE]\n\n", 14);
}

/* A MHD_ContentReaderCallback. */
static ssize_t read_stream(void *ctx, uint64_t position, char *out, size_t most) {
    (void)position;
    cpa_answer *answer = ctx;
    while (answer->out_sent == answer->out_bytes) {
        if (answer->is_over) return MHD_CONTENT_READER_END_OF_STREAM;
        if (!advance(answer)) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (answer->out_bytes > 0) break;
        switch (cpa_in_flight_suspend(answer->group)) {
            case CPA_SUSPENDED: return 0;
            case CPA_SUSPEND_NEWS: break;
            case CPA_SUSPEND_GONE: return MHD_CONTENT_READER_END_WITH_ERROR;
        }
    }
    const int64_t bytes = cpa_min64(answer->out_bytes - answer->out_sent, (int64_t)most);
    memcpy(out, answer->out + answer->out_sent, (size_t)bytes);
    answer->out_sent += bytes;
    return bytes;
}

enum MHD_Result cpa_event_stream_reply(cpa_http_exchange *x) {
    enum { BLOCK_BYTES = 16 << 10 };
    struct MHD_Response *response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, x->answer, NULL);
    if (!response) return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream; charset=utf-8");
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no"); /* proxies: pass each event on */
    cpa_reply_headers(x, response);
    const enum MHD_Result queued = MHD_queue_response(x->connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return queued;
}
