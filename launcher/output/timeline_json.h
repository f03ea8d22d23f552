/* The timeline of a run as a Chrome trace: a JSON array of events, which Perfetto and chrome://tracing show. A rank is
 * a process, each of its rows (compute stream, exchanges, host, ...) a thread; behind them the requests are a
 * process, each a thread, with counters of those that run and that wait and of the blocks that they have. Metadata of a
 * rank says what it has sent each other. Written on rank 0. */
#ifndef CPA_LAUNCHER_TIMELINE_JSON_H
#define CPA_LAUNCHER_TIMELINE_JSON_H

#include <cpattn/engine.h>

#include "program/output_file.h"

/* Spans that a rank keeps; the file has some 150 bytes for each. */
enum { CPA_TIMELINE_SPANS = 1 << 20 };

enum { CPA_TIMELINE_ROWS = 16 };

typedef struct cpa_timeline_json {
    cpa_output_file output;
    int64_t events;
    int failed;
    const char *rows[CPA_TIMELINE_ROWS]; /* rows of any rank seen so far; the index is a thread's number */
    uint32_t *named;                     /* [ranks]: a bit for each row that has been given its name */
    int32_t ranks;
    struct cpa_timeline_request *requests; /* requests seen so far, by id */
    int n_requests;
    struct cpa_timeline_change *changes; /* changes in how many requests run and wait, in no order */
    int64_t n_changes, cap_changes;
} cpa_timeline_json;

/* Opens the file (program/output_file.h). CPA_IO, naming it, if that fails. */
cpa_status cpa_timeline_json_open(cpa_timeline_json *json, const char *path, int32_t ranks, cpa_error *err);
/* A cpa_span_fn; ctx is the cpa_timeline_json. */
void cpa_timeline_json_add(void *ctx, const cpa_span *span);
/* How many blocks of the cache requests have from `at_s` on, most on any rank. */
void cpa_timeline_json_add_cache(cpa_timeline_json *json, double at_s, int64_t blocks);
/* What a rank has sent each rank: bytes [ranks]. */
void cpa_timeline_json_add_bytes(cpa_timeline_json *json, int32_t rank, const int64_t *bytes);
/* Ends and closes the file, which is there only if all of it was written. */
cpa_status cpa_timeline_json_close(cpa_timeline_json *json, cpa_error *err);

#endif
