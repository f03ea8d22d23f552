#include "program/chart/pairs.h"

#include <stdio.h>

enum { LEFT = 70, TOP = 40, SIDE = 320, LEAST_CELL_WITH_TEXT = 40 };

static int64_t most_of(const int64_t (*bytes)[CPA_CHART_MOST_RANKS], int32_t ranks) {
    int64_t most = 0;
    for (int32_t from = 0; from < ranks; from++)
        for (int32_t to = 0; to < ranks; to++)
            if (bytes[from][to] > most) most = bytes[from][to];
    return most;
}

static void put_cell(cpa_picture *picture, int32_t from, int32_t to, int64_t bytes, int64_t most, double cell) {
    char says[96], short_text[32];
    const cpa_point at = {LEFT + to * cell, TOP + from * cell};
    const double mib = (double)bytes / (1 << 20);
    snprintf(says, sizeof says, "rank %d to rank %d: %lld bytes", from, to, (long long)bytes);
    snprintf(short_text, sizeof short_text, "%.3g", mib);
    cpa_picture_box(picture, CPA_INK_FAINT, at, cell - 1, cell - 1, 0.35, NULL);
    cpa_picture_box(picture, CPA_INK_SERIES, at, cell - 1, cell - 1, most > 0 ? 0.75 * (double)bytes / (double)most : 0,
                    says);
    if (cell >= LEAST_CELL_WITH_TEXT && from != to)
        cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){at.x + cell / 2, at.y + cell / 2 + 4}, CPA_ANCHOR_MIDDLE,
                         short_text);
}

void cpa_pairs_draw(cpa_picture *picture, const int64_t (*bytes)[CPA_CHART_MOST_RANKS], int32_t ranks) {
    const double cell = (double)SIDE / ranks;
    const int32_t every = ranks > 16 ? 8 : 1; /* ranks are named so far apart */
    const int64_t most = most_of(bytes, ranks);
    char text[64];
    picture->width = LEFT + SIDE + 260;
    picture->height = TOP + SIDE + 16;
    for (int32_t from = 0; from < ranks; from++) {
        for (int32_t to = 0; to < ranks; to++) put_cell(picture, from, to, bytes[from][to], most, cell);
        if (from % every) continue;
        snprintf(text, sizeof text, "%d", from);
        cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){LEFT - 8, TOP + (from + 0.5) * cell + 4}, CPA_ANCHOR_END,
                         text);
        cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){LEFT + (from + 0.5) * cell, TOP - 8}, CPA_ANCHOR_MIDDLE,
                         text);
    }
    cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){8, TOP + 12}, CPA_ANCHOR_START, "from");
    cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){LEFT, 14}, CPA_ANCHOR_START, "to");
    snprintf(text, sizeof text, "MiB; most: %.3g", (double)most / (1 << 20));
    cpa_picture_text(picture, CPA_INK_TEXT, (cpa_point){LEFT + SIDE + 16, TOP + 12}, CPA_ANCHOR_START, text);
}
