#include "program/chart/lines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "program/chart/frame.h"

/* Takes a last letter away of which bytes are missing: one of UTF-8 begins with as many bits of 1 as it has bytes. */
static void drop_half_letter(char *text) {
    const size_t length = strlen(text);
    for (size_t back = 1; back <= 3 && back <= length; back++) {
        const unsigned char byte = (unsigned char)text[length - back];
        if ((byte & 0xC0) == 0x80) continue;
        const size_t bytes = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
        if (bytes > back) text[length - back] = '\0';
        return;
    }
}

cpa_series *cpa_series_of(cpa_series_set *set, const char *label) {
    char cut[sizeof set->series->label];
    snprintf(cut, sizeof cut, "%s", label);
    drop_half_letter(cut);
    for (int64_t i = 0; i < set->n; i++)
        if (strcmp(set->series[i].label, cut) == 0) return &set->series[i];
    if (!cpa_array_reserve(&set->series, &set->capacity, set->n + 1, sizeof *set->series)) {
        set->failed = 1;
        return NULL;
    }
    cpa_series *series = &set->series[set->n++];
    *series = (cpa_series){.n_points = 0};
    memcpy(series->label, cut, sizeof cut);
    return series;
}

void cpa_series_add(cpa_series_set *set, const char *label, double x, double y) {
    cpa_series *series = cpa_series_of(set, label);
    if (!series) return;
    if (!cpa_array_reserve(&series->points, &series->capacity, series->n_points + 1, sizeof *series->points)) {
        set->failed = 1;
        return;
    }
    series->points[series->n_points++] = (cpa_point){x, y};
}

void cpa_series_release(cpa_series_set *set) {
    for (int64_t i = 0; i < set->n; i++) free(set->series[i].points);
    free(set->series);
    *set = (cpa_series_set){0};
}

/* What the points span; x of a logarithmic axis above 0 alone, of values that hold until the next from 0 on. */
static void span_of(const cpa_series_set *set, const cpa_lines_style *style, cpa_point *low, cpa_point *high) {
    *low = (cpa_point){style->is_step ? 0 : INFINITY, 0};
    *high = (cpa_point){-INFINITY, 0};
    for (int64_t s = 0; s < set->n; s++) {
        for (int64_t i = 0; i < set->series[s].n_points; i++) {
            const cpa_point *point = &set->series[s].points[i];
            if (!style->x_is_log || point->x > 0) low->x = fmin(low->x, point->x);
            high->x = fmax(high->x, point->x);
            high->y = fmax(high->y, point->y);
        }
    }
    if (style->x_low < style->x_high) {
        low->x = style->x_low;
        high->x = style->x_high;
    }
    high->y = fmax(high->y, style->y_high);
    if (!isfinite(low->x)) low->x = 1; /* all are 0 on a logarithmic axis */
    if (!(high->x > low->x)) high->x = style->x_is_log ? 10 * low->x : low->x + 1;
    if (!(high->y > 0)) high->y = 1;
}

/* A line whose value holds until the next has a corner more before each point but the first. */
static void put_line(cpa_frame *frame, const cpa_series *series, cpa_ink ink, const cpa_lines_style *style) {
    cpa_point *points = malloc((size_t)(2 * series->n_points) * sizeof *points);
    int64_t n = 0;
    if (!points) {
        frame->picture->failed = 1;
        return;
    }
    for (int64_t i = 0; i < series->n_points; i++) {
        const cpa_point at = cpa_frame_at(frame, series->points[i].x, series->points[i].y);
        if (style->is_step && i > 0) {
            points[n] = (cpa_point){at.x, points[n - 1].y};
            n++;
        }
        points[n++] = at;
        if (style->has_marks && !series->is_guide)
            cpa_picture_box(frame->picture, ink, (cpa_point){at.x - 3, at.y - 3}, 6, 6, 1, NULL);
    }
    cpa_picture_line(frame->picture, ink, points, n, series->is_guide);
    free(points);
}

void cpa_lines_draw(cpa_picture *picture, const cpa_series_set *set, const cpa_lines_style *style) {
    static const double usual_height = 280;
    cpa_point low, high;
    span_of(set, style, &low, &high);
    const cpa_axis x = {low.x, high.x, style->x_is_log, style->x_is_whole, style->x_label};
    const cpa_axis y = {low.y, high.y, 0, style->y_is_whole, style->y_label};
    cpa_frame frame = cpa_frame_begin(picture, x, y, style->height > 0 ? style->height : usual_height);
    int64_t coloured = 0;
    for (int64_t s = 0; s < set->n; s++) {
        const cpa_series *series = &set->series[s];
        const cpa_ink ink = series->is_guide ? CPA_INK_TEXT : cpa_ink_of_series(coloured++);
        if (series->n_points == 0) continue;
        put_line(&frame, series, ink, style);
        cpa_frame_explain(&frame, ink, series->label);
    }
    if (set->failed) picture->failed = 1;
}
