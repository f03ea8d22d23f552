/* A picture as a list of shapes, which svg.h and png.h write. Places are in pixels from its upper left corner. Memory
 * that lacks marks the picture as failed; what is added to it then is lost. */
#ifndef CPA_CHART_PICTURE_H
#define CPA_CHART_PICTURE_H

#include <stdint.h>

/* What a shape is drawn with; its colour is that of the theme. */
typedef enum cpa_ink {
    CPA_INK_TEXT = 0,
    CPA_INK_FAINT, /* grids, frames and what is no datum */
    CPA_INK_SERIES /* this and what follows: series of data */
} cpa_ink;
enum { CPA_INK_MOST_SERIES = 8, CPA_INKS = CPA_INK_SERIES + CPA_INK_MOST_SERIES };

/* The ink of the i-th series; they begin anew behind the last. */
cpa_ink cpa_ink_of_series(int64_t i);

/* Red, green and blue as 0xRRGGBB of each ink and, last, of the ground. */
extern const uint32_t cpa_theme_light[CPA_INKS + 1], cpa_theme_dark[CPA_INKS + 1];

typedef enum cpa_anchor { CPA_ANCHOR_START = 0, CPA_ANCHOR_MIDDLE, CPA_ANCHOR_END } cpa_anchor;

typedef struct cpa_point {
    double x, y;
} cpa_point;

typedef enum cpa_shape_kind { CPA_SHAPE_LINE = 0, CPA_SHAPE_BOX, CPA_SHAPE_TEXT } cpa_shape_kind;

typedef struct cpa_shape {
    cpa_shape_kind kind;
    cpa_ink ink;
    cpa_point at;                  /* upper left corner of a box; where a text is anchored, at its base line */
    double width, height;          /* box */
    double opacity;                /* box: from 0 to 1 */
    int64_t first_point, n_points; /* line: its corners among the points of the picture */
    int is_dashed;                 /* line */
    cpa_anchor anchor;             /* text */
    char *text;                    /* text, or what a box says of itself; NULL: nothing */
} cpa_shape;

/* Zeros, and title and size, to begin with. */
typedef struct cpa_picture {
    const char *name; /* name of its file */
    char title[256];  /* above the picture */
    const char *note; /* below it in a page; NULL: nothing */
    double width, height;
    cpa_shape *shapes;
    int64_t n_shapes, shapes_capacity;
    cpa_point *points;
    int64_t n_points, points_capacity;
    int failed;
} cpa_picture;

void cpa_picture_line(cpa_picture *picture, cpa_ink ink, const cpa_point *points, int64_t n_points, int is_dashed);
/* `says` is shown where a pointer rests on it; NULL: nothing. It is copied, as that of a text. */
void cpa_picture_box(cpa_picture *picture, cpa_ink ink, cpa_point at, double width, double height, double opacity,
                     const char *says);
void cpa_picture_text(cpa_picture *picture, cpa_ink ink, cpa_point at, cpa_anchor anchor, const char *text);

void cpa_picture_release(cpa_picture *picture);

#endif
