/* Server-sent events, read from pieces of any size (WHATWG HTML, "Server-sent events", 9.2.5 and 9.2.6): of each event
 * its data; names, ids, retry times and comments are passed over. */
#ifndef CPA_BENCH_SERVE_EVENTS_H
#define CPA_BENCH_SERVE_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An event, and a line of it, may be so long. */
#define CPA_EVENT_MAX_BYTES ((int64_t)1 << 24)

/* Bytes that end in no zero. */
typedef struct cpa_event_text {
    char *bytes;
    int64_t count, capacity;
} cpa_event_text;

/* Zeros to begin with. */
typedef struct cpa_event_reader {
    cpa_event_text line; /* as far as it has come */
    cpa_event_text data; /* data of the event, as far as it has come */
    bool has_data;
    bool after_cr;  /* a line feed belongs to the end of the line before */
    bool has_begun; /* the first line is over: no byte order mark is looked for */
} cpa_event_reader;

/* Takes the data of an event, `bytes` of it and a zero, valid during the call; false ends the reading. */
typedef bool (*cpa_event_fn)(void *ctx, const char *data, size_t bytes);

/* Reads on, and calls `on_event` for each event that is whole. NULL, or why it cannot go on: a line or an event is too
 * long, or there is no memory. What comes after `on_event` has returned false is not read. */
const char *cpa_event_reader_feed(cpa_event_reader *reader, const char *bytes, size_t count, cpa_event_fn on_event,
                                  void *ctx);

void cpa_event_reader_release(cpa_event_reader *reader);

#endif
