#include "plot/timeline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"
#include "base/json_file.h"

static const double second = 1e6; /* in microseconds, as times are written */

static int begins(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

static cpa_activity activity_of(const char *category, const char *name) {
    if (strcmp(category, "exchange") == 0) return CPA_ACTIVITY_EXCHANGE;
    return begins(name, "attend")     ? CPA_ACTIVITY_ATTEND
           : begins(name, "wait")     ? CPA_ACTIVITY_WAIT
           : begins(name, "replayed") ? CPA_ACTIVITY_GRAPH
                                      : CPA_ACTIVITY_OTHER;
}

static cpa_status add_span(cpa_timeline_file *file, const cpa_json *event, cpa_error *err) {
    const char *category = NULL, *name = NULL;
    int64_t rank = 0;
    double begin = 0, duration = 0;
    CPA_TRY(cpa_json_text(event, "cat", CPA_JSON_REQUIRED, &category, err));
    CPA_TRY(cpa_json_text(event, "name", CPA_JSON_REQUIRED, &name, err));
    CPA_TRY(cpa_json_number(event, "ts", CPA_JSON_REQUIRED, -1e15, 1e15, &begin, err));
    CPA_TRY(cpa_json_number(event, "dur", CPA_JSON_REQUIRED, 0, 1e15, &duration, err));
    if (strcmp(category, "compute") != 0 && strcmp(category, "exchange") != 0) return CPA_OK;
    CPA_TRY(cpa_json_int(event, "pid", CPA_JSON_REQUIRED, 0, CPA_CHART_MOST_RANKS - 1, &rank, err));
    cpa_rank_times_add(&file->times, (int32_t)rank, activity_of(category, name), begin / second, duration / second);
    return CPA_OK;
}

/* A counter: how many requests run and wait, or blocks are taken. */
static cpa_status add_counts(cpa_timeline_file *file, const cpa_json *event, cpa_error *err) {
    const char *name = NULL, *key;
    double at = 0;
    CPA_TRY(cpa_json_text(event, "name", CPA_JSON_REQUIRED, &name, err));
    CPA_TRY(cpa_json_number(event, "ts", CPA_JSON_REQUIRED, -1e15, 1e15, &at, err));
    cpa_series_set *set = strcmp(name, "requests") == 0 ? &file->requests
                          : strcmp(name, "cache") == 0  ? &file->cache
                                                        : NULL;
    json_t *args = json_object_get(event->object, "args"), *value;
    if (!json_is_object(args)) return cpa_json_refuse(event, "args", "an object", err);
    json_object_foreach(args, key, value) {
        if (!json_is_number(value)) return cpa_json_refuse(event, "args", "numbers", err);
        if (set) cpa_series_add(set, key, at / second, json_number_value(value));
    }
    return CPA_OK;
}

/* What a rank has sent each other: metadata of its process. */
static cpa_status add_bytes(cpa_timeline_file *file, const cpa_json *event, cpa_error *err) {
    const json_t *list = json_object_get(json_object_get(event->object, "args"), "bytes"), *value;
    int64_t rank = 0;
    size_t peer;
    const char *name = json_string_value(json_object_get(event->object, "name"));
    if (!name || strcmp(name, "bytes_to") != 0) return CPA_OK;
    CPA_TRY(cpa_json_int(event, "pid", CPA_JSON_REQUIRED, 0, CPA_CHART_MOST_RANKS - 1, &rank, err));
    if (!json_is_array(list) || json_array_size(list) > CPA_CHART_MOST_RANKS)
        return cpa_json_refuse(event, "args", "bytes to each rank", err);
    json_array_foreach(list, peer, value) {
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return cpa_json_refuse(event, "args", "bytes to each rank", err);
        file->bytes[rank][peer] = json_integer_value(value);
    }
    if ((int32_t)json_array_size(list) > file->times.ranks) file->times.ranks = (int32_t)json_array_size(list);
    file->has_bytes = 1;
    return CPA_OK;
}

/* A line: an event, and a comma before the next; or a bracket of the list. */
static cpa_status read_line(cpa_timeline_file *file, const char *where, char *line, cpa_error *err) {
    size_t length = strcspn(line, "\r\n");
    if (length > 0 && line[length - 1] == ',') length--;
    if (length == 0 || (length == 1 && strchr("[]", line[0])) || (length == 2 && begins(line, "[]"))) return CPA_OK;
    json_t *object = NULL;
    json_error_t why;
    cpa_status status = cpa_json_parse(line, length, 0, &object, &why);
    if (status == CPA_NO_MEMORY) return cpa_fail(err, status, "%s: no memory to read it", where);
    const char *phase = json_string_value(json_object_get(object, "ph"));
    const cpa_json event = {where, "", object};
    status = !phase ? cpa_fail(err, CPA_INVALID, "%s: found no event, expected one of --timeline", where)
             : strcmp(phase, "X") == 0 ? add_span(file, &event, err)
             : strcmp(phase, "C") == 0 ? add_counts(file, &event, err)
             : strcmp(phase, "M") == 0 ? add_bytes(file, &event, err)
                                       : CPA_OK;
    json_decref(object);
    return status;
}

cpa_status cpa_timeline_file_read(const char *path, cpa_timeline_file *out, cpa_error *err) {
    const char *why;
    char *line = NULL, where[4352];
    size_t capacity = 0;
    cpa_status status = CPA_OK;
    *out = (cpa_timeline_file){0};
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, cpa_file_failure(CPA_IO), "%s: %s", path, why);
    for (long long n = 1; status == CPA_OK && getline(&line, &capacity, file) >= 0; n++) {
        snprintf(where, sizeof where, "%.4096s:%lld", path, n);
        status = read_line(out, where, line, err);
    }
    if (status == CPA_OK && ferror(file)) status = cpa_fail(err, CPA_IO, "%s: could not be read", path);
    if (status == CPA_OK && (out->times.failed || out->requests.failed || out->cache.failed))
        status = cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for its spans and what it counts", path);
    free(line);
    fclose(file);
    return status;
}

void cpa_timeline_file_release(cpa_timeline_file *file) {
    cpa_rank_times_release(&file->times);
    cpa_series_release(&file->requests);
    cpa_series_release(&file->cache);
    *file = (cpa_timeline_file){0};
}
