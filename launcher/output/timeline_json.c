#include "launcher/output/timeline_json.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash_table.h"

/* Times are written in microseconds. */
#define MICRO 1e6

/* What follows so soon, as a request that goes on from prefill to decode, is one change. */
#define COUNTS_APART_S 1e-6

/* A request, and its row. */
typedef struct cpa_timeline_request {
    uint64_t id;
    int row;
    UT_hash_handle hh;
} cpa_timeline_request;

/* So many more run, and wait, from a moment on. */
typedef struct cpa_timeline_change {
    double at_s;
    int32_t running, waiting;
} cpa_timeline_change;

cpa_status cpa_timeline_json_open(cpa_timeline_json *json, const char *path, int32_t ranks, cpa_error *err) {
    *json = (cpa_timeline_json){.named = calloc((size_t)ranks, sizeof *json->named), .ranks = ranks};
    if (!json->named) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for %d ranks", path, ranks);
    cpa_status status = cpa_output_open(path, &json->output, err);
    if (status != CPA_OK) free(json->named);
    return status;
}

/* Writes an event, which it owns, behind those that are there. */
static void put_event(cpa_timeline_json *json, json_t *event) {
    int ok = event && fputs(json->events++ ? ",\n" : "[\n", json->output.file) != EOF &&
             json_dumpf(event, json->output.file, JSON_COMPACT | JSON_REAL_PRECISION(15)) == 0;
    if (!ok) json->failed = 1;
    json_decref(event);
}

/* The thread's number of a row, by its name. */
static int row_number(cpa_timeline_json *json, const char *row) {
    int number = 0;
    while (number < CPA_TIMELINE_ROWS - 1 && json->rows[number] && strcmp(json->rows[number], row) != 0) number++;
    json->rows[number] = row;
    return number;
}

static void name_process(cpa_timeline_json *json, int process, const char *name) {
    put_event(json, json_pack("{s:s, s:s, s:i, s:{s:s}}", "name", "process_name", "ph", "M", "pid", process, "args",
                              "name", name));
}

static void name_thread(cpa_timeline_json *json, int process, int row, const char *name) {
    put_event(json, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", "thread_name", "ph", "M", "pid", process, "tid",
                              row, "args", "name", name));
}

/* Before the first span of a row of a rank: what the two are called. */
static void name_row(cpa_timeline_json *json, int32_t rank, int row) {
    if (json->named[rank] >> row & 1) return;
    if (!json->named[rank]) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", rank);
        name_process(json, rank, name);
    }
    json->named[rank] |= (uint32_t)1 << row;
    name_thread(json, rank, row, json->rows[row]);
}

/* The row of a request, among those of the requests, which are a process behind the ranks. It is named when it is
 * new. */
static int row_of_request(cpa_timeline_json *json, uint64_t id) {
    cpa_timeline_request *request;
    HASH_FIND(hh, json->requests, &id, sizeof id, request);
    if (request) return request->row;
    if (json->n_requests == 0) name_process(json, json->ranks, "requests");
    char name[32];
    snprintf(name, sizeof name, "request %" PRIu64, id);
    name_thread(json, json->ranks, json->n_requests, name);
    request = calloc(1, sizeof *request);
    if (request) {
        request->id = id;
        request->row = json->n_requests;
        HASH_ADD(hh, json->requests, id, sizeof id, request);
    }
    if (!request || !request->hh.tbl) {
        free(request);
        json->failed = 1;
    }
    return json->n_requests++;
}

static void note_change(cpa_timeline_json *json, const cpa_span *span) {
    const int runs = strcmp(span->name, "prefill") == 0 || strcmp(span->name, "decode") == 0;
    if (!cpa_array_reserve(&json->changes, &json->cap_changes, json->n_changes + 2, sizeof *json->changes)) {
        json->failed = 1;
        return;
    }
    json->changes[json->n_changes++] = (cpa_timeline_change){span->begin_s, runs, !runs};
    json->changes[json->n_changes++] = (cpa_timeline_change){span->begin_s + span->seconds, -runs, -!runs};
}

