#include "program/chart/rank_times.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "program/chart/frame.h"

enum { COLUMNS = 620, LANE = 12, GAP = 8 };

static const struct {
    const char *name;
    int ink, lane;
} activities[CPA_ACTIVITIES] = {
    [CPA_ACTIVITY_ATTEND] = {"attention", CPA_INK_SERIES, 0},
    [CPA_ACTIVITY_WAIT] = {"waiting for messages", CPA_INK_SERIES + 1, 0},
    [CPA_ACTIVITY_GRAPH] = {"a step as a graph", CPA_INK_SERIES + 2, 0},
    [CPA_ACTIVITY_OTHER] = {"other computation", CPA_INK_SERIES + 5, 0},
    [CPA_ACTIVITY_EXCHANGE] = {"exchange", CPA_INK_SERIES + 4, 1},
};

void cpa_rank_times_add(cpa_rank_times *times, int32_t rank, cpa_activity activity, double begin_s, double seconds) {
    if (!cpa_array_reserve(&times->spans, &times->capacity, times->n_spans + 1, sizeof *times->spans)) {
        times->failed = 1;
        return;
    }
    times->spans[times->n_spans++] = (cpa_activity_span){
        .begin_s = (float)begin_s, .seconds = (float)seconds, .rank = (int16_t)rank, .activity = (int16_t)activity};
    if (rank >= times->ranks) times->ranks = rank + 1;
    times->end_s = fmax(times->end_s, begin_s + seconds);
}

void cpa_rank_times_release(cpa_rank_times *times) {
    free(times->spans);
    *times = (cpa_rank_times){0};
}

/* Seconds of each activity in each column of a rank. */
typedef double column_times[COLUMNS][CPA_ACTIVITIES];

/* What is drawn of all ranks alike. */
typedef struct rows {
    cpa_frame frame;
    double end_s, column_s;
    int occurs[CPA_ACTIVITIES];
    int lanes;
} rows;

static void add_to_columns(column_times *columns, const cpa_activity_span *span, double column_s) {
    const double begin = fmax(span->begin_s, 0), end = (double)span->begin_s + span->seconds;
    for (int column = (int)fmin(begin / column_s, COLUMNS); column < COLUMNS && column * column_s < end; column++) {
        const double within = fmin((column + 1) * column_s, end) - fmax(column * column_s, begin);
        (*columns)[column][span->activity] += fmax(within, 0);
    }
}

/* What most of a column's time went to, of the activities of a lane; -1: nothing. */
static int most_of(const double *seconds, int lane, double column_s) {
    int most = -1;
    double idle = column_s;
    for (int a = 0; a < CPA_ACTIVITIES; a++) idle -= activities[a].lane == lane ? seconds[a] : 0;
    for (int a = 0; a < CPA_ACTIVITIES; a++)
        if (activities[a].lane == lane && seconds[a] > fmax(idle, most < 0 ? 0 : seconds[most])) most = a;
    return most;
}

static void put_lane(rows *r, const column_times *columns, int lane, double top) {
    const double width = r->frame.width / COLUMNS;
    for (int column = 0, end; column < COLUMNS; column = end) {
        const int most = most_of((*columns)[column], lane, r->column_s);
        for (end = column + 1; end < COLUMNS && most_of((*columns)[end], lane, r->column_s) == most;) end++;
        if (most < 0) continue;
        cpa_picture_box(r->frame.picture, (cpa_ink)activities[most].ink,
                        (cpa_point){r->frame.corner.x + column * width, top}, (end - column) * width, LANE, 1, NULL);
    }
}

static void put_rank(rows *r, const cpa_rank_times *times, int32_t rank, column_times *columns) {
    char text[64];
    double sums[CPA_ACTIVITIES] = {0};
    const cpa_frame *frame = &r->frame;
    const double height = r->lanes * LANE, top = frame->corner.y + rank * (height + GAP), base = top + height / 2 + 4;
    memset(columns, 0, sizeof *columns);
    for (int64_t i = 0; i < times->n_spans; i++) {
        if (times->spans[i].rank != rank) continue;
        add_to_columns(columns, &times->spans[i], r->column_s);
        sums[times->spans[i].activity] += times->spans[i].seconds;
    }
    for (int lane = 0; lane < r->lanes; lane++) put_lane(r, columns, lane, top + lane * LANE);
    snprintf(text, sizeof text, "rank %d", rank);
    cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){frame->corner.x - 8, base}, CPA_ANCHOR_END, text);
    snprintf(text, sizeof text, "%.0f%% attention, %.0f%% waiting", 100 * sums[CPA_ACTIVITY_ATTEND] / r->end_s,
             100 * sums[CPA_ACTIVITY_WAIT] / r->end_s);
    cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){frame->corner.x + frame->width + 8, base},
                     CPA_ANCHOR_START, text);
}

/* Below the ranks, side by side: what occurs. */
static void put_legend(const rows *r) {
    enum { WIDTH = 162 };
    cpa_picture *picture = r->frame.picture;
    double x = r->frame.corner.x;
    for (int a = 0; a < CPA_ACTIVITIES; a++) {
        if (!r->occurs[a]) continue;
        cpa_picture_box(picture, (cpa_ink)activities[a].ink, (cpa_point){x, picture->height}, 11, 11, 1, NULL);
        cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){x + 16, picture->height + 10}, CPA_ANCHOR_START,
                         activities[a].name);
        x += WIDTH;
    }
    picture->height += 20;
}

void cpa_rank_times_draw(cpa_picture *picture, const cpa_rank_times *times) {
    rows r = {.end_s = times->end_s > 0 ? times->end_s : 1, .lanes = 1}; /* 0: no span takes any time */
    r.column_s = r.end_s / COLUMNS;
    for (int64_t i = 0; i < times->n_spans; i++) r.occurs[times->spans[i].activity] = 1;
    if (r.occurs[CPA_ACTIVITY_EXCHANGE]) r.lanes = 2;
    const cpa_axis x = {.high = r.end_s, .label = "seconds"}, y = {.high = 1};
    r.frame = cpa_frame_begin(picture, x, y, times->ranks * (r.lanes * LANE + GAP));
    column_times *columns = malloc(sizeof *columns);
    if (!columns) picture->failed = 1;
    for (int32_t rank = 0; columns && rank < times->ranks; rank++) put_rank(&r, times, rank, columns);
    free(columns);
    put_legend(&r);
    if (times->failed) picture->failed = 1;
}
