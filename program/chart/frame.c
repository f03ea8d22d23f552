#include "program/chart/frame.h"

#include <math.h>
#include <stdio.h>

enum { WIDTH = 900, LEFT = 70, RIGHT = 210, TOP = 14, BOTTOM = 44, LEGEND_LINE = 18 };

/* The share of the axis that lies below a value, from 0 to 1. */
static double share_of(const cpa_axis *axis, double value) {
    const double share = axis->is_log ? log(value / axis->low) / log(axis->high / axis->low)
                                      : (value - axis->low) / (axis->high - axis->low);
    return !(share > 0) ? 0 : share < 1 ? share : 1; /* the logarithm of 0 is below all */
}

cpa_point cpa_frame_at(const cpa_frame *frame, double x, double y) {
    return (cpa_point){frame->corner.x + frame->width * share_of(&frame->x, x),
                       frame->corner.y + frame->height * (1 - share_of(&frame->y, y))};
}

/* The number behind `value` that an axis shows, of multiples of 1, 2 or 5 times a power of ten; of a logarithmic axis
 * these numbers themselves, or over more than two decades the powers alone. */
static double next_tick(const cpa_axis *axis, double value, double step) {
    static const double factors[] = {2, 5, 10};
    if (!axis->is_log) return (floor(value / step + 0.5) + 1) * step;
    const double decade = pow(10, floor(log10(value) + 1e-9));
    if (axis->high / axis->low > 100) return 10 * decade;
    for (int i = 0; i < 2; i++)
        if (value < factors[i] * decade * 0.999) return factors[i] * decade;
    return 10 * decade;
}

static double step_of(const cpa_axis *axis) {
    enum { MOST_STEPS = 6 };
    const double least = (axis->high - axis->low) / MOST_STEPS, decade = pow(10, floor(log10(least)));
    if (axis->is_whole && least < 1) return 1;
    return least <= decade ? decade : least <= 2 * decade ? 2 * decade : least <= 5 * decade ? 5 * decade : 10 * decade;
}

static double first_tick(const cpa_axis *axis, double step) {
    if (!axis->is_log) return ceil(axis->low / step - 1e-9) * step + 0.0; /* no -0 */
    const double decade = pow(10, floor(log10(axis->low) + 1e-9));
    double tick = decade;
    while (tick < axis->low * 0.999) tick = next_tick(axis, tick, step);
    return tick;
}

static void put_tick(cpa_frame *frame, const cpa_axis *axis, double value) {
    char text[32];
    const int is_x = axis == &frame->x;
    const cpa_point from = cpa_frame_at(frame, is_x ? value : frame->x.low, is_x ? frame->y.low : value);
    const cpa_point line[] = {from, {is_x ? from.x : frame->corner.x + frame->width, is_x ? frame->corner.y : from.y}};
    cpa_picture_line(frame->picture, CPA_INK_FAINT, line, 2, 0);
    snprintf(text, sizeof text, "%.6g", value);
    cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){from.x - (is_x ? 0 : 6), from.y + (is_x ? 16 : 4)},
                     is_x ? CPA_ANCHOR_MIDDLE : CPA_ANCHOR_END, text);
}

static void put_axis(cpa_frame *frame, const cpa_axis *axis) {
    if (!axis->label) return;
    enum { MOST_TICKS = 64 }; /* numbers so large that they do not tell apart would have no end */
    const double step = step_of(axis), end = axis->high * (1 + 1e-9);
    int n = 0;
    for (double value = first_tick(axis, step); value <= end && n < MOST_TICKS;
         n++, value = next_tick(axis, value, step))
        put_tick(frame, axis, value);
    if (axis == &frame->x)
        cpa_picture_text(frame->picture, CPA_INK_TEXT,
                         (cpa_point){frame->corner.x + frame->width / 2, frame->corner.y + frame->height + 36},
                         CPA_ANCHOR_MIDDLE, axis->label);
    else
        cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){frame->corner.x, frame->corner.y - 10},
                         CPA_ANCHOR_START, axis->label);
}

cpa_frame cpa_frame_begin(cpa_picture *picture, cpa_axis x, cpa_axis y, double height) {
    const double top = TOP + (y.label ? LEGEND_LINE : 0);
    cpa_frame frame = {
        .picture = picture, .x = x, .y = y, .corner = {LEFT, top}, .width = WIDTH - LEFT - RIGHT, .height = height};
    picture->width = WIDTH;
    picture->height = top + height + BOTTOM;
    put_axis(&frame, &frame.x);
    put_axis(&frame, &frame.y);
    return frame;
}

void cpa_frame_explain(cpa_frame *frame, cpa_ink ink, const char *label) {
    const double x = frame->corner.x + frame->width + 16, y = frame->corner.y + LEGEND_LINE * frame->n_legend++;
    cpa_picture_box(frame->picture, ink, (cpa_point){x, y}, 11, 11, 1, NULL);
    cpa_picture_text(frame->picture, CPA_INK_TEXT, (cpa_point){x + 17, y + 10}, CPA_ANCHOR_START, label);
    if (y + LEGEND_LINE > frame->picture->height) frame->picture->height = y + LEGEND_LINE;
}
