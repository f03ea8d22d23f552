#include "plot/png.h"

#include <stdio.h>

#include "base/check.h"
#include "plot/cairo_library.h"
#include "program/output_file.h"

enum { PIXELS = 2, TITLE = 24 }; /* of one of the picture's; height of the line of the title */

static void set_ink(const cpa_cairo *c, cairo_t *cairo, uint32_t colour, double opacity) {
    c->set_source_rgba(cairo, (colour >> 16) / 255.0, (colour >> 8 & 255) / 255.0, (colour & 255) / 255.0, opacity);
}

static void draw_line(const cpa_cairo *c, cairo_t *cairo, const cpa_picture *picture, const cpa_shape *line) {
    static const double dashes[] = {4, 3};
    c->new_path(cairo); /* not from where a text has ended */
    for (int64_t i = 0; i < line->n_points; i++) {
        const cpa_point *point = &picture->points[line->first_point + i];
        c->line_to(cairo, point->x, point->y);
    }
    c->set_dash(cairo, dashes, line->is_dashed ? 2 : 0, 0);
    c->set_line_width(cairo, 1.5);
    c->stroke(cairo);
}

static void draw_text(const cpa_cairo *c, cairo_t *cairo, cpa_point at, cpa_anchor anchor, const char *text) {
    cairo_text_extents_t extents;
    c->text_extents(cairo, text, &extents);
    c->move_to(cairo, at.x - extents.x_advance * anchor / CPA_ANCHOR_END, at.y);
    c->show_text(cairo, text);
}

static void draw(const cpa_cairo *c, cairo_t *cairo, const cpa_picture *picture) {
    const uint32_t *theme = cpa_theme_light;
    c->scale(cairo, PIXELS, PIXELS);
    set_ink(c, cairo, theme[CPA_INKS], 1);
    c->paint(cairo);
    c->select_font_face(cairo, "sans-serif", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
    set_ink(c, cairo, theme[CPA_INK_TEXT], 1);
    c->set_font_size(cairo, 14);
    draw_text(c, cairo, (cpa_point){8, 18}, CPA_ANCHOR_START, picture->title);
    c->set_font_size(cairo, 12);
    c->translate(cairo, 0, TITLE);
    for (int64_t i = 0; i < picture->n_shapes; i++) {
        const cpa_shape *shape = &picture->shapes[i];
        set_ink(c, cairo, theme[shape->ink], shape->kind == CPA_SHAPE_BOX ? shape->opacity : 1);
        switch (shape->kind) {
            case CPA_SHAPE_LINE: draw_line(c, cairo, picture, shape); break;
            case CPA_SHAPE_BOX:
                c->rectangle(cairo, shape->at.x, shape->at.y, shape->width, shape->height);
                c->fill(cairo);
                break;
            case CPA_SHAPE_TEXT: draw_text(c, cairo, shape->at, shape->anchor, shape->text);
        }
    }
}

static cairo_status_t put_bytes(void *file, const unsigned char *bytes, unsigned n) {
    return fwrite(bytes, 1, n, file) == n ? CAIRO_STATUS_SUCCESS : CAIRO_STATUS_WRITE_ERROR;
}

cpa_status cpa_png_write(const cpa_picture *picture, const char *path, cpa_error *err) {
    cpa_output_file output;
    cpa_cairo library;
    CPA_TRY(cpa_cairo_load(&library, err));
    const cpa_cairo *c = &library;
    CPA_TRY(cpa_output_open(path, &output, err));
    cairo_surface_t *surface = c->image_surface_create(CAIRO_FORMAT_RGB24, PIXELS * (int)picture->width,
                                                       PIXELS * ((int)picture->height + TITLE));
    cairo_t *cairo = c->create(surface);
    draw(c, cairo, picture);
    cairo_status_t drawn = c->status(cairo);
    if (drawn == CAIRO_STATUS_SUCCESS) drawn = c->surface_write_to_png_stream(surface, put_bytes, output.file);
    c->destroy(cairo);
    c->surface_destroy(surface);
    const cpa_status closed = cpa_output_close(&output, drawn == CAIRO_STATUS_SUCCESS, err);
    if (drawn == CAIRO_STATUS_SUCCESS || drawn == CAIRO_STATUS_WRITE_ERROR) return closed;
    return cpa_fail(err, drawn == CAIRO_STATUS_NO_MEMORY ? CPA_NO_MEMORY : CPA_IO, "%s: %s", path,
                    c->status_to_string(drawn));
}
