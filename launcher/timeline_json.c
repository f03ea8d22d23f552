#include "launcher/timeline_json.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

cpa_status cpa_timeline_json_open(cpa_timeline_json *json, const char *path, int32_t ranks, cpa_error *err) {
    *json = (cpa_timeline_json){.named = calloc((size_t)ranks, sizeof *json->named)};
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

/* Before the first span of a row of a rank: what the two are called. */
static void name_row(cpa_timeline_json *json, int32_t rank, int row) {
    if (json->named[rank] >> row & 1) return;
    if (!json->named[rank]) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", rank);
        put_event(json, json_pack("{s:s, s:s, s:i, s:{s:s}}", "name", "process_name", "ph", "M", "pid", rank, "args",
                                  "name", name));
    }
    json->named[rank] |= (uint32_t)1 << row;
    put_event(json, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", "thread_name", "ph", "M", "pid", rank, "tid",
                              row, "args", "name", json->rows[row]));
}

void cpa_timeline_json_add(void *ctx, const cpa_span *span) {
    cpa_timeline_json *json = ctx;
    const double micro = 1e6;
    const int row = row_number(json, span->row);
    name_row(json, span->rank, row);
    json_t *args = json_pack("{s:I}", "step", (json_int_t)span->step);
    if (args && span->layer >= 0) json_object_set_new(args, "layer", json_integer(span->layer));
    if (args && span->round > 0) json_object_set_new(args, "round", json_integer(span->round));
    char name[64];
    if (span->round > 0) {
        snprintf(name, sizeof name, "%s %d", span->name, span->round);
    } else {
        snprintf(name, sizeof name, "%s", span->name);
    }
    put_event(json, json_pack("{s:s, s:s, s:i, s:i, s:f, s:f, s:o}", "name", name, "ph", "X", "pid", span->rank, "tid",
                              row, "ts", span->begin_s * micro, "dur", span->seconds * micro, "args", args));
}

cpa_status cpa_timeline_json_close(cpa_timeline_json *json, cpa_error *err) {
    if (fputs(json->events ? "\n]\n" : "[]\n", json->output.file) == EOF) json->failed = 1;
    free(json->named);
    return cpa_output_close(&json->output, !json->failed, err);
}
