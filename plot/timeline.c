#include "plot/timeline.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/file.h"
#include "base/json_file.h"
#include "plot/frame.h"

static const double second = 1e6; /* in microseconds, as times are written */

/* ---- reading ---- */

static int begins(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

static cpa_activity activity_of(const char *category, const char *name) {
    if (strcmp(category, "exchange") == 0) return CPA_ACTIVITY_EXCHANGE;
    return begins(name, "attend")  ? CPA_ACTIVITY_ATTEND
           : begins(name, "wait")  ? CPA_ACTIVITY_WAIT
           : begins(name, "graph") ? CPA_ACTIVITY_GRAPH
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
    CPA_TRY(cpa_json_int(event, "pid", CPA_JSON_REQUIRED, 0, CPA_PLOT_MOST_RANKS - 1, &rank, err));
    if (!cpa_array_reserve(&file->spans, &file->capacity, file->n_spans + 1, sizeof *file->spans))
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for its spans", event->path);
    file->spans[file->n_spans++] = (cpa_activity_span){.begin_s = (float)(begin / second),
                                                       .seconds = (float)(duration / second),
                                                       .rank = (int16_t)rank,
                                                       .activity = (int16_t)activity_of(category, name)};
    if (rank >= file->ranks) file->ranks = (int32_t)rank + 1;
    file->end_s = fmax(file->end_s, (begin + duration) / second);
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
    CPA_TRY(cpa_json_int(event, "pid", CPA_JSON_REQUIRED, 0, CPA_PLOT_MOST_RANKS - 1, &rank, err));
    if (!json_is_array(list) || json_array_size(list) > CPA_PLOT_MOST_RANKS)
        return cpa_json_refuse(event, "args", "bytes to each rank", err);
    json_array_foreach(list, peer, value) {
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return cpa_json_refuse(event, "args", "bytes to each rank", err);
        file->bytes[rank][peer] = json_integer_value(value);
    }
    if ((int32_t)json_array_size(list) > file->ranks) file->ranks = (int32_t)json_array_size(list);
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
    if (!(out->end_s > 0)) out->end_s = 1; /* no span takes any time */
    if (status == CPA_OK && (out->requests.failed || out->cache.failed))
        status = cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for what it counts", path);
    free(line);
    fclose(file);
    return status;
}

void cpa_timeline_file_release(cpa_timeline_file *file) {
    free(file->spans);
    cpa_series_release(&file->requests);
    cpa_series_release(&file->cache);
    *file = (cpa_timeline_file){0};
}

/* ---- drawing ---- */

enum { COLUMNS = 620, LANES = 2, LANE = 12, RANK = 2 * LANE + 8 };

static const struct {
    const char *name;
    int ink;
} activities[CPA_ACTIVITIES] = {
    [CPA_ACTIVITY_ATTEND] = {"attention", CPA_INK_SERIES},
    [CPA_ACTIVITY_WAIT] = {"waiting for messages", CPA_INK_SERIES + 1},
    [CPA_ACTIVITY_GRAPH] = {"a step as a graph", CPA_INK_SERIES + 2},
    [CPA_ACTIVITY_OTHER] = {"other computation", CPA_INK_SERIES + 5},
    [CPA_ACTIVITY_EXCHANGE] = {"exchange", CPA_INK_SERIES + 4},
};

/* Seconds of each activity in each column of a rank. */
typedef double column_times[COLUMNS][CPA_ACTIVITIES];

static void add_to_columns(column_times *times, const cpa_activity_span *span, double column_s) {
    const double begin = fmax(span->begin_s, 0), end = (double)span->begin_s + span->seconds;
    for (int column = (int)fmin(begin / column_s, COLUMNS); column < COLUMNS && column * column_s < end; column++) {
        const double within = fmin((column + 1) * column_s, end) - fmax(column * column_s, begin);
        (*times)[column][span->activity] += fmax(within, 0);
    }
}

/* What most of a column's time went to, of the activities of a lane; -1: nothing. */
static int most_of(const double *seconds, int lane, double column_s) {
    const int first = lane == 0 ? 0 : CPA_ACTIVITY_EXCHANGE, last = lane == 0 ? CPA_ACTIVITY_EXCHANGE : CPA_ACTIVITIES;
    int most = -1;
    double idle = column_s;
    for (int a = first; a < last; a++) idle -= seconds[a];
    for (int a = first; a < last; a++)
        if (seconds[a] > fmax(idle, most < 0 ? 0 : seconds[most])) most = a;
    return most;
}

static void put_lane(cpa_frame *frame, const column_times *times, int lane, double top, double column_s) {
    const double width = frame->width / COLUMNS;
    for (int column = 0, end; column < COLUMNS; column = end) {
        const int most = most_of((*times)[column], lane, column_s);
        for (end = column + 1; end < COLUMNS && most_of((*times)[end], lane, column_s) == most;) end++;
        if (most < 0) continue;
        cpa_picture_box(frame->picture, (cpa_ink)activities[most].ink,
                        (cpa_point){frame->corner.x + column * width, top}, (end - column) * width, LANE, 1, NULL);
    }
}

static void put_rank(cpa_frame *frame, const cpa_timeline_file *file, int32_t rank, column_times *times) {
    char text[64];
    double sums[CPA_ACTIVITIES] = {0};
    const double top = frame->corner.y + rank * RANK, column_s = file->end_s / COLUMNS;
    memset(times, 0, sizeof *times);
    for (int64_t i = 0; i < file->n_spans; i++) {
        if (file->spans[i].rank != rank) continue;
        add_to_columns(times, &file->spans[i], column_s);
        sums[file->spans[i].activity] += file->spans[i].seconds;
    }
    for (int lane = 0; lane < LANES; lane++) put_lane(frame, times, lane, top + lane * LANE, column_s);
    snprintf(text, sizeof text, "rank %d", rank);
    cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){frame->corner.x - 8, top + LANE + 4}, CPA_ANCHOR_END,
                     text);
    snprintf(text, sizeof text, "%.0f%% attention, %.0f%% waiting", 100 * sums[CPA_ACTIVITY_ATTEND] / file->end_s,
             100 * sums[CPA_ACTIVITY_WAIT] / file->end_s);
    cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){frame->corner.x + frame->width + 8, top + LANE + 4},
                     CPA_ANCHOR_START, text);
}

/* Below the ranks, side by side. */
static void put_legend(cpa_picture *picture, double x, double y) {
    enum { WIDTH = 162 };
    for (int a = 0; a < CPA_ACTIVITIES; a++, x += WIDTH) {
        cpa_picture_box(picture, (cpa_ink)activities[a].ink, (cpa_point){x, y}, 11, 11, 1, NULL);
        cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){x + 16, y + 10}, CPA_ANCHOR_START, activities[a].name);
    }
}

void cpa_timeline_file_draw(cpa_picture *picture, const cpa_timeline_file *file) {
    const cpa_axis x = {.high = file->end_s, .label = "seconds"}, y = {.high = 1};
    cpa_frame frame = cpa_frame_begin(picture, x, y, file->ranks * RANK);
    column_times *times = malloc(sizeof *times);
    if (!times) picture->failed = 1;
    for (int32_t rank = 0; times && rank < file->ranks; rank++) put_rank(&frame, file, rank, times);
    free(times);
    put_legend(picture, frame.corner.x, picture->height);
    picture->height += 20;
}