static int by_time(const void *a, const void *b) {
    const cpa_timeline_change *x = a, *y = b;
    return x->at_s < y->at_s ? -1 : x->at_s > y->at_s;
}

/* How many requests run and wait, wherever that changes. */
static void put_counts(cpa_timeline_json *json) {
    int64_t running = 0, waiting = 0;
    if (json->n_changes > 0) qsort(json->changes, (size_t)json->n_changes, sizeof *json->changes, by_time);
    for (int64_t i = 0; i < json->n_changes; i++) {
        const cpa_timeline_change *change = &json->changes[i];
        running += change->running;
        waiting += change->waiting;
        if (i + 1 < json->n_changes && change[1].at_s - change->at_s < COUNTS_APART_S) continue;
        put_event(json, json_pack("{s:s, s:s, s:s, s:i, s:f, s:{s:I, s:I}}", "name", "requests", "cat", "requests",
                                  "ph", "C", "pid", json->ranks, "ts", change->at_s * MICRO, "args", "running",
                                  (json_int_t)running, "waiting", (json_int_t)waiting));
    }
}

void cpa_timeline_json_add_cache(cpa_timeline_json *json, double at_s, int64_t blocks) {
    put_event(json, json_pack("{s:s, s:s, s:s, s:i, s:f, s:{s:I}}", "name", "cache", "cat", "requests", "ph", "C",
                              "pid", json->ranks, "ts", at_s * MICRO, "args", "blocks", (json_int_t)blocks));
}

void cpa_timeline_json_add_bytes(cpa_timeline_json *json, int32_t rank, const int64_t *bytes) {
    json_t *list = json_array();
    for (int32_t peer = 0; peer < json->ranks; peer++)
        if (json_array_append_new(list, json_integer(bytes[peer])) != 0) json->failed = 1;
    put_event(json,
              json_pack("{s:s, s:s, s:i, s:{s:o}}", "name", "bytes_to", "ph", "M", "pid", rank, "args", "bytes", list));
}

void cpa_timeline_json_add(void *ctx, const cpa_span *span) {
    cpa_timeline_json *json = ctx;
    const int process = span->of_request ? json->ranks : span->rank;
    const int row = span->of_request ? row_of_request(json, span->request) : row_number(json, span->row);
    const int category = (int)strcspn(span->row, " ");
    if (span->of_request) {
        note_change(json, span);
    } else {
        name_row(json, span->rank, row);
    }
    json_t *args = json_pack("{s:I}", "step", (json_int_t)span->step);
    if (args && span->layer >= 0) json_object_set_new(args, "layer", json_integer(span->layer));
    if (args && span->round > 0) json_object_set_new(args, "round", json_integer(span->round));
    if (args && span->of_request) json_object_set_new(args, "request", json_integer((json_int_t)span->request));
    char name[64];
    if (span->round > 0) {
        snprintf(name, sizeof name, "%s %d", span->name, span->round);
    } else {
        snprintf(name, sizeof name, "%s", span->name);
    }
    put_event(json, json_pack("{s:s, s:s#, s:s, s:i, s:i, s:f, s:f, s:o}", "name", name, "cat", span->row, category,
                              "ph", "X", "pid", process, "tid", row, "ts", span->begin_s * MICRO, "dur",
                              span->seconds * MICRO, "args", args));
}

cpa_status cpa_timeline_json_close(cpa_timeline_json *json, cpa_error *err) {
    put_counts(json);
    if (fputs(json->events ? "\n]\n" : "[]\n", json->output.file) == EOF) json->failed = 1;
    cpa_timeline_request *request, *next;
    HASH_ITER(hh, json->requests, request, next) {
        HASH_DEL(json->requests, request);
        free(request);
    }
    free(json->changes);
    free(json->named);
    return cpa_output_close(&json->output, !json->failed, err);
}
