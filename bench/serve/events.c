#include "bench/serve/events.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

static const char TOO_LONG[] = "an event of more than 16 MiB";
static const char NO_MEMORY[] = "no memory for an event";
static const char STOPPED[] = ""; /* the caller's wish; never returned */

static const char *append(cpa_event_text *text, const char *bytes, int64_t count) {
    if (text->count + count > CPA_EVENT_MAX_BYTES) return TOO_LONG;
    if (!cpa_array_reserve(&text->bytes, &text->capacity, text->count + count + 1, 1)) return NO_MEMORY;
    memcpy(text->bytes + text->count, bytes, (size_t)count);
    text->count += count;
    text->bytes[text->count] = 0;
    return NULL;
}

/* An empty line: the event is whole. One without data is none. */
static const char *dispatch(cpa_event_reader *reader, cpa_event_fn on_event, void *ctx) {
    if (!reader->has_data) return NULL;
    reader->has_data = false;
    const int64_t count = reader->data.count;
    reader->data.count = 0;
    return on_event(ctx, reader->data.bytes, (size_t)count) ? NULL : STOPPED;
}

/* Whether the line is the field of that name; *value is then what it holds, without a first space. */
static bool is_field(const cpa_event_text *line, const char *name, const char **value) {
    const int64_t length = (int64_t)strlen(name);
    if (line->count < length || memcmp(line->bytes, name, (size_t)length) != 0) return false;
    if (line->count > length && line->bytes[length] != ':') return false;
    *value = line->bytes + length + (line->count > length);
    *value += line->count > length + 1 && **value == ' ';
    return true;
}

static const char *take_line(cpa_event_reader *reader, cpa_event_fn on_event, void *ctx) {
    static const char mark[] = "\xef\xbb\xbf";
    cpa_event_text *line = &reader->line;
    const char *value, *wrong = NULL;
    if (!reader->has_begun && line->count >= 3 && memcmp(line->bytes, mark, 3) == 0) {
        memmove(line->bytes, line->bytes + 3, (size_t)line->count - 3);
        line->count -= 3;
    }
    reader->has_begun = true;
    if (line->count == 0) return dispatch(reader, on_event, ctx);
    if (is_field(line, "data", &value)) {
        if (reader->has_data) wrong = append(&reader->data, "\n", 1);
        if (!wrong) wrong = append(&reader->data, value, line->bytes + line->count - value);
        reader->has_data = true;
    }
    line->count = 0;
    return wrong;
}

const char *cpa_event_reader_feed(cpa_event_reader *reader, const char *bytes, size_t count, cpa_event_fn on_event,
                                  void *ctx) {
    const char *at = bytes, *end = bytes + count, *wrong = NULL;
    while (at < end && !wrong) {
        if (reader->after_cr && *at == '\n') at++;
        reader->after_cr = false;
        const char *stop = at;
        while (stop < end && *stop != '\n' && *stop != '\r') stop++;
        wrong = append(&reader->line, at, stop - at);
        if (stop == end || wrong) break;
        reader->after_cr = *stop == '\r';
        wrong = take_line(reader, on_event, ctx);
        at = stop + 1;
    }
    return wrong == STOPPED ? NULL : wrong;
}

void cpa_event_reader_release(cpa_event_reader *reader) {
    free(reader->line.bytes);
    free(reader->data.bytes);
    *reader = (cpa_event_reader){.has_data = false};
}
