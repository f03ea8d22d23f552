#include "program/chart/picture.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

/* The series are the colours that Okabe and Ito chose to be told apart by the colour-blind, lighter where the ground is
 * dark (Color Universal Design, 2008). */
const uint32_t cpa_theme_light[CPA_INKS + 1] = {0x1b1f24, 0xc9ced6, 0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7,
                                                0xe69f00, 0x56b4e9, 0x6b4fa0, 0x7a7a7a, 0xffffff};
const uint32_t cpa_theme_dark[CPA_INKS + 1] = {0xe6e9ee, 0x3d444d, 0x4da3e0, 0xff8c42, 0x3cc9a0, 0xe59ac4,
                                               0xf0b840, 0x8ccdf5, 0xa78be0, 0xa8a8a8, 0x14171b};

cpa_ink cpa_ink_of_series(int64_t i) {
    return (cpa_ink)(CPA_INK_SERIES + i % CPA_INK_MOST_SERIES);
}

static void add(cpa_picture *picture, const cpa_shape *shape, const char *text) {
    cpa_shape own = *shape;
    if (text) own.text = strdup(text);
    if ((text && !own.text) || !cpa_array_reserve(&picture->shapes, &picture->shapes_capacity, picture->n_shapes + 1,
                                                  sizeof *picture->shapes)) {
        free(own.text);
        picture->failed = 1;
        return;
    }
    picture->shapes[picture->n_shapes++] = own;
}

void cpa_picture_line(cpa_picture *picture, cpa_ink ink, const cpa_point *points, int64_t n_points, int is_dashed) {
    const cpa_shape line = {.kind = CPA_SHAPE_LINE,
                            .ink = ink,
                            .first_point = picture->n_points,
                            .n_points = n_points,
                            .is_dashed = is_dashed};
    if (!cpa_array_reserve(&picture->points, &picture->points_capacity, picture->n_points + n_points,
                           sizeof *picture->points)) {
        picture->failed = 1;
        return;
    }
    for (int64_t i = 0; i < n_points; i++) picture->points[picture->n_points++] = points[i];
    add(picture, &line, NULL);
}

void cpa_picture_box(cpa_picture *picture, cpa_ink ink, cpa_point at, double width, double height, double opacity,
                     const char *says) {
    const cpa_shape box = {
        .kind = CPA_SHAPE_BOX, .ink = ink, .at = at, .width = width, .height = height, .opacity = opacity};
    add(picture, &box, says);
}

void cpa_picture_text(cpa_picture *picture, cpa_ink ink, cpa_point at, cpa_anchor anchor, const char *text) {
    const cpa_shape shape = {.kind = CPA_SHAPE_TEXT, .ink = ink, .at = at, .anchor = anchor};
    add(picture, &shape, text);
}

void cpa_picture_release(cpa_picture *picture) {
    for (int64_t i = 0; i < picture->n_shapes; i++) free(picture->shapes[i].text);
    free(picture->shapes);
    free(picture->points);
    *picture = (cpa_picture){0};
}
